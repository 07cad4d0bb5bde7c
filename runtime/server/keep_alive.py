"""Comments in silent streams, so that proxies do not close them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .sse import ResponseWriter

_COMMENT = b": keep-alive\n\n"


@contextmanager
def kept_alive(writer: ResponseWriter, interval_s: float) -> Iterator[None]:
    """Write a comment whenever ``writer`` has been silent for ``interval_s``; 0 = never."""
    if interval_s == 0:
        yield
        return
    task = asyncio.ensure_future(_keep_alive(writer, interval_s))
    try:
        yield
    finally:
        task.cancel()


async def _keep_alive(writer: ResponseWriter, interval_s: float) -> None:
    while True:
        rest_s = interval_s - writer.silent_s
        if rest_s > 0:
            await asyncio.sleep(rest_s)
        else:
            await writer.write_events(_COMMENT)
