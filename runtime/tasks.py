"""Background tasks of an event loop, and their cancellation."""

import asyncio
from collections.abc import Awaitable
from typing import Any


class TaskSet(set[asyncio.Future[None]]):
    """Tasks that no caller awaits. Each is referenced until it has ended."""

    def begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended. Their exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
