"""Writes the parts of a streamed answer past uvicorn's ``send``.

``send`` asks of every message what it may be, in a coroutine of its own: a tenth of the processor
time of a streamed token. What it does in the end with one more part of an answer that has begun is
done here; anything else is left to it.
"""

import asyncio
import logging
from typing import Final

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

RAW_SEND: Final = "corun.send"  # key of a scope: the server's own ``send``

_logger = logging.getLogger(__name__)


class PartWriter:
    """Writes parts to one connection, while one answer of it is open."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport: asyncio.Transport = cycle.transport

    def write(self, part: bytes) -> bool:
        """Write ``part``, not empty; return False if it is to be sent instead, as that may wait."""
        if self._flow.write_paused:
            return False
        if not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True


class PartWriters:
    """Finds a writer for each stream, where that is wanted and the server is as we know it."""

    def __init__(self, *, is_wanted: bool) -> None:
        """What is not wanted is not looked for: ``send`` then takes all parts."""
        self._is_wanted = is_wanted

    def find(self, scope: Scope) -> PartWriter | None:
        """Return a writer for the answer to ``scope``, which has begun; None: ``send`` its parts.

        Warns the first time that none is found.
        """
        if not self._is_wanted:
            return None
        cycle = getattr(scope.get(RAW_SEND), "__self__", None)
        if isinstance(cycle, RequestResponseCycle) and _is_known(cycle):
            return PartWriter(cycle)
        self._is_wanted = False
        _logger.warning(
            "streams are sent through ASGI, which takes more processor time: uvicorn %s is not "
            "as this version of corun knows it, or another server runs",
            uvicorn.__version__,
        )
        return None


def _is_known(cycle: RequestResponseCycle) -> bool:
    try:
        return (
            cycle.chunked_encoding is True
            and cycle.response_started is True
            and cycle.response_complete is False
            and isinstance(cycle.flow.write_paused, bool)
            and isinstance(cycle.disconnected, bool)
            and callable(cycle.transport.write)
        )
    except AttributeError:
        return False
