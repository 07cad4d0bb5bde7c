"""The requests that hold device memory, and when they give it back.

A request that ends or is preempted while steps in flight refer to its blocks keeps them, and its
hold on its adapter, until the last of these steps has returned.
"""

from bisect import bisect_left, insort
from collections.abc import Collection

from ..memory.device_memory import DeviceMemory
from ..plan import BASE_ADAPTER, BlockId, RequestId
from ..request import Request, RequestStatus
from .limits import blocks_for


class RunningSet:
    """Running requests in order of admission, and those that still drain."""

    def __init__(self, memory: DeviceMemory, block_size: int) -> None:
        """``block_size``: tokens in one KV block."""
        self._memory = memory
        self._block_size = block_size
        self._requests: dict[RequestId, Request] = {}
        self._draining: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Collection[Request]:
        """Running requests in order of admission."""
        return self._requests.values()

    def is_draining(self, request_id: RequestId) -> bool:
        """Whether the request no longer runs and its memory is not free yet."""
        return request_id in self._draining

    def start(self, request: Request, block_ids: tuple[BlockId, ...]) -> None:
        """Run ``request`` in these blocks, from its first token on."""
        assert not request.block_ids, request.request_id
        assert request.num_in_flight_steps == 0, request.request_id
        self._memory.cache.acquire(request.adapter_id)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = 0
        request.block_ids.extend(block_ids)
        request.num_allocated_tokens = len(block_ids) * self._block_size
        self._requests[request.request_id] = request

    def num_blocks_to_come(self, newcomer: Request | None = None) -> int:
        """Blocks that all need at once, at most, beyond those that they have.

        If they end as predicted: each gives its blocks back then, so the need is highest just
        before one of them ends. What others will have given back by then, is not needed twice.
        """
        requests = [*self._requests.values()]
        if newcomer is not None:
            requests.append(newcomer)
        size = self._block_size
        ends = sorted([(r.num_tokens_to_come, r.num_known_tokens) for r in requests], reverse=True)
        rooms: list[int] = []  # tokens that their last known blocks still take, ascending
        num_blocks = most_blocks = 0
        for number, (num_tokens, num_known_tokens) in enumerate(ends, start=1):
            num_known_blocks = blocks_for(num_known_tokens, size)
            num_blocks += num_known_blocks
            insort(rooms, num_known_blocks * size - num_known_tokens)
            num_whole, num_left = divmod(num_tokens, size)
            num_more = number * num_whole + bisect_left(rooms, num_left)
            most_blocks = max(most_blocks, num_blocks + num_more)
        return max(0, most_blocks - sum(len(request.block_ids) for request in requests))

    def promise_growth(self) -> None:
        """Keep for running requests what they are predicted to need."""
        self._memory.pool.promise(self.num_blocks_to_come())

    def grow(self, request: Request) -> bool:
        """Allocate what the known tokens lack if it is free; say whether it was."""
        block_ids = self._memory.pool.allocate(self._num_missing_blocks(request))
        if block_ids is None:
            return False
        request.block_ids.extend(block_ids)
        request.num_allocated_tokens = len(request.block_ids) * self._block_size
        return True

    def reclaim_for(self, request: Request) -> bool:
        """Whether room for the growth of ``request`` comes without preempting anybody."""
        return self._memory.reclaim(
            self._num_missing_blocks(request), 0, include_waiting=True, keep=BASE_ADAPTER
        )

    def is_growth_promised(self, request: Request) -> bool:
        """Whether the blocks that the known tokens lack were promised."""
        return self._num_missing_blocks(request) <= self._memory.pool.num_promised_blocks

    def stop(self, request: Request, status: RequestStatus) -> None:
        """Let ``request`` no longer run; its memory is freed once no step refers to it."""
        del self._requests[request.request_id]
        if not self._requests:  # nobody may ask before the next one begins
            self._memory.pool.promise(0)
        request.status = status
        request.num_computed_tokens = 0
        request.num_allocated_tokens = 0
        if request.num_in_flight_steps:
            self._memory.retire(request.block_ids)
            self._draining[request.request_id] = request
        else:
            self._memory.pool.free(request.block_ids)
            self._let_go(request)

    def end_step(self, request: Request) -> None:
        """One step in flight with a row of ``request`` has returned."""
        request.num_in_flight_steps -= 1
        if request.num_in_flight_steps == 0:
            request.is_held = False
            if self._draining.pop(request.request_id, None) is not None:
                self._memory.free_retired(request.block_ids)
                self._let_go(request)

    def check_invariants(self) -> None:
        """Assert that blocks, tokens and states of all requests agree."""
        holders = [*self._requests.values(), *self._draining.values()]
        block_ids = [block_id for request in holders for block_id in request.block_ids]
        assert len(set(block_ids)) == len(block_ids), "a block has two owners"
        assert len(block_ids) == self._memory.pool.num_used_blocks
        for request in self._requests.values():
            assert request.status is RequestStatus.RUNNING
            assert request.num_allocated_tokens == len(request.block_ids) * self._block_size
            assert request.num_computed_tokens <= request.num_allocated_tokens
            assert request.num_computed_tokens <= request.num_known_tokens
        for request in self._draining.values():
            assert request.status is not RequestStatus.RUNNING
            assert request.num_in_flight_steps > 0

    def _num_missing_blocks(self, request: Request) -> int:
        """Blocks between what is allocated and what the known tokens need."""
        return blocks_for(request.num_known_tokens, self._block_size) - len(request.block_ids)

    def _let_go(self, request: Request) -> None:
        """Forget the freed blocks and end the hold on the adapter."""
        request.block_ids.clear()
        self._memory.cache.release(request.adapter_id)
