"""Order within a step: short prompts first, with ageing. Pure."""

from collections.abc import Sequence

from ..plan import RequestId
from ..request import Request
from .step_times import StepTimes

_AGEING = 5.0  # seconds of waiting that weigh as much as a second of prefill


class ShortPrefillFirst:
    """Orders by arrival + 5 times the predicted seconds of what is left to compute.

    Requests with little left pass those with much, at most as long as five times the difference.
    The order changes only as chunks are computed, not as time goes by.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._keys: dict[RequestId, tuple[int, float]] = {}  # with the tokens that were left

    def sorted(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Requests with more than one token to compute, the smallest key first."""
        if len(requests) < 2:
            return requests
        return sorted(requests, key=self._key)

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._keys.pop(request_id, None)

    def _key(self, request: Request) -> tuple[float, RequestId]:
        request_id, num_pending = request.request_id, request.num_pending_tokens
        known = self._keys.get(request_id)
        if known is None or known[0] != num_pending:
            left_s = self._times.prefill_s(num_pending, request.adapter_bytes)
            known = self._keys[request_id] = num_pending, request.arrival_s + _AGEING * left_s
        return known[1], request_id
