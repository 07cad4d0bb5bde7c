"""Who listens to what an engine tells of itself, and what each has not heard yet."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from .waker import Waker


class EngineWatch:
    """What is new for one listener."""

    def __init__(self) -> None:
        self.waker = Waker()
        self._names: set[str] = set()

    def changed(self, names: Iterable[str]) -> None:
        """The engine has told something; of ``names``, what they have as adapters."""
        self._names.update(names)
        self.waker.set()

    def take_names(self) -> set[str]:
        """Return the names of adapters that are otherwise than at the last call."""
        names, self._names = self._names, set()
        return names


class EngineWatches:
    """All listeners of one engine. All methods belong to its front end's loop."""

    def __init__(self) -> None:
        # Told of each request, by its id, that has been sent to the engine, and how many engine
        # requests there have been with it.
        self.on_sent: Callable[[str, int], None] | None = None
        self._watches: set[EngineWatch] = set()

    @contextlib.contextmanager
    def open(self) -> Iterator[EngineWatch]:
        """Listen inside."""
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
        """Let all know."""
        for watch in self._watches:
            watch.changed(names)
