"""Places for KV blocks in the host's memory: which are free, and which copy goes first. Pure."""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from ..plan import HostSlot
from .kv_tree import KvNode


class HostSlots:
    """Slots that are free, that copies move to, and those of nodes, the least recently used first.

    The lowest free ones are handed out, so that neighbours are copied together.
    """

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: that exist; 0 = no KV is kept on the host."""
        self.num_slots = num_slots
        self._free: list[int] = []  # heap
        self._num_touched = 0  # ids from here on were never handed out
        self._nodes: OrderedDict[HostSlot, KvNode] = OrderedDict()  # the oldest use first
        self._num_moving = 0  # handed out, and of no node yet

    def take(self) -> HostSlot | None:
        """Hand out a free slot, for a copy to move to."""
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
        """A slot that was handed out is the node's, which owns it from now on."""
        self._num_moving -= 1
        self._nodes[slot] = node

    def return_unused(self, slots: Iterable[HostSlot]) -> None:
        """Nothing was copied to slots that were handed out."""
        for slot in slots:
            self._num_moving -= 1
            heapq.heappush(self._free, slot)

    def free(self, slots: Iterable[HostSlot]) -> None:
        """Nodes have lost these."""
        for slot in slots:
            del self._nodes[slot]
            heapq.heappush(self._free, slot)

    def use(self, path: Sequence[KvNode]) -> None:
        """Blocks are used, in this order behind each other: the first one stays the longest."""
        if self._nodes:
            for node in reversed(path):
                if node.host_slot is not None:
                    self._nodes.move_to_end(node.host_slot)

    def oldest(self, spared: Collection[KvNode]) -> KvNode | None:
        """The unreferenced node, not in ``spared``, with the next copy to go; None = no such node.

        Nodes that may not go count as used now, so the next calls do not visit them again.
        """
        for _ in range(len(self._nodes)):
            slot, node = next(iter(self._nodes.items()))
            if not node.num_references and node not in spared:
                return node
            self._nodes.move_to_end(slot)
        return None

    def check_invariants(self) -> None:
        """Assert that each slot is in one place, and that nodes know theirs."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & self._nodes.keys(), "a slot is free and in use"
        assert 0 <= self._num_touched <= self.num_slots
        assert len(free) + len(self._nodes) + self._num_moving == self._num_touched
        for slot, node in self._nodes.items():
            assert node.host_slot == slot, (slot, node)
