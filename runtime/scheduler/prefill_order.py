"""Order of prefill within a step: short prompts first, with ageing and a bound. Pure."""

from collections.abc import Sequence

from ..plan import RequestId
from ..request import Request
from .step_times import StepTimes

_MEAN_OF = 1000  # the newest values, approximately
_AGEING = 10.0  # seconds of waiting that weigh as much as a second of prefill
# Longer prompts count as this many mean prompts. Without a bound the longest prompts, which are the
# slowest already, would wait for all others.
_MAX_MEANS = 1.5


class RunningMean:
    """Mean of the first 1000 values, then exponentially weighted. 0 before the first value."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num_values = 0

    def add(self, value: float) -> None:
        self._num_values = min(self._num_values + 1, _MEAN_OF)
        self.value += (value - self.value) / self._num_values


class ShortPrefillFirst:
    """Orders by arrival + 10 times the remaining prefill time, capped at 1.5 mean prompts.

    Requests with little left pass those with much left, for at most 15 times the prefill time of a
    mean prompt. The order changes only when chunks are computed, not with time.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._mean_s = RunningMean()
        self._keys: dict[RequestId, tuple[int, float]] = {}  # tokens left, and key

    @property
    def mean_s(self) -> float:
        """Mean prefill time on an idle engine, in seconds; 0 while unknown."""
        return self._mean_s.value

    def arrived(self, request: Request) -> None:
        """Include the prompt of a new request in the mean."""
        prefill_s = self._times.prefill_s(request.num_uncached_prompt_tokens, request.adapter_bytes)
        if prefill_s:  # 0 = unknown
            self._mean_s.add(prefill_s)

    def sorted(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return requests with more than one token to compute, the smallest key first."""
        if len(requests) < 2:
            return requests
        return sorted(requests, key=self._key)

    def discard(self, request_id: RequestId) -> None:
        self._keys.pop(request_id, None)

    def _key(self, request: Request) -> tuple[float, RequestId]:
        request_id, num_pending = request.request_id, request.num_pending_tokens
        known = self._keys.get(request_id)
        if known is None or known[0] != num_pending:
            left_s = self._times.prefill_s(num_pending, request.adapter_bytes)
            weight_s = _AGEING * min(left_s, _MAX_MEANS * self.mean_s)
            known = self._keys[request_id] = num_pending, request.arrival_s + weight_s
        return known[1], request_id
