"""The requests that hold device memory, and when they release it.

A request may end or be preempted while steps in flight use its blocks. It then keeps the blocks,
and its reference to the adapter, until the last of these steps has returned.

Computed whole blocks are stored in the prefix tree and held there. All other blocks are the
request's own. No request writes to a block in the tree: it begins behind the blocks that it found,
and stores a block when the step that filled it has returned.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..memory.device_memory import DeviceMemory
from ..memory.kv_tree import KvNode
from ..plan import BASE_ADAPTER, BlockId, RequestId
from ..request import Request, RequestStatus
from .limits import blocks_for
from .timeline import Timelines


@dataclass(slots=True, eq=False)
class _Holder:
    """A request with its blocks in the tree, in order."""

    request: Request
    path: list[KvNode] = field(default_factory=list)
    num_retired_blocks: int = 0

    def own_block_ids(self) -> list[BlockId]:
        """Blocks that are not in the tree, for example because the tree had equal blocks."""
        block_ids, path = self.request.block_ids, self.path
        own = [
            block_id
            for block_id, node in zip(block_ids, path, strict=False)
            if node.block_id != block_id
        ]
        return own + block_ids[len(path) :]


class RunningSet:
    """Running requests in order of admission, and those that still drain."""

    def __init__(self, memory: DeviceMemory, block_size: int, timelines: Timelines) -> None:
        """``block_size``: tokens in one KV block; ``timelines``: record starts."""
        self.timelines = timelines
        self._memory = memory
        self._block_size = block_size
        self._requests: dict[RequestId, Request] = {}
        self._holders: dict[RequestId, _Holder] = {}  # running and draining ones
        self._draining: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Collection[Request]:
        """Running requests in order of admission."""
        return self._requests.values()

    def is_draining(self, request_id: RequestId) -> bool:
        """Whether the request has stopped and steps in flight still use its memory."""
        return request_id in self._draining

    def start(
        self, request: Request, path: Sequence[KvNode], block_ids: tuple[BlockId, ...],
        now_s: float,
    ) -> None:  # fmt: skip
        """Run ``request`` with the held blocks of ``path``, followed by ``block_ids``."""
        assert not request.block_ids, request.request_id
        assert request.num_in_flight_steps == 0, request.request_id
        self._memory.cache.acquire(request.adapter_id, now_s)
        request.status = RequestStatus.RUNNING
        request.num_kept_tokens = request.num_computed_tokens = len(path) * self._block_size
        for node in path:
            assert node.block_id is not None, "its block is not on the device"
            request.block_ids.append(node.block_id)
        request.block_ids.extend(block_ids)
        request.num_allocated_tokens = len(request.block_ids) * self._block_size
        self._requests[request.request_id] = request
        self._holders[request.request_id] = _Holder(request, list(path))
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
        num_held_blocks = sum(len(request.block_ids) for request in requests) + num_found_blocks
        return max(0, max(needs) - num_held_blocks)

    def reserve_growth(self) -> None:
        """Reserve the blocks that running requests are predicted to need."""
        self._memory.pool.reserve_growth(self.num_growth_blocks())

    def grow(self, request: Request) -> bool:
        """Allocate the blocks that the known tokens still need, if so many are free.

        Return whether they were free.
        """
        block_ids = self._memory.pool.allocate(self._num_missing_blocks(request))
        if block_ids is None:
            return False
        request.block_ids.extend(block_ids)
        request.num_allocated_tokens = len(request.block_ids) * self._block_size
        return True

    def reclaim_for(self, requests: Iterable[Request]) -> bool:
        """Evict for the growth of these requests. Return whether it fits, now or soon."""
        num_blocks = sum(map(self._num_missing_blocks, requests))
        return self._memory.reclaim(num_blocks, 0, include_waiting=True, keep=BASE_ADAPTER)

    def is_growth_reserved(self, request: Request) -> bool:
        """Whether the blocks that the known tokens still need are reserved."""
        return self._num_missing_blocks(request) <= self._memory.pool.num_reserved_blocks

    def stop(self, request: Request, status: RequestStatus) -> None:
        """Stop ``request``. Its memory is freed once no step in flight uses it."""
        del self._requests[request.request_id]
        if not self._requests:  # without requests no step renews the reservation
            self._memory.pool.reserve_growth(0)
        request.status = status
        request.num_computed_tokens = 0
        request.num_allocated_tokens = 0
        holder = self._holders[request.request_id]
        if request.num_in_flight_steps:
            holder.num_retired_blocks = self._memory.retire(holder.path, holder.own_block_ids())
            self._draining.add(request.request_id)
        else:
            self._release(holder)

    def computed(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Store the whole blocks of the first ``num_tokens`` tokens, which have been computed."""
        size = self._block_size
        if request.num_kept_tokens + size > num_tokens or not self._memory.prefixes.is_on:
            return
        if request.status is not RequestStatus.RUNNING:
            return
        path = self._holders[request.request_id].path
        while request.num_kept_tokens + size <= num_tokens:
            start = request.num_kept_tokens
            node = self._memory.prefixes.store(
                request.adapter_id,
                request.kv_namespace,
                path[-1] if path else None,
                request.token_ids_of(start, start + size),
                request.block_ids[len(path)],
                now_s,
            )
            path.append(node)
            request.num_kept_tokens += size

    def end_step(self, request: Request) -> None:
        """Record that a step with a row of ``request`` has returned."""
        request.num_in_flight_steps -= 1
        if request.num_in_flight_steps == 0:
            request.is_held = False
            if request.request_id in self._draining:
                self._draining.remove(request.request_id)
                self._release(self._holders[request.request_id])

    def check_invariants(self) -> None:
        """Assert that blocks, tokens and states of all requests agree."""
        assert self._holders.keys() == self._requests.keys() | self._draining
        own = [block_id for holder in self._holders.values() for block_id in holder.own_block_ids()]
        shared = {node.block_id for holder in self._holders.values() for node in holder.path}
        if self._memory.swapper is not None:
            shared |= self._memory.swapper.held_blocks()
        assert len(set(own)) == len(own), "a block has two owners"
        assert not shared.intersection(own), "a block of the tree is a request's own"
        assert len(own) + len(shared) == self._memory.pool.num_used_blocks
        for request in self._requests.values():
            assert request.status is RequestStatus.RUNNING
            assert request.num_allocated_tokens == len(request.block_ids) * self._block_size
            assert request.num_computed_tokens <= request.num_allocated_tokens
            assert request.num_computed_tokens <= request.num_known_tokens
        for request_id in self._draining:
            request = self._holders[request_id].request
            assert request.status is not RequestStatus.RUNNING
            assert request.num_in_flight_steps > 0

    def _num_missing_blocks(self, request: Request) -> int:
        """Blocks between what is allocated and what the known tokens need."""
        return blocks_for(request.num_known_tokens, self._block_size) - len(request.block_ids)

    def _release(self, holder: _Holder) -> None:
        """Free the blocks and release the adapter."""
        request = holder.request
        del self._holders[request.request_id]
        self._memory.release(
            holder.path, holder.own_block_ids(), num_retired_blocks=holder.num_retired_blocks
        )
        request.block_ids.clear()
        self._memory.cache.release(request.adapter_id)
