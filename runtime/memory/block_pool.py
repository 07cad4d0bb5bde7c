"""Free and allocated KV blocks. Ids only: the executor owns the tensors."""

import heapq
from collections.abc import Iterable

from ..plan import BlockId
from .budget import MemoryBudget

KV_OWNER = "kv"


class BlockPool:
    """Allocates block ids, limited by their number and by the bytes of the budget.

    On machines that commit memory on first write, a freed block keeps its memory until
    ``take_warm_blocks``. Such warm blocks are allocated first, then the lowest ids, which keeps
    the upper end of the pool untouched. O(log n) per block.
    """

    def __init__(self, num_blocks: int, block_bytes: int, budget: MemoryBudget) -> None:
        """``num_blocks``: physical blocks. ``block_bytes``: bytes of a block over all layers."""
        assert num_blocks >= 0, num_blocks
        assert block_bytes > 0, block_bytes
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.budget = budget
        self._warm: list[BlockId] = []  # heap; free, and may hold memory
        self._cold: list[BlockId] = []  # heap; free, without memory
        self._num_touched = 0  # ids from here on were never allocated
        self._allocated: set[BlockId] = set()
        self._num_cached = 0
        self.num_reserved_blocks = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks in use by requests."""
        return len(self._allocated) - self._num_cached

    @property
    def num_unused_blocks(self) -> int:
        """Physical blocks that no request uses, whether or not the budget has their bytes."""
        return self.num_blocks - self.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks of prefixes that no request uses."""
        return self._num_cached

    @property
    def num_free_ids(self) -> int:
        """Physical blocks that are not allocated."""
        return self.num_blocks - len(self._allocated)

    def mark_cached(self, num_blocks: int) -> None:
        """Set how many allocated blocks hold prefixes that no request uses. They are evictable."""
        assert 0 <= num_blocks <= len(self._allocated), num_blocks
        self.budget.mark_evictable((num_blocks - self._num_cached) * self.block_bytes)
        self._num_cached = num_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are free now, reserved or not."""
        return min(self.num_free_ids, self.budget.free_bytes // self.block_bytes)

    def reserve_growth(self, num_blocks: int) -> None:
        """Reserve blocks for growth, or as many as possible.

        The new reservation replaces the previous one.
        """
        num_bytes = min(num_blocks, self.num_unused_blocks) * self.block_bytes
        # Do not reserve the remainder, which is less than a block.
        self.num_reserved_blocks = self.budget.reserve_growth(num_bytes) // self.block_bytes
        self.budget.reserve_growth(self.num_reserved_blocks * self.block_bytes)

    @property
    def num_warm_blocks(self) -> int:
        """Free blocks that may hold memory."""
        return len(self._warm)

    @property
    def written_bytes(self) -> int:
        """Memory that blocks may occupy on machines that commit memory on first write."""
        return (len(self._allocated) + len(self._warm)) * self.block_bytes

    def take_warm_blocks(self) -> tuple[BlockId, ...]:
        """Return the warm blocks. The caller returns their memory to the machine."""
        blocks, self._warm = self._warm, []
        for block_id in blocks:
            heapq.heappush(self._cold, block_id)
        return tuple(sorted(blocks))

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Allocate ``num_blocks`` blocks, reserved ones first. None if there are too few."""
        assert num_blocks >= 0, num_blocks
        num_reserved = min(num_blocks, self.num_reserved_blocks)
        if num_blocks > self.num_free_ids:
            return None
        has_bytes = self.budget.allocate(
            KV_OWNER,
            num_blocks * self.block_bytes,
            reserved_bytes=num_reserved * self.block_bytes,
        )
        if not has_bytes:
            return None
        self.num_reserved_blocks -= num_reserved
        block_ids: list[BlockId] = []
        for free in (self._warm, self._cold):
            while free and len(block_ids) < num_blocks:
                block_ids.append(heapq.heappop(free))
        end = self._num_touched + num_blocks - len(block_ids)
        block_ids += map(BlockId, range(self._num_touched, end))
        self._num_touched = end
        self._allocated.update(block_ids)
        return tuple(block_ids)

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Free blocks. Each must be allocated."""
        num_freed = 0
        for block_id in block_ids:
            assert block_id in self._allocated, f"block {block_id} is freed but not allocated"
            self._allocated.remove(block_id)
            heapq.heappush(self._warm, block_id)
            num_freed += 1
        self.budget.release(KV_OWNER, num_freed * self.block_bytes)

    def check_invariants(self) -> None:
        """Assert that each block is in exactly one place and that its bytes are counted."""
        returned = {*self._warm, *self._cold}
        assert len(returned) == len(self._warm) + len(self._cold), "a block is free twice"
        assert not returned & self._allocated, "a block is free and allocated"
        assert returned | self._allocated == set(range(self._num_touched))
        assert self._num_touched <= self.num_blocks
        assert 0 <= self.num_reserved_blocks <= self.num_unused_blocks
        held = self.budget.allocated_bytes(KV_OWNER)
        assert held == len(self._allocated) * self.block_bytes, held
