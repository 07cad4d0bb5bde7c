"""Decides which requests may pass a waiting request that has no room for its adapter. Pure.

Source: Chameleon, section 4.2 (Bypassing Adapter Blocking). The paper does not define how long the
blocked request waits. Here: until enough running requests are predicted to have ended.
"""

from collections.abc import Container
from dataclasses import dataclass
from operator import itemgetter

from ....plan import RequestId
from ....request import Request
from ...step_times import StepTimes
from .holdings import Holdings


@dataclass(frozen=True, slots=True)
class _Passing:
    """A running request that passed ``head``, because ``head`` had no room."""

    request: Request
    head: Request
    end_s: float  # as predicted when it was admitted


class Bypass:
    """Predicts ends, and records which running request passed which waiting one."""

    def __init__(self, times: StepTimes, *, is_as_printed: bool) -> None:
        """``is_as_printed``: as the paper says, squash each request that exceeds its prediction.

        Otherwise requests are squashed only if that frees enough.
        """
        self._times = times
        self._is_as_printed = is_as_printed
        self._passings: dict[RequestId, _Passing] = {}  # by running request
        self._squashed: set[RequestId] = set()  # may not pass again
        self._decode_s: dict[int, float] = {}  # by rows, cached for this step
        self._looked_at_s = 0.0
        self.num_squashed = 0

    def may_pass(self, request: Request, start_s: float, holdings: Holdings, now_s: float) -> bool:
        if request.request_id in self._squashed:
            return False
        return self.end_s(request, len(holdings) + 1, now_s) <= start_s

    def end_s(self, request: Request, num_rows: int, now_s: float) -> float:
        """Predict the end of a request that runs from now on in steps of ``num_rows`` rows.

        If a request has exceeded its predicted output by n tokens, n more are expected.
        """
        num_known_output = request.num_known_tokens - request.num_prompt_tokens
        num_left = max(1, abs(request.num_predicted_output_tokens - num_known_output))
        decode_s = self._decode_s.get(num_rows)
        if decode_s is None:
            decode_s = self._decode_s[num_rows] = self._times.decode_step_s(num_rows)
        end_s = now_s + num_left * decode_s
        num_pending = request.num_pending_tokens
        if num_pending > 1:
            end_s += self._times.prefill_s(num_pending, request.adapter_bytes)
        return end_s

    def start_s(self, head: Request, holdings: Holdings, now_s: float) -> float:
        """Predict when enough running requests have ended for ``head`` to start."""
        lacking = _lacking_tokens(head, holdings, 1)
        num_rows = len(holdings)
        start_s = now_s
        by_end = [(self.end_s(one, num_rows, now_s), one) for one in holdings.requests]
        for end_s, request in sorted(by_end, key=itemgetter(0)):
            start_s = end_s
            lacking -= holdings.freed_tokens(request)
            if lacking <= 0:
                break
        return start_s

    def passed(self, request: Request, head: Request, holdings: Holdings, now_s: float) -> None:
        """Record that ``request``, which runs now, was admitted before ``head``."""
        end_s = self.end_s(request, len(holdings), now_s)
        self._passings[request.request_id] = _Passing(request, head, end_s)

    def squash(self, holdings: Holdings, refused: Container[RequestId], now_s: float) -> list[Request]:
        """Choose overdue requests to preempt: as few as ``head`` needs, the latest first.

        ``refused``: requests that wait for memory.
        """
        self._looked_at_s = now_s
        self._decode_s.clear()
        if not self._passings:
            return []
        late: dict[RequestId, list[_Passing]] = {}  # by passed request
        for passing in reversed(self._passings.values()):
            if passing.end_s <= now_s and passing.head.request_id in refused:
                late.setdefault(passing.head.request_id, []).append(passing)
        chosen = [request for passings in late.values() for request in self._choose(passings, holdings)]
        self._squashed.update(request.request_id for request in chosen)
        self.num_squashed += len(chosen)
        return chosen

    def wake_at_s(self) -> float | None:
        """Return the next predicted end of a request that passed another."""
        ends_s = [one.end_s for one in self._passings.values() if one.end_s > self._looked_at_s]
        return min(ends_s, default=None)

    def stopped(self, request_id: RequestId) -> None:
        self._passings.pop(request_id, None)

    def discard(self, request_id: RequestId) -> None:
        self._squashed.discard(request_id)

    def _choose(self, passings: list[_Passing], holdings: Holdings) -> list[Request]:
        """Choose as many as ``head`` needs to start; none if all of them free too little."""
        requests = [passing.request for passing in passings]
        if self._is_as_printed:
            return requests
        head = passings[0].head
        lacking = _lacking_tokens(head, holdings, max(1, holdings.adapter_tokens(head)))
        chosen = []
        for request in requests:
            if lacking <= 0:
                break
            chosen.append(request)
            lacking -= holdings.freed_tokens(request)
        return chosen if lacking <= 0 else []


def _lacking_tokens(head: Request, holdings: Holdings, num_unseen: int) -> int:
    """Return how many more free tokens ``head`` needs to run.

    If the ledger has enough, memory refused ``head`` for a reason that the ledger does not see:
    free memory is fragmented, or idle adapters occupy it. Then the answer is ``num_unseen``.
    """
    lacking = holdings.need_tokens(head) - holdings.ledger.free_tokens
    return lacking if lacking > 0 else num_unseen
