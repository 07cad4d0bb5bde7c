"""How what runs beside others on an event loop is ended."""

import asyncio
from typing import Any


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
