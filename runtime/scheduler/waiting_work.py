"""What waits, in sums that are kept as requests come and go: there may be very many. Pure."""

from collections import Counter
from collections.abc import Iterable

from ..plan import RequestId
from ..request import Request, RequestStatus


class WaitingWork:
    """Sums over the requests that wait, preempted ones included."""

    def __init__(self) -> None:
        self.num_by_rank = Counter[int]()  # of their adapters; 0 = the base model
        self._tokens: dict[RequestId, int] = {}
        self.num_tokens = 0  # to compute until each has caught up, as far as it was known

    def add(self, request: Request) -> None:
        """It waits from now on."""
        num_tokens = request.num_known_tokens - request.num_known_prefix_tokens
        self._tokens[request.request_id] = num_tokens
        self.num_tokens += num_tokens
        self.num_by_rank[request.adapter_rank] += 1

    def remove(self, request: Request) -> None:
        """It does not any more."""
        self.num_tokens -= self._tokens.pop(request.request_id)
        rank = request.adapter_rank
        self.num_by_rank[rank] -= 1
        if not self.num_by_rank[rank]:
            del self.num_by_rank[rank]

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Assert that those among ``requests`` that wait are counted, and no others."""
        waiting = [one for one in requests if one.status is RequestStatus.WAITING]
        assert self._tokens.keys() == {one.request_id for one in waiting}
        assert self.num_tokens == sum(self._tokens.values())
        assert self.num_by_rank == Counter(one.adapter_rank for one in waiting)
