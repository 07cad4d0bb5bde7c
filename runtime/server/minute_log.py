"""Warnings that clients can cause without limit: one line a minute, with a count."""

import asyncio
import logging

_EVERY_S = 60.0

_logger = logging.getLogger(__name__)


class MinuteLog:
    """Logs the first event at once, and those of each following minute in one line."""

    def __init__(self, text: str, *values: object) -> None:
        """``text``: a format that takes the number of events, and then ``values``."""
        self._text, self._values = text, values
        self._num_new = 0
        self._timer: asyncio.TimerHandle | None = None

    def count(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count one event."""
        self._num_new += 1
        if self._timer is None:
            self._write(loop)

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._num_new:
            _logger.warning(self._text, self._num_new, *self._values)
            self._num_new = 0
            self._timer = loop.call_later(_EVERY_S, self._write, loop)
