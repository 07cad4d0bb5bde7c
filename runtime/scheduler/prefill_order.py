"""Order within a step: short prompts first, with ageing and up to a bound. Pure."""

from collections.abc import Sequence

from ..plan import RequestId
from ..request import Request
from .means import RunningMean
from .step_times import StepTimes

_AGEING = 10.0  # seconds of waiting that weigh as much as a second of prefill
# Mean prompts, beyond which a long one is not put off further: without a bound the longest ones pay
# for all others, and they are the slowest already.
_MAX_MEANS = 1.5


class ShortPrefillFirst:
    """Orders by arrival + 10 times the predicted seconds that are left, at most 1.5 mean prompts'.

    Requests with little left pass those with much, at most as long as 15 times what a mean prompt
    takes. The order changes only as chunks are computed, not as time goes by.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._mean_s = RunningMean()
        self._keys: dict[RequestId, tuple[int, float]] = {}  # with the tokens that were left

    @property
    def mean_s(self) -> float:
        """What a prompt takes on an idle engine, in seconds; 0 while nothing is known."""
        return self._mean_s.value

    def arrived(self, request: Request) -> None:
        """Count a new request's prompt in."""
        prefill_s = self._times.prefill_s(request.num_uncached_prompt_tokens, request.adapter_bytes)
        if prefill_s:  # 0 = nothing is known yet
            self._mean_s.add(prefill_s)

    def sorted(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Requests with more than one token to compute, the smallest key first."""
        if len(requests) < 2:
            return requests
        return sorted(requests, key=self._key)

    def discard(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._keys.pop(request_id, None)

    def _key(self, request: Request) -> tuple[float, RequestId]:
        request_id, num_pending = request.request_id, request.num_pending_tokens
        known = self._keys.get(request_id)
        if known is None or known[0] != num_pending:
            left_s = self._times.prefill_s(num_pending, request.adapter_bytes)
            weight_s = _AGEING * min(left_s, _MAX_MEANS * self.mean_s)
            known = self._keys[request_id] = num_pending, request.arrival_s + weight_s
        return known[1], request_id
