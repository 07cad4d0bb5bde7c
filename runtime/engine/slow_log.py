"""Says in the log why requests were slow whose first token took longer than somebody wants."""

import logging

from ..scheduler.events import RequestEvent
from ..scheduler.timeline import describe
from .messages import AddRequest

_logger = logging.getLogger(__name__)


class SlowLog:
    """One line for each such request, also if it failed or was given up before a token came."""

    def __init__(self, threshold_s: float | None) -> None:
        """``threshold_s``: from the arrival in the engine; None = nobody wants to know."""
        self._threshold_s = threshold_s
        self._waiting: dict[int, str] = {}  # requests without a first token, as the log calls them

    def begin(self, request: AddRequest) -> None:
        """A request has been taken."""
        if self._threshold_s is not None:
            name = request.name or str(request.request_id)
            model = request.adapter_name or "the base model"
            self._waiting[request.request_id] = f"request {name} for {model}"

    def record(self, event: RequestEvent) -> None:
        """The scheduler tells something of a request."""
        if event.timing is None or self._threshold_s is None:
            return
        request = self._waiting.pop(event.request_id)
        engine_s = sum(event.timing.parts.values())
        if engine_s <= self._threshold_s:
            return
        what = "had its first token" if event.token_ids else f"ended ({event.finish_reason})"
        _logger.warning("%s %s after %.3g s: %s", request, what, engine_s, describe(event.timing))
