"""An event that one task waits for."""

import asyncio
from collections.abc import Generator
from typing import Any


class Waker:
    """An event for one waiter, cheaper than asyncio's: it has no queue.

    ``await`` it in the loop that it was made in; that clears it.
    """

    __slots__ = ("_future", "_is_set", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._is_set = False

    def set(self) -> None:
        """Wake the waiter, or let its next wait return at once."""
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
