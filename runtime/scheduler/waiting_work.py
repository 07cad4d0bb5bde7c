"""Sums over waiting requests, updated as they come and go. Pure."""

from collections import Counter
from collections.abc import Iterable

from ..memory.adapter_cache import AdapterCache
from ..plan import RequestId
from ..request import Request, RequestStatus


class WaitingWork:
    """Sums over waiting requests, preempted ones included."""

    def __init__(self, cache: AdapterCache) -> None:
        """``cache``: spares the adapters that waiting requests name."""
        self._cache = cache
        self.num_by_rank = Counter[int]()  # by adapter rank; 0 = the base model
        self._tokens: dict[RequestId, int] = {}
        self.num_tokens = 0  # to compute, without known prefixes

    def add(self, request: Request) -> None:
        """Include a request that waits from now on."""
        self._cache.add_waiting(request.adapter_id)
        num_tokens = request.num_known_tokens - request.found.num_known_prefix_tokens
        self._tokens[request.request_id] = num_tokens
        self.num_tokens += num_tokens
        self.num_by_rank[request.adapter_rank] += 1

    def remove(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        self._cache.remove_waiting(request.adapter_id)
        self.num_tokens -= self._tokens.pop(request.request_id)
        rank = request.adapter_rank
        self.num_by_rank[rank] -= 1
        if not self.num_by_rank[rank]:
            del self.num_by_rank[rank]

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Assert that exactly the waiting ones of ``requests`` are counted."""
        waiting = [one for one in requests if one.status is RequestStatus.WAITING]
        assert self._tokens.keys() == {one.request_id for one in waiting}
        assert self.num_tokens == sum(self._tokens.values())
        assert self.num_by_rank == Counter(one.adapter_rank for one in waiting)
