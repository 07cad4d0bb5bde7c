"""Slots for copies of KV blocks in host memory, and the order in which copies are dropped. Pure."""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from ..plan import HostSlot
from .kv_tree import KvNode


class HostSlots:
    """Free slots, slots of transfers under way, and slots of nodes, least recently used first.

    The lowest free slots are handed out first, so that adjacent slots are copied together.
    """

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: number of slots; 0 = no KV is kept on the host."""
        self.num_slots = num_slots
        self._free: list[int] = []  # heap
        self._num_touched = 0  # ids from here on were never handed out
        self._nodes: OrderedDict[HostSlot, KvNode] = OrderedDict()  # oldest use first
        self._num_moving = 0  # handed out, not yet of a node

    def take(self) -> HostSlot | None:
        """Hand out a free slot for a copy; None if there is none."""
        if self._free:
            slot = heapq.heappop(self._free)
        elif self._num_touched < self.num_slots:
            slot = self._num_touched
            self._num_touched += 1
        else:
            return None
        self._num_moving += 1
        return HostSlot(slot)

    def fill(self, slot: HostSlot, node: KvNode) -> None:
        """Assign a slot that was handed out to a node."""
        self._num_moving -= 1
        self._nodes[slot] = node

    def return_unused(self, slots: Iterable[HostSlot]) -> None:
        """Free slots that were handed out and not filled."""
        for slot in slots:
            self._num_moving -= 1
            heapq.heappush(self._free, slot)

    def free(self, slots: Iterable[HostSlot]) -> None:
        """Free slots that nodes have given up."""
        for slot in slots:
            del self._nodes[slot]
            heapq.heappush(self._free, slot)

    def use(self, path: Sequence[KvNode]) -> None:
        """Mark the blocks of a path as used. The first one counts as the newest use."""
        if self._nodes:
            for node in reversed(path):
                if node.host_slot is not None:
                    self._nodes.move_to_end(node.host_slot)

    def oldest(self, spared: Collection[KvNode]) -> KvNode | None:
        """Return the least recently used node without references outside ``spared``, if any.

        Skipped nodes count as used now, so that later calls do not visit them again.
        """
        for _ in range(len(self._nodes)):
            slot, node = next(iter(self._nodes.items()))
            if not node.num_references and node not in spared:
                return node
            self._nodes.move_to_end(slot)
        return None

    def check_invariants(self) -> None:
        """Assert that each slot is counted once, and that nodes agree on their slots."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & self._nodes.keys(), "a slot is free and in use"
        assert 0 <= self._num_touched <= self.num_slots
        assert len(free) + len(self._nodes) + self._num_moving == self._num_touched
        for slot, node in self._nodes.items():
            assert node.host_slot == slot, (slot, node)
