"""The open requests of ``AsyncEngine``: whose update is it, and who waits for it.

Knows nothing of how messages come and go.
"""

import asyncio
from collections.abc import Generator, Sequence
from typing import Any

from ..engine.messages import AddRequest, RequestUpdate
from ..errors import EngineDeadError, RequestError
from .generation import Generation


class Waker:
    """An event for one waiter, which clears it: ``await`` it in the loop that it was made in."""

    __slots__ = ("_future", "_is_set", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._is_set = False

    def set(self) -> None:
        """Wake the waiter, or spare it the next wait."""
        self._is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[Any, None, None]:
        if not self._is_set:
            self._future = self._loop.create_future()
            try:
                yield from self._future
            finally:
                self._future = None
        self._is_set = False


class RequestTable:
    """Generations by their engine requests, and a waker for each that its consumer waits on."""

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}
        self._wakers: dict[str, Waker] = {}

    def __len__(self) -> int:
        """Engine requests that are open."""
        return len(self._generations)

    def check_new(self, request_id: str) -> None:
        """Raise ``RequestError`` if a request with this id is open."""
        if request_id in self._wakers:
            raise RequestError(f"a request with id {request_id!r} is open", param="request_id")

    def add(self, generation: Generation, requests: Sequence[AddRequest]) -> Waker:
        """Enter a generation; the waker is set whenever it has something new."""
        for request in requests:
            self._generations[request.request_id] = generation
        waker = self._wakers[generation.request_id] = Waker()
        return waker

    def remove(self, generation: Generation) -> None:
        """Forget a generation."""
        self._wakers.pop(generation.request_id, None)
        for engine_id in generation.engine_ids:
            self._generations.pop(engine_id, None)

    def find(self, request_id: str) -> Generation | None:
        """Return the open generation with this id."""
        generations = self._generations.values()
        return next((one for one in generations if one.request_id == request_id), None)

    def take(self, updates: Sequence[RequestUpdate]) -> tuple[int, ...]:
        """Deliver updates; return the engine requests that nobody needs any more."""
        unneeded = []
        for update in updates:
            generation = self._generations.get(update.request_id)
            if generation is None:  # closed meanwhile
                continue
            if generation.update(update):
                unneeded.append(update.request_id)
            self._wakers[generation.request_id].set()
        return tuple(unneeded)

    def fail_all(self, error: EngineDeadError) -> None:
        """End everything with ``error``."""
        for generation in set(self._generations.values()):
            generation.fail(EngineDeadError(str(error)))  # each is raised in a task of its own
        for waker in self._wakers.values():
            waker.set()
