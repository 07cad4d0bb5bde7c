"""Queues by size with quotas of memory, so that short requests do not wait behind long ones.

A request joins a queue by its weighted size. In phase 1 a queue admits by arrival while its quota
lasts. In phase 2 it combines the rest of its quota with loans from empty queues.
Quotas limit memory only: ``ShortPrefillFirst`` divides the tokens of a step.

How far a request can be overtaken by requests that arrived later:

- Its queue has quota, but memory refuses it: later requests pass if they can run while its adapter
  is loaded, or are predicted to end before there is room for it. Other queues also admit. After
  ``max_overtaking_tokens`` tokens and at most one more request, no other request is admitted first.
- Its queue lacks quota: other queues admit until the running requests that hold the quota end.
  No other request can take that quota, because only empty queues lend. A request that needs more
  than the whole quota is admitted when its queue is idle, and overdraws it.

The second bound does not hold for ``chameleon-paper``: see ``ChameleonPolicy``.

Source: Chameleon, section 4.2 and algorithm 1.
"""

import enum
import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any

from ....errors import ConfigError
from ....memory.grant import Verdict
from ....plan import RequestId
from ....policy_text import check_options
from ....request import Request
from ...keyed import MAX_PASSED_REQUESTS, Overtaking
from ...policy import NO_ROOM, PolicyFacts
from ...prefill_order import ShortPrefillFirst
from ...waiting_queue import WaitingQueue
from .bypass import Bypass
from .cuts import MAX_QUEUES, OUTPUT_ONLY_WEIGHTS, PAPER_WEIGHTS, QueueCutter, SizeWeights
from .holdings import Holdings
from .recent import RecentRequests

_FIRST_REFRESH_REQUESTS = 64
_REFRESH_S = 300.0
_OUTPUT_SHARE = 0.5  # of the predicted output is charged: running requests are halfway on average


# After a refresh any number of requests may wait in the previous queues. They move to the new
# queues by arrival, while a new queue has fewer than 16 requests, and at most 32 in a step.
_MIN_QUEUE_REQUESTS = 16
_MAX_MOVED_REQUESTS = 32


class SizeQueues:
    """One queue by arrival for each size, and the queues before the last refresh."""

    def __init__(self) -> None:
        self._queues = [WaitingQueue()]
        self._old: list[WaitingQueue] = []  # before the refresh; new requests join the last of them

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def lengths(self) -> tuple[int, ...]:
        """Return the length of each queue, without requests that ``fill`` has yet to move."""
        return tuple(map(len, self._queues))

    @property
    def empty_queues(self) -> list[int]:
        """Numbers of the queues without requests."""
        return [number for number, queue in enumerate(self._queues) if not len(queue)]

    def walk(self, number: int) -> Iterator[Request]:
        """Iterate over a queue. Requests may be removed meanwhile, see ``WaitingQueue``."""
        return iter(self._queues[number])

    def first(self, number: int) -> Request | None:
        return self._queues[number].first()

    def upcoming(self, max_requests: int) -> list[Request]:
        """Return the first requests, one of each queue in turn: each step admits from all."""
        turns = chain.from_iterable(zip_longest(*self._all()))
        return list(islice((request for request in turns if request is not None), max_requests))

    def add(self, request: Request, number: int) -> None:
        self._queues[number].add(request, request.arrival_s)

    def add_last(self, request: Request, number: int) -> None:
        queue = self._old[-1] if self._old else self._queues[number]
        queue.add(request, request.arrival_s)

    def remove(self, request: Request) -> None:
        next(queue for queue in self._all() if request in queue).remove(request)

    def recut(self, num_queues: int) -> None:
        """Replace the queues by ``num_queues`` empty ones, which ``fill`` moves requests to."""
        self._old = [queue for queue in self._all() if len(queue)]
        self._queues = [WaitingQueue() for _ in range(num_queues)]

    def fill(self, queue_of: Callable[[Request], int]) -> None:
        """Move requests of the old queues while one of the new queues is short."""
        if not self._old or self._is_filled():
            return
        by_arrival = heapq.merge(*self._old, key=lambda one: (one.arrival_s, one.request_id))
        for request in islice(by_arrival, _MAX_MOVED_REQUESTS):
            self.remove(request)
            self.add(request, queue_of(request))
            if self._is_filled():
                break
        self._old = [queue for queue in self._old if len(queue)]

    def _is_filled(self) -> bool:
        return min(map(len, self._queues)) >= _MIN_QUEUE_REQUESTS

    def _all(self) -> Sequence[WaitingQueue]:
        return (*self._queues, *self._old)


class _End(enum.Enum):
    """Why a queue offers no further request."""

    DONE = enum.auto()
    NO_QUOTA = enum.auto()
    CLOSED = enum.auto()  # and no queue offers any more in this step


@dataclass(slots=True)
class _Step:
    """State of the current round of admission."""

    now_s: float
    lenders: Sequence[int] | None = None  # empty queues; None = phase 1
    loading: set[RequestId] = field(default_factory=set)  # offered already; waiting for loads


class ChameleonPolicy:
    """Chooses queues by the requests of the last minutes; preempts the latest admitted request.

    With ``is_as_printed`` it follows the paper, except where the paper contradicts itself. The
    number of queues is the maximum. A quota may be smaller than a request. All of the predicted
    output is charged. A request uses the rest of its queue's quota or loans, but not both. Each
    request that exceeds its prediction is squashed. A request that is larger than the quota and
    than the loans waits until no request is running, in overload for ever. The paper does not say
    how such a request is admitted, nor that lenders are charged.
    """

    def __init__(
        self,
        facts: PolicyFacts,
        weights: SizeWeights = PAPER_WEIGHTS,
        *,
        num_queues: int | None = None,
        refresh_s: float = _REFRESH_S,
        is_as_printed: bool = False,
    ) -> None:
        """Start with one queue.

        Args:
            facts: Of the engine.
            weights: Of the sizes that divide requests into queues.
            num_queues: Number of queues; None = chosen by the sizes of requests.
            refresh_s: Interval between divisions into queues.
            is_as_printed: See the class.
        """
        self._refresh_s = refresh_s
        self._refresh_at_s = -math.inf
        self._is_as_printed = is_as_printed
        self._cutter = QueueCutter(facts.capacity_tokens, weights, num_queues, is_as_printed=is_as_printed)
        self._layout = self._cutter.first()
        self._queues = SizeQueues()
        output_share = 1.0 if is_as_printed else _OUTPUT_SHARE
        self._holdings = Holdings(self._layout.quotas.tokens, facts.bytes_per_token, output_share)
        self._recent = RecentRequests()
        self._refused: dict[RequestId, Request] = {}  # wait for memory, not for quota
        self._lacking_quota: list[Request] = []
        self._is_short = False  # the last admission refused a request for lack of memory
        self._has_freed = False  # a request has stopped since
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
        """Walk the queues twice, short requests first: with their quotas, then with loans."""
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

    def held_back(self) -> Sequence[Request]:
        """Return the heads of queues with too little quota, loans included."""
        return self._lacking_quota

    def upcoming(self, max_requests: int) -> Sequence[Request]:
        return self._queues.upcoming(max_requests)

    def prefill_order(self, requests: list[Request], now_s: float) -> Sequence[Request]:
        return self._prefill_order.sorted(requests)

    def squash(self, running: Collection[Request], now_s: float) -> Collection[Request]:
        """Choose running requests that should have ended before a request that they passed."""
        self._holdings.grow()
        refused = {} if self._has_freed else self._refused  # they may fit now
        return self._bypass.squash(self._holdings, refused, now_s)

    def wake_at_s(self) -> float | None:
        return self._bypass.wake_at_s()

    def victim(self, running: Collection[Request]) -> Request:
        return deque(running, maxlen=1).pop()

    def counts(self) -> Mapping[str, float]:
        """Queue 0 has the smallest requests. Its free tokens are negative if it is overdrawn."""
        quotas = self._layout.quotas
        found: dict[str, float] = {
            "num_queues": len(quotas.tokens),
            "slo_infeasible": not quotas.is_feasible,
            "num_squashed": self._bypass.num_squashed,
        }
        for gauge, values in (
            ("num_waiting", self._queues.lengths()),
            ("quota_tokens", quotas.tokens),
            ("free_tokens", self._holdings.ledger.available),
        ):
            found |= {f"queue_{queue}_{gauge}": value for queue, value in enumerate(values)}
        return found

    def _refresh(self, now_s: float) -> None:
        """Choose new boundaries and quotas of the queues if a refresh is due."""
        if self._recent.num_arrived < _FIRST_REFRESH_REQUESTS or now_s < self._refresh_at_s:
            return
        self._refresh_at_s = now_s + self._refresh_s
        previous, self._layout = (
            self._layout,
            self._cutter.cut(self._recent.window(now_s - self._refresh_s)),
        )
        if previous.cutoffs != self._layout.cutoffs:
            self._queues.recut(len(self._layout.quotas.tokens))
        self._holdings.recut(self._layout.quotas.tokens, self._layout.queue_of)

    def _offer(self, queue: int, step: _Step) -> Generator[Request, Verdict, _End]:
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
        """Offer requests that are predicted to end before the adapter of ``head`` has room."""
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
        ledger = self._holdings.ledger
        num_tokens = self._holdings.need_tokens(request)
        if lenders is None:
            return num_tokens <= ledger.available[queue]
        if self._is_as_printed:
            return num_tokens <= ledger.spare(lenders) or not len(self._holdings)
        return num_tokens <= ledger.available[queue] + ledger.spare(lenders) or ledger.is_idle(queue)

    def _admit(self, request: Request, queue: int, step: _Step) -> bool:
        """Charge an admitted request. Return False if no other request may be admitted."""
        self.remove(request)
        is_all_lent = self._is_as_printed and step.lenders is not None
        self._holdings.start(request, queue, step.lenders or (), step.now_s, is_all_lent=is_all_lent)
        earlier = [one for one in self._refused.values() if one.arrival_s < request.arrival_s]
        self._overtaking.count(earlier, request.num_known_tokens)
        return self._overdue() is None

    def _favour_one_if_idle(self) -> None:
        """If no request is running, admit only the oldest request that waits for memory.

        Otherwise two requests could evict each other's adapter for ever.
        """
        if self._is_short and self._refused and not len(self._holdings):
            self._overtaking.close(min(self._refused.values(), key=_arrival))
        self._is_short = False

    def _refuse_heads(self) -> None:
        """Also count the heads of other queues as waiting for memory."""
        lenders = self._queues.empty_queues
        for queue in range(len(self._layout.quotas.tokens)):
            head = self._queues.first(queue)
            if head is not None and self._has_quota(head, queue, lenders):
                self._refused[head.request_id] = head

    def _overdue(self) -> Request | None:
        """Return the oldest request that may not be passed any more."""
        overdue = filter(self._overtaking.is_at_bound, self._refused.values())
        return min(overdue, key=_arrival, default=None)

    def _stop(self, request: Request) -> float:
        """Record that a request no longer runs. Return when it was admitted."""
        self._has_freed = True
        self._bypass.stopped(request.request_id)
        return self._holdings.stop(request).admitted_s


def _arrival(request: Request) -> tuple[float, RequestId]:
    """Sort key: arrival."""
    return request.arrival_s, request.request_id


_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "chameleon": {},
    "chameleon-paper": {"is_as_printed": True},
    "output-only": {"weights": OUTPUT_ONLY_WEIGHTS},
}


def chameleon_maker(
    name: str, options: Mapping[str, float], flag: str
) -> Callable[[PolicyFacts], ChameleonPolicy]:
    """Return what makes a variant with the options ``queues`` and ``refresh``, in seconds.

    Raises ``ConfigError`` that names ``flag``.
    """
    check_options(name, options, ("queues", "refresh"), flag)
    number, refresh_s = options.get("queues"), options.get("refresh", _REFRESH_S)
    if number is not None and number not in range(1, MAX_QUEUES + 1):
        wanted = f"a whole number from 1 to {MAX_QUEUES}"
        raise ConfigError(f"{flag} {name} has queues={number:g}, must be {wanted}")
    if refresh_s <= 0.0:
        raise ConfigError(f"{flag} {name} has refresh={refresh_s:g}, must be above 0 seconds")
    return partial(
        ChameleonPolicy,
        num_queues=None if number is None else int(number),
        refresh_s=refresh_s,
        **_VARIANTS[name],
    )
