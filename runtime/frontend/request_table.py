"""The open requests of ``AsyncEngine``: whose update is it, and who wants to hear of it.

Knows nothing of how messages come and go.
"""

from collections.abc import Callable, Sequence

from ..engine.messages import RequestUpdate
from ..errors import EngineDeadError, RequestError
from .generation import Generation

# Called when a generation has something new, or has failed; must not raise.
Notify = Callable[[Generation], None]


class _Open:
    __slots__ = ("generation", "has_news", "notify")

    def __init__(self, generation: Generation, notify: Notify) -> None:
        self.generation = generation
        self.notify = notify
        self.has_news = False


class RequestTable:
    """Generations by their engine requests, each with what is called for what is new."""

    def __init__(self) -> None:
        self._by_engine_id: dict[int, _Open] = {}
        self._by_id: dict[str, _Open] = {}

    def __len__(self) -> int:
        """Engine requests that are open."""
        return len(self._by_engine_id)

    def check_new(self, request_id: str) -> None:
        """Raise ``RequestError`` if a request with this id is open."""
        if request_id in self._by_id:
            raise RequestError(f"a request with id {request_id!r} is open", param="request_id")

    def add(self, generation: Generation, notify: Notify) -> None:
        """Enter a generation."""
        entry = self._by_id[generation.request_id] = _Open(generation, notify)
        for engine_id in generation.engine_ids:
            self._by_engine_id[engine_id] = entry

    def remove(self, generation: Generation) -> None:
        """Forget a generation."""
        self._by_id.pop(generation.request_id, None)
        for engine_id in generation.engine_ids:
            self._by_engine_id.pop(engine_id, None)

    def find(self, request_id: str) -> Generation | None:
        """Return the open generation with this id."""
        entry = self._by_id.get(request_id)
        return None if entry is None else entry.generation

    def take(self, updates: Sequence[RequestUpdate]) -> tuple[int, ...]:
        """Deliver updates; return the engine requests that nobody needs any more.

        A generation is notified once, however many of its choices go on.
        """
        unneeded = []
        touched = []
        for update in updates:
            entry = self._by_engine_id.get(update.request_id)
            if entry is None:  # closed meanwhile
                continue
            if entry.generation.update(update):
                unneeded.append(update.request_id)
            if not entry.has_news:
                entry.has_news = True
                touched.append(entry)
        for entry in touched:
            entry.has_news = False
            entry.notify(entry.generation)
        return tuple(unneeded)

    def fail_all(self, error: EngineDeadError) -> None:
        """End everything with ``error``."""
        for entry in tuple(self._by_id.values()):
            entry.generation.fail(EngineDeadError(str(error)))  # each is raised in its own task
            entry.notify(entry.generation)
