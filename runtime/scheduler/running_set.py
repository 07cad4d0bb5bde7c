"""The requests that hold device memory, and when they release it.

A request may end or be preempted while steps in flight use its blocks. It then keeps the blocks,
and its reference to the adapter, until the last of these steps has returned.

Computed whole blocks are stored in the prefix tree and held there. All other blocks are the
request's own. No request writes to a block in the tree: it begins behind the blocks that it found,
and stores a block when the step that filled it has returned.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from itertools import chain

from ..memory.device_memory import DeviceMemory
from ..memory.grant import Grant
from ..plan import RequestId
from ..request import Request, RequestStatus
from .limits import SchedulerConfig, blocks_for
from .timeline import Timelines


class RunningSet:
    """Running requests in order of admission, and those that still drain."""

    def __init__(self, memory: DeviceMemory, config: SchedulerConfig, timelines: Timelines) -> None:
        """``timelines``: record starts."""
        self.timelines = timelines
        self.headroom_blocks = round(config.growth_headroom * memory.num_blocks)
        self._memory = memory
        self._block_size = config.block_size
        # Tokens of a block that is stored once it is computed.
        self.kept_size = config.block_size if memory.keeps_prefixes else math.inf
        self._requests: dict[RequestId, Request] = {}
        self._grants: dict[RequestId, Grant] = {}  # of running and draining ones
        self._draining: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Collection[Request]:
        """Running requests in order of admission."""
        return self._requests.values()

    def is_draining(self, request_id: RequestId) -> bool:
        """Whether the request has stopped and steps in flight still use its memory."""
        return request_id in self._draining

    def start(self, request: Request, grant: Grant) -> None:
        assert not request.block_ids, request.request_id
        assert request.num_in_flight_steps == 0, request.request_id
        request.status = RequestStatus.RUNNING
        request.num_kept_tokens = request.num_computed_tokens = len(grant.path) * self._block_size
        request.block_ids = grant.block_ids
        request.num_allocated_tokens = len(grant.block_ids) * self._block_size
        self._requests[request.request_id] = request
        self._grants[request.request_id] = grant
        self.timelines.starts(request)

    def num_growth_blocks(self, newcomer: Request | None = None, num_found_blocks: int = 0) -> int:
        """Return how many more blocks running requests are predicted to need at the same time.

        Each request is assumed to end as predicted and to free its blocks then, so the need is
        largest just before one of the ends. ``newcomer``: a request that may be admitted now, with
        ``num_found_blocks`` blocks of a known prefix.
        """
        requests = [*self._requests.values()]
        if newcomer is not None:
            requests.append(newcomer)
        size = self._block_size
        ends = sorted([(r.num_tokens_to_come, r.num_known_tokens) for r in requests], reverse=True)
        rooms: list[int] = []  # free tokens in their last known blocks, ascending
        needs = [0]  # blocks just before each of them ends
        num_blocks = 0
        for number, (num_tokens, num_known_tokens) in enumerate(ends, start=1):
            num_known_blocks = -(-num_known_tokens // size)
            num_blocks += num_known_blocks
            insort(rooms, num_known_blocks * size - num_known_tokens)
            num_whole, num_left = divmod(num_tokens, size)
            needs.append(num_blocks + number * num_whole + bisect_left(rooms, num_left))
        num_held_blocks = sum([len(request.block_ids) for request in requests]) + num_found_blocks
        return max(0, max(needs) - num_held_blocks)

    def grow(self, request: Request) -> bool:
        """Allocate the blocks that the known tokens still need, if so many are free.

        Return whether they were free.
        """
        grant = self._grants[request.request_id]
        if not self._memory.grow(grant, self._num_missing_blocks(request)):
            return False
        request.num_allocated_tokens = len(grant.block_ids) * self._block_size
        return True

    def reclaim_for(self, requests: Iterable[Request]) -> bool:
        """Evict for the growth of these requests. Return whether it fits, now or soon."""
        return self._memory.reclaim_growth(sum(map(self._num_missing_blocks, requests)))

    def is_growth_reserved(self, request: Request) -> bool:
        """Whether the blocks that the known tokens still need are reserved."""
        return self._num_missing_blocks(request) <= self._memory.num_reserved_blocks

    def stop(self, request: Request, status: RequestStatus) -> None:
        """Stop ``request``. Its memory is freed once no step in flight uses it."""
        del self._requests[request.request_id]
        if not self._requests:  # without requests no step renews the reservation
            self._memory.pool.reserve_growth(0)
        request.status = status
        request.num_computed_tokens = 0
        request.num_allocated_tokens = 0
        if request.num_in_flight_steps:
            self._memory.retire(self._grants[request.request_id])
            self._draining[request.request_id] = request
        else:
            self._memory.release(self._grants.pop(request.request_id))

    def computed(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Store the whole blocks of the first ``num_tokens`` tokens, which have been computed."""
        if request.status is not RequestStatus.RUNNING:
            return
        size = self._block_size
        grant = self._grants[request.request_id]
        while request.num_kept_tokens + size <= num_tokens:
            start = request.num_kept_tokens
            token_ids = request.token_ids_of(start, start + size)
            self._memory.store(grant, request.kv_namespace, token_ids, now_s)
            request.num_kept_tokens += size

    def end_step(self, rows: Iterable[Iterable[Request]]) -> None:
        """Record that a step with these rows, one of each request, has returned."""
        draining = self._draining
        for request in chain.from_iterable(rows):
            request.num_in_flight_steps -= 1
            if not request.num_in_flight_steps:
                request.is_held = False
                if request.request_id in draining:
                    del draining[request.request_id]
                    self._memory.release(self._grants.pop(request.request_id))

    def _num_missing_blocks(self, request: Request) -> int:
        """Blocks between what is allocated and what the known tokens need."""
        return blocks_for(request.num_known_tokens, self._block_size) - len(request.block_ids)
