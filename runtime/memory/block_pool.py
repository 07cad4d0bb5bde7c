"""The memory budget that KV blocks and adapters share, and the blocks.

They only count: the budget bytes, the pool block ids. The executor owns the tensors.
"""

import heapq
from collections.abc import Iterable, Sequence

from ..plan import BlockId
from .pages import Pages

_OWNER = "kv"


class MemoryBudget:
    """Bytes allocated by named owners. Their sum never exceeds the capacity.

    Bytes can also be reserved for the expected growth of running requests. A reservation allocates
    nothing, but no other owner gets its bytes. Evictable bytes can be reserved:
    ``reserved <= free + evictable`` holds after each ``reserve_growth``.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes``: limit of all owners together."""
        assert capacity_bytes >= 0, capacity_bytes
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes  # that no owner has allocated
        self._evictable_bytes = 0  # allocated, and free as soon as they are needed
        self._reserved_bytes = 0
        self._allocated: dict[str, int] = {}

    @property
    def reservable_bytes(self) -> int:
        """Bytes that can be reserved: free or evictable."""
        return self.free_bytes + self._evictable_bytes

    @property
    def unreserved_bytes(self) -> int:
        """Bytes, free or evictable, that are not reserved.

        Negative after reserved evictable bytes came into use. ``reserve_growth`` corrects that.
        """
        return self.free_bytes + self._evictable_bytes - self._reserved_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that ``allocate`` can take now."""
        return max(0, min(self.free_bytes, self.unreserved_bytes))

    def allocated_bytes(self, owner: str) -> int:
        """Bytes that ``owner`` holds now."""
        return self._allocated.get(owner, 0)

    def allocate(self, owner: str, num_bytes: int, *, reserved_bytes: int = 0) -> bool:
        """Allocate ``num_bytes`` for ``owner`` if they are free. Return whether they were.

        ``reserved_bytes`` of them come from the reservation, the rest from unreserved bytes.
        """
        assert 0 <= reserved_bytes <= min(num_bytes, self._reserved_bytes), reserved_bytes
        if num_bytes > self.free_bytes or num_bytes - reserved_bytes > self.unreserved_bytes:
            return False
        self._reserved_bytes -= reserved_bytes
        self.free_bytes -= num_bytes
        self._allocated[owner] = self._allocated.get(owner, 0) + num_bytes
        return True

    def reserve_growth(self, num_bytes: int) -> int:
        """Reserve ``num_bytes`` for growth, or as many as possible. Return how many.

        The new reservation replaces the previous one.
        """
        assert num_bytes >= 0, num_bytes
        self._reserved_bytes = 0
        self._reserved_bytes = min(num_bytes, self.unreserved_bytes)
        return self._reserved_bytes

    def mark_evictable(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more (fewer, if negative) allocated bytes as evictable."""
        self._evictable_bytes += num_bytes
        assert self._evictable_bytes >= 0, self._evictable_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        held = self._allocated.get(owner, 0)
        assert 0 <= num_bytes <= held, f"{owner} releases {num_bytes} of {held} bytes"
        self._allocated[owner] = held - num_bytes
        self.free_bytes += num_bytes


class BlockPool:
    """Allocates block ids, limited by their number and by the bytes of the budget.

    On machines that commit memory on first write, a freed block keeps its memory until
    ``take_warm_blocks``. Such warm blocks are allocated first, then the lowest ids, which keeps
    the upper end of the pool untouched. O(log n) per block. With pages, ``Pages``
    chooses the blocks instead.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, budget: MemoryBudget, pages: Pages | None = None
    ) -> None:
        """``num_blocks``: their limit; all physical ones without ``pages``.

        ``block_bytes``: over all layers. ``pages``: shared with adapters, and so all bytes of
        ``budget``; None = adapters are elsewhere.
        """
        assert num_blocks >= 0, num_blocks
        assert block_bytes > 0, block_bytes
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.budget = budget
        self.pages = pages
        self._warm: list[BlockId] = []  # heap; free, and may hold memory
        self._cold: list[BlockId] = []  # heap; free, without memory
        self._num_touched = 0  # ids from here on were never allocated
        self._allocated: set[BlockId] = set()
        self.num_cached_blocks = 0  # of prefixes that no request uses
        self.num_reserved_blocks = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks in use by requests."""
        return len(self._allocated) - self.num_cached_blocks

    @property
    def num_unused_blocks(self) -> int:
        """Blocks that no request uses, whether or not the budget has their bytes."""
        return self.num_blocks - self.num_used_blocks

    @property
    def num_free_ids(self) -> int:
        """Blocks that are not allocated, whether or not the budget has their bytes."""
        return self.num_blocks - len(self._allocated)

    def mark_cached(self, num_blocks: int) -> None:
        """Set how many allocated blocks hold prefixes that no request uses. They are evictable."""
        assert 0 <= num_blocks <= len(self._allocated), num_blocks
        self.budget.mark_evictable((num_blocks - self.num_cached_blocks) * self.block_bytes)
        self.num_cached_blocks = num_blocks

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

    def rewarm(self, block_ids: Sequence[BlockId]) -> None:
        """Mark taken blocks as warm again, unless allocated since: their memory was not returned."""
        lost = set(block_ids).intersection(self._cold)
        if lost:
            self._warm = sorted(lost.union(self._warm))
            self._cold = sorted(set(self._cold) - lost)

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Allocate ``num_blocks`` blocks, reserved ones first. None if there are too few."""
        assert num_blocks >= 0, num_blocks
        num_reserved = min(num_blocks, self.num_reserved_blocks)
        if num_blocks > self.num_free_ids:
            return None
        has_bytes = self.budget.allocate(
            _OWNER, num_blocks * self.block_bytes, reserved_bytes=num_reserved * self.block_bytes
        )
        if not has_bytes:
            return None
        self.num_reserved_blocks -= num_reserved
        block_ids = (
            self._take_lowest(num_blocks) if self.pages is None else self.pages.take_blocks(num_blocks)
        )
        self._allocated.update(block_ids)
        return tuple(block_ids)

    def _take_lowest(self, num_blocks: int) -> list[BlockId]:
        block_ids: list[BlockId] = []
        for free in (self._warm, self._cold):
            while free and len(block_ids) < num_blocks:
                block_ids.append(heapq.heappop(free))
        end = self._num_touched + num_blocks - len(block_ids)
        block_ids += map(BlockId, range(self._num_touched, end))
        self._num_touched = end
        return block_ids

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Free blocks. Each must be allocated."""
        freed = tuple(block_ids)
        for block_id in freed:
            assert block_id in self._allocated, f"block {block_id} is freed but not allocated"
            self._allocated.remove(block_id)
        if self.pages is not None:
            self.pages.free_blocks(freed)
        else:
            for block_id in freed:
                heapq.heappush(self._warm, block_id)
        self.budget.release(_OWNER, len(freed) * self.block_bytes)
