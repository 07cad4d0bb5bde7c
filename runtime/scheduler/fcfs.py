"""First come, first served, with prefetch of adapters: S-LoRA's order.

How far a request can be overtaken: a request that finds no memory is never overtaken. One whose
adapter is being loaded is overtaken by requests that can run meanwhile, until
``max_overtaking_tokens`` tokens (prompt and recomputed output) of later-arrived requests have
been admitted before it, over all its loads; from then on nobody passes it. The bound is exceeded
by at most one request.
"""

import bisect
from collections.abc import Collection, Generator, Sequence

from ..plan import RequestId
from ..request import Request
from .policy import NO_ROOM, PolicyFacts, Verdict

_Entry = tuple[float, RequestId, Request]


class FcfsPolicy:
    """Admits by arrival; preempts the latest arrival."""

    def __init__(self, facts: PolicyFacts) -> None:
        self._max_overtaking_tokens = facts.max_overtaking_tokens
        self._waiting: list[_Entry] = []  # by arrival
        self._overtaking_tokens: dict[RequestId, int] = {}  # of requests that were overtaken

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, now_s: float) -> None:
        """Insert by arrival: a preempted request comes before those that arrived after it."""
        bisect.insort(self._waiting, _entry(request))

    def remove(self, request: Request) -> None:
        """Take a request out of the queue."""
        index = bisect.bisect_left(self._waiting, _entry(request))
        assert self._waiting[index][2] is request, request.request_id
        del self._waiting[index]

    def ended(self, request: Request, now_s: float) -> None:
        """Forget what is noted of a request."""
        self._overtaking_tokens.pop(request.request_id, None)

    def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
        """Offer requests by arrival; one without memory blocks those behind."""
        passed: list[Request] = []
        for _, _, request in tuple(self._waiting):
            verdict = yield request
            if verdict in NO_ROOM:
                return
            if verdict is Verdict.LOADING:
                passed.append(request)
            else:
                self.remove(request)
                self._count_overtaking(passed, request.num_known_tokens)
            if any(self._is_at_bound(waiting) for waiting in passed):
                return

    def upcoming(self, max_requests: int) -> Sequence[Request]:
        """Return the requests that arrived first."""
        return [request for _, _, request in self._waiting[:max_requests]]

    def prefill_order(self, requests: list[Request], now_s: float) -> Sequence[Request]:
        """Keep the order of admission."""
        return requests

    def squash(self, running: Collection[Request], now_s: float) -> Collection[Request]:
        return ()

    def wake_at_s(self) -> float | None:
        return None

    def victim(self, running: Collection[Request]) -> Request:
        """Choose the latest arrival."""
        return max(running, key=lambda request: (request.arrival_s, request.request_id))

    def _count_overtaking(self, passed: list[Request], num_tokens: int) -> None:
        """Note that ``num_tokens`` were admitted before the requests in ``passed``."""
        for waiting in passed:
            request_id = waiting.request_id
            self._overtaking_tokens[request_id] = (
                self._overtaking_tokens.get(request_id, 0) + num_tokens
            )

    def _is_at_bound(self, request: Request) -> bool:
        """Whether nobody may overtake ``request`` any more."""
        num_tokens = self._overtaking_tokens.get(request.request_id, 0)
        return num_tokens >= self._max_overtaking_tokens


def _entry(request: Request) -> _Entry:
    """Return the sort entry; ids are unique, so requests themselves are never compared."""
    return (request.arrival_s, request.request_id, request)
