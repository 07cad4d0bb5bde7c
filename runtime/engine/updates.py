"""Turns the scheduler's events into messages to the front end."""

import logging

from ..scheduler.events import RequestEvent, TimeParts
from .messages import ColdStartInfo, RequestTiming, RequestUpdate

_logger = logging.getLogger(__name__)


def update_of(event: RequestEvent) -> RequestUpdate:
    """Return the message for an event."""
    if event.timing is None and event.cold_start is None:
        return RequestUpdate(*event[:-2])
    start = event.cold_start
    if start is not None:
        _logger.info("request %d: cold start: %s: %s", event.request_id, *start)
    return RequestUpdate(
        *event[:-2],
        timing=None if event.timing is None else _timing_of(event.timing),
        cold_start=None if start is None else ColdStartInfo(*start),
    )


def _timing_of(timing: TimeParts) -> RequestTiming:
    parts = {part.value: seconds for part, seconds in timing.parts.items()}
    return RequestTiming(parts, timing.num_predicted_output_tokens, timing.adapter_version)
