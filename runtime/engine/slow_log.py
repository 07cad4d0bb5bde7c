"""Logs why the first token of a request was slow (``--log-slow-s``)."""

import logging

from ..scheduler.events import RequestEvent
from ..scheduler.timeline import describe
from .messages import AddRequest

_logger = logging.getLogger(__name__)


class SlowLog:
    """Logs one line for each slow request, even if it failed or was aborted before a token."""

    def __init__(self, threshold_s: float | None) -> None:
        """``threshold_s``: since the arrival in the engine; None = off."""
        self._threshold_s = threshold_s
        self._waiting: dict[int, str] = {}  # descriptions of requests without a first token

    def begin(self, request: AddRequest) -> None:
        """Add a request."""
        if self._threshold_s is not None:
            name = request.name or str(request.request_id)
            model = request.adapter_name or "the base model"
            self._waiting[request.request_id] = f"request {name} for {model}"

    def record(self, event: RequestEvent) -> None:
        """Record an event of the scheduler."""
        if event.timing is None or self._threshold_s is None:
            return
        request = self._waiting.pop(event.request_id)
        engine_s = sum(event.timing.parts.values())
        if engine_s <= self._threshold_s:
            return
        what = "had its first token" if event.token_ids else f"ended ({event.finish_reason})"
        _logger.warning("%s %s after %.3g s: %s", request, what, engine_s, describe(event.timing))
