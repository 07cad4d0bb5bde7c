"""Keeps the use of the memory between two watermarks, at the lowest priority. Pure.

Above the higher one, what the policy ranks lowest leaves, leaves of the tree first. Below the lower
one, what it ranks highest comes back, roots first. Nothing moves between them, and what comes back
stays below the higher one, so no item goes back and forth.

A look decides on all swaps at once. They begin a few at a time, and those that have not begun are
cancelled as soon as a request waits for a transfer to the device.

Source: FastLibra section 5.3.
"""

from collections import deque
from collections.abc import Container, Iterator
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
_MAX_CANDIDATES = 5000  # of those that the policy remembers, for one look

_Swap = AdapterId | list[KvNode]  # consecutive nodes, parents first


class WatermarkSwaps:
    """Decides at each look what is swapped, begins swaps, and cancels them."""

    def __init__(
        self,
        pool: BlockPool,
        cache: AdapterCache,
        prefixes: PrefixCache,
        room: RoomMaker,
        loads: AdapterLoads,
        transfers: TransferTable,
        swapper: KvSwapper | None,
        max_history_blocks: int | None,
    ) -> None:
        """All parts belong to the device memory; the policy of ``cache`` has watermarks."""
        marks = cache.policy.rules.watermarks
        assert isinstance(cache.policy, SwappingPolicy) and marks is not None, cache.policy
        self._marks = marks
        self._pool = pool
        self._cache = cache
        self._policy: SwappingPolicy = cache.policy
        self._prefixes = prefixes
        self._room = room
        self._loads = loads
        self._transfers = transfers
        self._swapper = swapper
        self._max_history_blocks = max_history_blocks
        self._max_run = max(1, _RUN_BYTES // pool.block_bytes)
        self._decided: deque[_Swap] = deque()  # and not begun
        self._look_s = 0.0  # the next look
        self._must_look = True  # something may have changed since the last one
        self.num_begun = 0  # swaps to the device
        self.num_cancelled = 0

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
        may_bring = may_bring and not any(one.is_demand for one in to_device)
        if not may_bring:
            self.num_cancelled += len(self._decided)
            self._decided.clear()
        self._must_look = True
        open_bytes = sum(sum(one.part_bytes) for one in to_device)
        if now_s >= self._look_s:
            self._look_s = now_s + self._marks.interval_s
            self._must_look = self._look(may_bring=may_bring, is_bringing=bool(open_bytes or self._decided))
        while self._decided and open_bytes < _MAX_OPEN_BYTES:
            open_bytes += self._begin(self._decided.popleft(), now_s)

    def _look(self, *, may_bring: bool, is_bringing: bool) -> bool:
        """Swap out, or decide what to bring. Return whether another look may find more."""
        capacity_bytes, used_bytes = self._pool.budget.capacity_bytes, self.used_bytes
        excess_bytes = used_bytes - int(self._marks.high * capacity_bytes)
        if excess_bytes > 0:
            self._room.swap_out(excess_bytes)
            return self.used_bytes < used_bytes
        idle_bytes = int(self._marks.low * capacity_bytes) - used_bytes
        if idle_bytes <= 0 or is_bringing or not may_bring:
            return idle_bytes > 0
        self._decided.extend(self._choose(idle_bytes, -excess_bytes))
        return bool(self._decided)

    def _choose(self, idle_bytes: int, most_bytes: int) -> list[_Swap]:
        """Choose swaps of at least ``idle_bytes`` if there are so many, and of ``most_bytes`` at most."""
        swaps: list[_Swap] = []
        adapters, runs = set[AdapterId](), dict[KvNode, list[KvNode]]()  # chosen ones; runs by node
        num_bytes, max_blocks = 0, self._max_blocks()
        for item in self._candidates():
            if num_bytes >= idle_bytes:
                break
            adapter_id, nodes = self._needed(item, adapters, runs)
            most_blocks = min(max_blocks - len(runs), -(-(idle_bytes - num_bytes) // self._pool.block_bytes))
            nodes = nodes[: max(0, most_blocks)]
            if adapter_id is None and not nodes:
                continue
            if adapter_id is not None and not self._can_load(adapter_id, adapters):
                continue
            new_bytes = len(nodes) * self._pool.block_bytes
            if adapter_id is not None:
                new_bytes += self._loads.known[adapter_id].num_bytes
            if num_bytes + new_bytes > most_bytes:
                continue
            num_bytes += new_bytes
            if adapter_id is not None:
                adapters.add(adapter_id)
                swaps.append(adapter_id)
            for node in nodes:
                run = None if node.parent is None else runs.get(node.parent)
                if run is None or run[-1] is not node.parent or len(run) == self._max_run:
                    swaps.append(run := [])
                run.append(node)
                runs[node] = run
        return swaps

    def _needed(
        self, item: KvNode | AdapterId, adapters: set[AdapterId], chosen: Container[KvNode]
    ) -> tuple[AdapterId | None, list[KvNode]]:
        """Return the adapter and the nodes that come back with an item, beside chosen ones."""
        if not isinstance(item, KvNode):
            return item, []
        nodes = _missing(item, chosen)
        return (self._adapter_of(item, adapters), nodes) if nodes else (None, [])

    def _candidates(self) -> Iterator[KvNode | AdapterId]:
        """Yield what the policy remembers in its order, then other adapters, small ones first."""
        for item in islice(self._policy.returns(), _MAX_CANDIDATES):
            if isinstance(item, KvNode):
                yield item
            else:
                assert isinstance(item, DeviceCopy)
                yield item.adapter_id
        known = self._loads.known
        yield from sorted(known, key=lambda adapter_id: known[adapter_id].num_bytes)

    def _max_blocks(self) -> int:
        """Blocks that may come back: history beyond its limit would leave at once."""
        if self._swapper is None:
            return 0
        if self._max_history_blocks is None:
            return self._pool.num_blocks
        return self._max_history_blocks - self._prefixes.num_evictable_blocks

    def _can_load(self, adapter_id: AdapterId, chosen: set[AdapterId]) -> bool:
        adapter = self._loads.known.get(adapter_id)
        if adapter is None or adapter_id in chosen:
            return False
        is_absent = self._cache.state(adapter_id) is AdapterState.ABSENT
        return is_absent and self._loads.is_from_memory(adapter)

    def _adapter_of(self, node: KvNode, chosen: set[AdapterId]) -> AdapterId | None:
        """Return the adapter that must come back before a node, if any."""
        if node.root is None or not self._policy.rules.ties_kv_to_adapter:
            return None
        versions = self._prefixes.versions_of(node.root.namespace)
        absent = AdapterState.ABSENT
        if any(one in chosen or self._cache.state(one) is not absent for one in versions):
            return None
        return next(iter(versions), None)

    def _begin(self, swap: _Swap, now_s: float) -> int:
        """Begin a swap if it is still possible. Return its bytes; 0 = it has not begun."""
        if not isinstance(swap, list):
            if not self._can_load(swap, set()):
                return 0
            adapter = self._loads.known[swap]
            if self._loads.begin(swap, adapter, now_s, is_demand=False) is None:
                return 0
            self.num_begun += 1
            return adapter.num_bytes
        parent = swap[0].parent
        if not all(map(_can_come, swap)) or (parent is not None and parent.block_id is None):
            return 0
        assert self._swapper is not None
        if self._adapter_of(swap[0], set()) is not None or not self._swapper.bring(swap, now_s):
            return 0
        self.num_begun += 1
        return len(swap) * self._pool.block_bytes


def _can_come(node: KvNode) -> bool:
    """Whether requests can find a node, and only the host has it."""
    return node.root is not None and node.block_id is None and node.host_slot is not None


def _missing(node: KvNode, chosen: Container[KvNode]) -> list[KvNode]:
    """Return a node behind its ancestors that must come back first; empty if it cannot."""
    nodes: list[KvNode] = []
    one: KvNode | None = node
    while one is not None and one.block_id is None and one not in chosen:
        if not _can_come(one):
            return []
        nodes.append(one)
        one = one.parent
    return nodes[::-1]
