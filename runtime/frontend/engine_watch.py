"""Watches of an engine: each collects the changes that its reader has not seen yet."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from .waker import Waker


class EngineWatch:
    """The changes that are new to one reader."""

    def __init__(self) -> None:
        self.waker = Waker()
        self._names: set[str] = set()

    def changed(self, names: Iterable[str]) -> None:
        """The engine has published something; ``names``: adapters that changed."""
        self._names.update(names)
        self.waker.set()

    def take_names(self) -> set[str]:
        """Return the names of adapters that changed since the last call."""
        names, self._names = self._names, set()
        return names


class EngineWatches:
    """All watches of one engine. All methods belong to its front end's loop."""

    def __init__(self) -> None:
        # Called for each request sent to the engine, with its id and the number of engine requests
        # sent so far, its own included.
        self.on_sent: Callable[[str, int], None] | None = None
        self._watches: set[EngineWatch] = set()

    @contextlib.contextmanager
    def open(self) -> Iterator[EngineWatch]:
        """A watch inside the block."""
        watch = EngineWatch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def sent(self, request_id: str, num_requests: int) -> None:
        """See ``on_sent``."""
        if self.on_sent is not None:
            self.on_sent(request_id, num_requests)

    def changed(self, names: Iterable[str] = ()) -> None:
        """Notify all watches."""
        for watch in self._watches:
            watch.changed(names)
