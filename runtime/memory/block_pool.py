"""Which KV blocks are free. Ids only: the tensors belong to the device half."""

import heapq
from collections.abc import Iterable

from ..plan import BlockId
from .budget import MemoryBudget

KV_OWNER = "kv"


class BlockPool:
    """Hands out free block ids, bounded by their number and by the budget's bytes.

    Where memory is committed on first write, a block that was used holds some of the machine's
    until it is given back: these are handed out first, and of all others the lowest, which keeps
    the upper end of the pool untouched. O(log n) per block.
    """

    def __init__(self, num_blocks: int, block_bytes: int, budget: MemoryBudget) -> None:
        """``num_blocks``: physical blocks; ``block_bytes``: bytes of one over all layers."""
        assert num_blocks >= 0, num_blocks
        assert block_bytes > 0, block_bytes
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.budget = budget
        self._warm: list[BlockId] = []  # heap; free, and may hold memory
        self._cold: list[BlockId] = []  # heap; free, and was given back
        self._num_touched = 0  # ids from here on were never handed out
        self._allocated: set[BlockId] = set()
        self._num_cached = 0
        self.num_promised_blocks = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        return len(self._allocated) - self._num_cached

    @property
    def num_unused_blocks(self) -> int:
        """Physical blocks that no request holds, whether or not the budget has their bytes."""
        return self.num_blocks - self.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks with prefixes that no request uses."""
        return self._num_cached

    @property
    def num_free_ids(self) -> int:
        """Physical blocks that are not handed out."""
        return self.num_blocks - len(self._allocated)

    def mark_cached(self, num_blocks: int) -> None:
        """So many of the blocks that are handed out hold prefixes which no request uses now.

        They can be freed whenever they are needed.
        """
        assert 0 <= num_blocks <= len(self._allocated), num_blocks
        self.budget.mark_evictable((num_blocks - self._num_cached) * self.block_bytes)
        self._num_cached = num_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that lie free now, promised or not."""
        return min(self.num_free_ids, self.budget.free_bytes // self.block_bytes)

    def promise(self, num_blocks: int) -> None:
        """Keep blocks for growth, or as many as there are, instead of those promised before."""
        num_bytes = min(num_blocks, self.num_unused_blocks) * self.block_bytes
        # The remainder, less than a block, is not promised.
        self.num_promised_blocks = self.budget.promise(num_bytes) // self.block_bytes
        self.budget.promise(self.num_promised_blocks * self.block_bytes)

    @property
    def num_warm_blocks(self) -> int:
        """Free blocks that may hold memory."""
        return len(self._warm)

    @property
    def written_bytes(self) -> int:
        """What the blocks may hold of the machine's memory, where that is taken on first write."""
        return (len(self._allocated) + len(self._warm)) * self.block_bytes

    def give_back(self) -> tuple[BlockId, ...]:
        """Return the free blocks that may hold memory, which goes back to the machine."""
        blocks, self._warm = self._warm, []
        for block_id in blocks:
            heapq.heappush(self._cold, block_id)
        return tuple(sorted(blocks))

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Hand out ``num_blocks`` blocks, or None if there are not as many.

        Blocks fulfil the promise that was made for them, as far as it goes.
        """
        assert num_blocks >= 0, num_blocks
        num_promised = min(num_blocks, self.num_promised_blocks)
        if num_blocks > self.num_free_ids:
            return None
        has_bytes = self.budget.reserve(
            KV_OWNER,
            num_blocks * self.block_bytes,
            promised_bytes=num_promised * self.block_bytes,
        )
        if not has_bytes:
            return None
        self.num_promised_blocks -= num_promised
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
        """Take blocks back. Each must be handed out."""
        num_freed = 0
        for block_id in block_ids:
            assert block_id in self._allocated, f"block {block_id} is freed but not allocated"
            self._allocated.remove(block_id)
            heapq.heappush(self._warm, block_id)
            num_freed += 1
        self.budget.release(KV_OWNER, num_freed * self.block_bytes)

    def check_invariants(self) -> None:
        """Assert that every block is in exactly one place and that its bytes are accounted for."""
        returned = {*self._warm, *self._cold}
        assert len(returned) == len(self._warm) + len(self._cold), "a block is free twice"
        assert not returned & self._allocated, "a block is free and allocated"
        assert returned | self._allocated == set(range(self._num_touched))
        assert self._num_touched <= self.num_blocks
        assert 0 <= self.num_promised_blocks <= self.num_unused_blocks
        held = self.budget.reserved_bytes(KV_OWNER)
        assert held == len(self._allocated) * self.block_bytes, held
