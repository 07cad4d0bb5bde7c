"""Keeps the use of the memory between two watermarks, at the lowest priority. Pure.

Above the higher one, what the policy ranks lowest leaves, leaves of the tree first. Below the lower
one, what it ranks highest comes back, roots first. Nothing moves between them, and what comes back
stays below the higher one, so no item goes back and forth.

A look decides on all swaps at once. They begin a few at a time. Those that have not begun are
cancelled as soon as a request waits for a transfer to the device, or the next one would pass the
higher watermark.

Source: FastLibra section 5.3.
"""

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice

from ...profiles.link import Direction
from ..plan import AdapterId
from .adapter_cache import AdapterCache, AdapterState, DeviceCopy
from .block_pool import BlockPool
from .kv_tree import KvNode
from .loads import AdapterLoads
from .policies.policy import SwappingPolicy
from .prefix_cache import PrefixCache
from .room import RoomMaker
from .swapper import KvSwapper
from .transfers import TransferTable

# Of swaps under way; further ones wait. It takes 5 ms at 12 GB/s.
_MAX_OPEN_BYTES = 64 << 20
_RUN_BYTES = 16 << 20  # of blocks that are copied together
_MAX_CANDIDATES = 5000  # for one look: of those that the policy remembers, and of other adapters

_Swap = AdapterId | list[KvNode]  # consecutive nodes, parents first


@dataclass(eq=False)
class WatermarkSwaps:
    """Decides at each look what is swapped, begins swaps, and cancels them."""

    _pool: BlockPool
    _cache: AdapterCache  # with a policy that has watermarks
    _prefixes: PrefixCache
    _room: RoomMaker
    _loads: AdapterLoads
    _transfers: TransferTable
    _swapper: KvSwapper | None
    _max_history_blocks: int | None

    def __post_init__(self) -> None:
        policy, budget = self._cache.policy, self._pool.budget
        marks = policy.rules.watermarks
        assert isinstance(policy, SwappingPolicy) and marks is not None, policy
        self._policy: SwappingPolicy = policy
        self._interval_s = marks.interval_s
        self._low_bytes = int(marks.low * budget.capacity_bytes)
        self._high_bytes = int(marks.high * budget.capacity_bytes)
        self._max_run = max(1, _RUN_BYTES // self._pool.block_bytes)
        self._decided: deque[_Swap] = deque()  # and not begun
        self._look_s = 0.0  # the next look
        self._must_look = True  # something may have changed since the last one

    @property
    def used_bytes(self) -> int:
        """Memory that is not free."""
        return self._pool.budget.capacity_bytes - self._pool.budget.free_bytes

    @property
    def wake_at_s(self) -> float | None:
        """When to look if nothing happens before; None = nothing would move."""
        return self._look_s if self._must_look else None

    def turn(self, now_s: float, *, may_bring: bool) -> None:
        """Look if it is time, then begin what has been decided; once for each plan.

        ``may_bring``: False = memory must not fill up now.
        """
        to_device = [one for one in self._transfers if one.direction is Direction.TO_DEVICE]
        open_bytes = sum(sum(one.part_bytes) for one in to_device)
        may_bring = may_bring and not any(one.is_demand for one in to_device)
        if not may_bring:
            self._decided.clear()
        may_choose = may_bring and not (open_bytes or self._decided)
        is_due, used_bytes = now_s >= self._look_s, self.used_bytes
        if is_due:
            self._look_s = now_s + self._interval_s
            self._look(may_choose=may_choose)
        has_freed = self.used_bytes < used_bytes
        while self._decided and open_bytes < _MAX_OPEN_BYTES:
            # Requests may have taken memory since the look.
            if self.used_bytes + self._num_bytes(self._decided[0]) > self._high_bytes:
                self._decided.clear()
                break
            open_bytes += self._begin(self._decided.popleft(), now_s)
        # Without an event, a look after one that moved nothing would move nothing. The end of a
        # transfer is an event.
        if self.used_bytes > self._high_bytes:
            self._must_look = has_freed or not is_due
        else:
            has_chosen = is_due and may_choose
            may_choose = may_bring and not (open_bytes or has_chosen)
            self._must_look = may_choose and self.used_bytes < self._low_bytes

    def _look(self, *, may_choose: bool) -> None:
        """Swap out, or decide what to bring."""
        excess_bytes = self.used_bytes - self._high_bytes
        if excess_bytes > 0:
            self._room.swap_out(excess_bytes)
            return
        pool, idle_bytes = self._pool, self._low_bytes - self.used_bytes
        # Running requests will use what is reserved, so that what came there would leave again.
        free_bytes = pool.budget.free_bytes - pool.num_reserved_blocks * pool.block_bytes
        if may_choose and min(idle_bytes, free_bytes) > 0:
            self._decided.extend(self._choose(idle_bytes, min(free_bytes, -excess_bytes)))

    def _choose(self, idle_bytes: int, most_bytes: int) -> list[_Swap]:
        """Choose swaps of at least ``idle_bytes`` if there are so many, and of ``most_bytes`` at most."""
        swaps: list[_Swap] = []
        adapters, runs = set[AdapterId](), dict[KvNode, list[KvNode]]()  # chosen ones; runs by node
        num_bytes, max_blocks, block_bytes = 0, self._max_blocks(), self._pool.block_bytes
        for item in self._candidates():
            if num_bytes >= idle_bytes:
                break
            adapter_id = self._adapter_of(item, adapters) if isinstance(item, KvNode) else item
            if adapter_id is not None and (
                adapter_id in adapters or not self._can_load(adapter_id, num_bytes)
            ):
                continue
            adapter_bytes = 0 if adapter_id is None else self._num_bytes(adapter_id)
            left_bytes = most_bytes - num_bytes - adapter_bytes
            nodes: list[KvNode] = []
            if isinstance(item, KvNode):
                short_blocks = -(-(idle_bytes - num_bytes) // block_bytes)
                most_blocks = min(max_blocks - len(runs), short_blocks, left_bytes // block_bytes)
                if most_blocks > 0:  # else its ancestors, of which there may be many, are not visited
                    nodes = _missing(item, runs)[:most_blocks]
                if not nodes:
                    continue
            if left_bytes < 0:
                continue
            num_bytes += adapter_bytes + len(nodes) * block_bytes
            if adapter_id is not None:
                adapters.add(adapter_id)
                swaps.append(adapter_id)
            self._choose_nodes(nodes, runs, swaps)
        return swaps

    def _choose_nodes(
        self, nodes: list[KvNode], runs: dict[KvNode, list[KvNode]], swaps: list[_Swap]
    ) -> None:
        """Add nodes to the runs of their parents, or to new runs."""
        for node in nodes:
            run = None if node.parent is None else runs.get(node.parent)
            if run is None or run[-1] is not node.parent or len(run) == self._max_run:
                swaps.append(run := [])
            run.append(node)
            runs[node] = run

    def _candidates(self) -> Iterator[KvNode | AdapterId]:
        """Yield what the policy remembers in its order, then the latest adapters, small ones first."""
        for item in islice(self._policy.returns(), _MAX_CANDIDATES):
            if isinstance(item, KvNode):
                yield item
            else:
                assert isinstance(item, DeviceCopy)
                yield item.adapter_id
        known = self._loads.known
        yield from sorted(islice(reversed(known), _MAX_CANDIDATES), key=self._num_bytes)

    def _max_blocks(self) -> int:
        """Blocks that may come back: history beyond its limit would leave at once."""
        if self._swapper is None:
            return 0
        if self._max_history_blocks is None:
            return self._pool.num_blocks
        return self._max_history_blocks - self._prefixes.num_evictable_blocks

    def _can_load(self, adapter_id: AdapterId, chosen_bytes: int = 0) -> bool:
        """Whether an adapter can be loaded now, beside what has been chosen."""
        adapter = self._loads.known.get(adapter_id)
        if adapter is None or self._cache.state(adapter_id) is not AdapterState.ABSENT:
            return False
        return self._loads.is_from_memory(adapter) and self._room.has_adapter_room(adapter, chosen_bytes)

    def _adapter_of(self, node: KvNode, chosen: set[AdapterId]) -> AdapterId | None:
        """Return the adapter that must come back before a node, if any."""
        if node.root is None or not self._policy.rules.ties_kv_to_adapter:
            return None
        versions = self._prefixes.versions_of(node.root.namespace)
        absent = AdapterState.ABSENT
        if any(one in chosen or self._cache.state(one) is not absent for one in versions):
            return None
        return next(iter(versions), None)

    def _num_bytes(self, swap: _Swap) -> int:
        """Return the bytes of a swap; 0 for an adapter that is not known any more."""
        if isinstance(swap, list):
            return len(swap) * self._pool.block_bytes
        adapter = self._loads.known.get(swap)
        return 0 if adapter is None else adapter.num_bytes

    def _begin(self, swap: _Swap, now_s: float) -> int:
        """Begin a swap if it is still possible. Return its bytes; 0 = it has not begun."""
        if not isinstance(swap, list):
            if not self._can_load(swap):
                return 0
            adapter = self._loads.known[swap]
            if self._loads.begin(swap, adapter, now_s, is_demand=False) is None:
                return 0
            return adapter.num_bytes
        parent = swap[0].parent
        if not all(map(can_come, swap)) or (parent is not None and parent.block_id is None):
            return 0
        assert self._swapper is not None
        if self._adapter_of(swap[0], set()) is not None or not self._swapper.bring(swap, now_s):
            return 0
        return self._num_bytes(swap)


def can_come(node: KvNode) -> bool:
    """Whether requests can find a node, and only the host has it."""
    return node.root is not None and node.block_id is None and node.host_slot is not None


def _missing(node: KvNode, chosen: Container[KvNode]) -> list[KvNode]:
    """Return a node behind its ancestors that must come back first; empty if it cannot."""
    nodes: list[KvNode] = []
    one: KvNode | None = node
    while one is not None and one.block_id is None and one not in chosen:
        if not can_come(one):
            return []
        nodes.append(one)
        one = one.parent
    return nodes[::-1]
