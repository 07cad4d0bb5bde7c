"""Background tasks of an event loop, and how they are cancelled."""

import asyncio
from collections.abc import Awaitable
from typing import Any


class TaskSet(set[asyncio.Future[None]]):
    """Tasks that no caller awaits: each is referenced until it has ended."""

    def begin(self, work: Awaitable[None]) -> None:
        """Have it run, from the loop's next turn on."""
        task = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
