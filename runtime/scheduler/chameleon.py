"""Queues by size with quotas of memory, so that short requests do not wait behind long ones.

A request goes to a queue by its weighted size. A queue admits by arrival while its quota lasts
(phase 1), then with what is left of it and what queues have to spare in which nobody waits (phase
2). Quotas are memory; the tokens of a step go by ``ShortPrefillFirst``.

How far a request can be overtaken by requests that arrived later:

- Within its queue only while memory refuses it although its queue has quota: by those that can run
  while its adapter is being loaded, or that will have ended before there is room for it. Queues
  pass each other meanwhile, too. All this together comes to ``max_overtaking_tokens`` tokens and
  one request; then nobody is admitted before it.
- While its queue lacks quota, by as much as other queues admit until those have ended who hold what
  it lacks. They are running, and nobody else can take it: only queues in which nobody waits lend.
  Who needs more than the quota is admitted when its queue is idle, and overdraws it.

``chameleon-paper`` has neither of the last two: see ``ChameleonPolicy``.

Source: Chameleon, section 4.2 and algorithm 1.
"""

import enum
import math
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ..plan import RequestId
from ..request import Request
from .bypass import Bypass
from .overtaking import MAX_PASSED_REQUESTS, Overtaking
from .policy import NO_ROOM, PolicyFacts, Verdict
from .prefill_order import ShortPrefillFirst
from .queues.cuts import PAPER_WEIGHTS, QueueCutter, SizeWeights
from .queues.holdings import Holdings
from .queues.recent import RecentRequests
from .size_queues import SizeQueues

_FIRST_REFRESH_REQUESTS = 64
_OUTPUT_SHARE = 0.5  # that is charged: what running requests have put out on average


class _End(enum.Enum):
    """Why a queue offers nobody else."""

    DONE = enum.auto()
    NO_QUOTA = enum.auto()
    CLOSED = enum.auto()  # and nobody else is admitted in this step


@dataclass(slots=True)
class _Step:
    """What is being admitted now."""

    now_s: float
    lenders: Sequence[int] | None = None  # queues in which nobody waits; None = phase 1
    loading: set[RequestId] = field(default_factory=set)  # were offered; their adapters come


class ChameleonPolicy:
    """Cuts queues by the requests of the last minutes; preempts the latest admitted.

    ``is_as_printed`` follows the paper where it does not contradict itself: as many queues as there
    may be, no quota that is as large as a request, all of the predicted output is charged, a queue
    has either its own remainder or what others spare, and who overruns is squashed in any case.
    Then a request that is larger than both waits as long as others keep their queues busy: for ever
    in overload. That it is admitted when nobody runs is not in the paper, nor that lenders are
    debited.
    """

    def __init__(
        self,
        facts: PolicyFacts,
        weights: SizeWeights = PAPER_WEIGHTS,
        *,
        is_as_printed: bool = False,
    ) -> None:
        self._refresh_s = facts.refresh_s
        self._refresh_at_s = -math.inf
        self._is_as_printed = is_as_printed
        self._cutter = QueueCutter(
            facts.capacity_tokens, weights, facts.num_queues, is_as_printed=is_as_printed
        )
        self._layout = self._cutter.first()
        self._queues = SizeQueues()
        output_share = 1.0 if is_as_printed else _OUTPUT_SHARE
        self._holdings = Holdings(self._layout.quotas.tokens, facts.bytes_per_token, output_share)
        self._recent = RecentRequests()
        self._refused: dict[RequestId, Request] = {}  # they wait for memory, not for quota
        self._lacking_quota: list[Request] = []
        self._is_short = False  # the last time somebody was refused memory, not only made wait
        self._has_freed = False  # somebody has ended since
        self._overtaking = Overtaking(facts.max_overtaking_tokens)
        self._bypass = Bypass(facts.times, is_as_printed=is_as_printed)
        self._prefill_order = ShortPrefillFirst(facts.times)

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, request: Request, now_s: float) -> None:
        queue = self._layout.queue_of(request)
        if request in self._holdings:
            self._stop(request)
            self._queues.add(request, queue)
            return
        self._recent.arrived(
            request,
            size_tokens=self._holdings.size_tokens(request),
            unloaded_s=self._bypass.end_s(request, 1, 0.0),
            now_s=now_s,
        )
        self._prefill_order.arrived(request)
        self._queues.add_last(request, queue)

    def remove(self, request: Request) -> None:
        self._queues.remove(request)
        self._refused.pop(request.request_id, None)

    def ended(self, request: Request, now_s: float) -> None:
        duration_s = None
        if request in self._holdings:
            duration_s = now_s - self._stop(request)
        self._recent.ended(request.request_id, duration_s)
        self._overtaking.discard(request.request_id)
        self._bypass.discard(request.request_id)
        self._prefill_order.discard(request.request_id)

    def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
        """Walk the queues twice, those of short requests first: with their quotas, with loans."""
        self._has_freed = False
        self._lacking_quota = []
        self._refresh(now_s)
        self._favour_one_if_idle()
        self._queues.fill(self._layout.queue_of)
        step = _Step(now_s)
        overdue = self._overdue()
        if overdue is not None:
            verdict = yield overdue
            if verdict is not Verdict.ADMITTED:
                self._is_short |= verdict in NO_ROOM
                return
            if not self._admit(overdue, self._layout.queue_of(overdue), step):
                return
        short = []
        for queue in range(len(self._layout.quotas.tokens)):
            end = yield from self._offer(queue, step)
            if end is _End.CLOSED:
                return
            if end is _End.NO_QUOTA:
                short.append(queue)
        step.lenders = self._queues.empty_queues
        for queue in short:
            end = yield from self._offer(queue, step)
            if end is _End.CLOSED:
                return

    def lacking_quota(self) -> Sequence[Request]:
        """The first of each queue that has nobody to borrow from."""
        return self._lacking_quota

    def upcoming(self, max_requests: int) -> Sequence[Request]:
        return self._queues.upcoming(max_requests)

    def prefill_order(self, requests: list[Request], now_s: float) -> Sequence[Request]:
        return self._prefill_order.sorted(requests)

    def squash(self, running: Collection[Request], now_s: float) -> Collection[Request]:
        """Choose those that were to end before somebody whom they passed, and have not."""
        self._holdings.grow()
        refused = {} if self._has_freed else self._refused  # they may get in without that
        return self._bypass.squash(self._holdings, refused, now_s)

    def wake_at_s(self) -> float | None:
        return self._bypass.wake_at_s()

    def victim(self, running: Collection[Request]) -> Request:
        """Choose the latest admitted."""
        return deque(running, maxlen=1).pop()

    def counts(self) -> Mapping[str, float]:
        quotas = self._layout.quotas
        return {
            "num_lanes": len(quotas.tokens),
            "slo_infeasible": not quotas.is_feasible,
            "num_squashed": self._bypass.num_squashed,
        }

    def queue_counts(self) -> Sequence[Mapping[str, float]]:
        """Free tokens are negative where a queue is overdrawn."""
        queues = zip(
            self._queues.lengths(), self._layout.quotas.tokens, self._holdings.ledger.available,
            strict=True,
        )  # fmt: skip
        return [
            {"num_waiting": length, "quota_tokens": quota, "free_tokens": free}
            for length, quota, free in queues
        ]

    def check_invariants(self) -> None:
        """Assert that quotas add up."""
        self._holdings.check_invariants()

    def _refresh(self, now_s: float) -> None:
        """Cut queues anew if it is time to."""
        if self._recent.num_arrived < _FIRST_REFRESH_REQUESTS or now_s < self._refresh_at_s:
            return
        self._refresh_at_s = now_s + self._refresh_s
        previous, self._layout = (
            self._layout, self._cutter.cut(self._recent.window(now_s - self._refresh_s)),
        )  # fmt: skip
        if previous.cutoffs != self._layout.cutoffs:
            self._queues.recut(len(self._layout.quotas.tokens))
        self._holdings.recut(self._layout.quotas.tokens, self._layout.queue_of)

    def _offer(self, queue: int, step: _Step) -> Generator[Request, Verdict, _End]:
        """Offer the requests of a queue by arrival."""
        walk = self._queues.walk(queue)
        for request in walk:
            if request.request_id in step.loading:
                continue
            if not self._has_quota(request, queue, step.lenders):
                if step.lenders is not None:
                    self._refused.pop(request.request_id, None)
                    self._lacking_quota.append(request)
                return _End.NO_QUOTA
            verdict = yield request
            if verdict is Verdict.ADMITTED:
                if not self._admit(request, queue, step):
                    return _End.CLOSED
                continue
            self._refused[request.request_id] = request
            self._is_short |= verdict in NO_ROOM
            if verdict is Verdict.NO_KV:
                self._refuse_heads()
                return _End.CLOSED
            if verdict is Verdict.NO_ADAPTER:
                return (yield from self._offer_behind(request, walk, queue, step))
            step.loading.add(request.request_id)
            if len(step.loading) >= MAX_PASSED_REQUESTS:
                return _End.CLOSED
        return _End.DONE

    def _offer_behind(
        self, head: Request, walk: Iterator[Request], queue: int, step: _Step
    ) -> Generator[Request, Verdict, _End]:
        """Offer those who will have ended before there is room for the adapter of ``head``."""
        start_s = self._bypass.start_s(head, self._holdings, step.now_s)
        for request in islice(walk, MAX_PASSED_REQUESTS):
            if (
                request.request_id in step.loading
                or not self._has_quota(request, queue, step.lenders)
                or not self._bypass.may_pass(request, start_s, self._holdings, step.now_s)
            ):
                continue
            verdict = yield request
            if verdict is Verdict.NO_KV:
                break
            if verdict is Verdict.ADMITTED:
                is_open = self._admit(request, queue, step)
                self._bypass.passed(request, head, self._holdings, step.now_s)
                if not is_open:
                    return _End.CLOSED
        return _End.DONE

    def _has_quota(self, request: Request, queue: int, lenders: Sequence[int] | None) -> bool:
        """Whether a request may be admitted, as far as quotas go."""
        ledger = self._holdings.ledger
        num_tokens = self._holdings.need_tokens(request)
        if lenders is None:
            return num_tokens <= ledger.available[queue]
        if self._is_as_printed:
            return num_tokens <= ledger.spare(lenders) or not len(self._holdings)
        return num_tokens <= ledger.available[queue] + ledger.spare(lenders) or ledger.is_idle(
            queue
        )

    def _admit(self, request: Request, queue: int, step: _Step) -> bool:
        """A request runs from now on; False if it was the last to pass somebody."""
        self.remove(request)
        is_all_lent = self._is_as_printed and step.lenders is not None
        self._holdings.start(
            request, queue, step.lenders or (), step.now_s, is_all_lent=is_all_lent
        )
        earlier = [one for one in self._refused.values() if one.arrival_s < request.arrival_s]
        self._overtaking.count(earlier, request.num_known_tokens)
        return self._overdue() is None

    def _favour_one_if_idle(self) -> None:
        """Let nobody pass the earliest who waits for memory, where nobody runs who may free any.

        Adapters that are loaded for others could keep its own away, and its own theirs, for ever.
        """
        if self._is_short and self._refused and not len(self._holdings):
            self._overtaking.close(min(self._refused.values(), key=_arrival))
        self._is_short = False

    def _refuse_heads(self) -> None:
        """Note who would be next in other queues, where memory has been refused to one."""
        lenders = self._queues.empty_queues
        for queue in range(len(self._layout.quotas.tokens)):
            head = self._queues.first(queue)
            if head is not None and self._has_quota(head, queue, lenders):
                self._refused[head.request_id] = head

    def _overdue(self) -> Request | None:
        """Return who may not be passed any more, the earliest if there are several."""
        overdue = filter(self._overtaking.is_at_bound, self._refused.values())
        return min(overdue, key=_arrival, default=None)

    def _stop(self, request: Request) -> float:
        """A request no longer runs; return when it was admitted."""
        self._has_freed = True
        self._bypass.stopped(request.request_id)
        return self._holdings.stop(request).admitted_s


def _arrival(request: Request) -> tuple[float, RequestId]:
    """Order by arrival."""
    return request.arrival_s, request.request_id
