"""Which KV blocks are copied to the host before they must go, and which come back. Pure.

Copying is apart from eviction: what is likely to go soon is copied ahead, so that there are blocks
that can be dropped at once when room is needed. What is not copied when it must go is dropped, and
computed again.
A copy holds what it moves, from its plan to its end, and belongs to no request.
"""

from collections.abc import Iterator, Sequence

from ...profiles.link import Direction
from ..plan import BlockId, HostSlot, KvTransfer
from .adapter_cache import DeviceCopy
from .block_pool import BlockPool
from .host_slots import HostSlots
from .kv_tree import KvNode, KvTree
from .policies.facts import RankingPolicy
from .prefix_cache import PrefixCache
from .reload_cost import ReloadCosts
from .transfers import OpenCopy, TransferTable

# Of the pool's blocks: those that are to be free, or copied and unused, before others are needed. A
# prompt that is admitted takes many at once, and where the beginning of a prefix is dropped, what
# has been copied of its end goes with it: conversations waited 12 to 15 % longer with 5 %.
_READY_SHARE = 0.2
# What one plan copies. Not less while requests wait for what comes in: that is the other way.
_PLAN_SHARE = 0.03
# So many blocks have to be used or to go before the order is looked at again.
_CHANGE_SHARE = 0.01


class KvSwapper:
    """Decides copies of KV blocks between the device and the host."""

    def __init__(
        self, tree: KvTree, pool: BlockPool, prefixes: PrefixCache, slots: HostSlots,
        policy: RankingPolicy, transfers: TransferTable, costs: ReloadCosts,
    ) -> None:  # fmt: skip
        """Nothing has been copied.

        Args:
            tree: What is kept, in blocks of ``pool`` and in ``slots``.
            pool: The device's blocks.
            prefixes: Frees what the tree gives back.
            slots: On the host.
            policy: Ranks what leaves the device.
            transfers: Where copies are begun.
            costs: Of copying and of computing.
        """
        self._tree = tree
        self._pool = pool
        self._prefixes = prefixes
        self._slots = slots
        self._policy = policy
        self._transfers = transfers
        self._costs = costs
        self._coming: set[KvNode] = set()  # their blocks are not to be read yet
        self.num_pinned_blocks = 0  # that can be evicted, or again, when copies have ended
        self._num_leaving = 0  # blocks of copies to the host
        # When the order was last looked at: copied blocks at its beginning, and what there was.
        self._num_copied_ahead = 0
        self._num_claims, self._num_unreferenced = 0, 0
        self._has_more = True  # could have been copied

    def num_readable(self, path: Sequence[KvNode]) -> int:
        """Blocks at the beginning of a match that have their KV on the device."""
        for number, node in enumerate(path):
            if node.block_id is None or node in self._coming:
                return number
        return len(path)

    def is_coming(self, node: KvNode) -> bool:
        """Whether a copy to its block is under way."""
        return node in self._coming

    def is_copy_faster(self, nodes: Sequence[KvNode]) -> bool:
        """Whether copying them to the device is faster than computing them there again."""
        num_bytes = len(nodes) * self._tree.block_bytes
        ahead_bytes = sum(
            min(num_bytes, sum(one.part_bytes[one.num_arrived :]))
            for one in self._transfers
            if one.is_demand and one.direction is Direction.TO_DEVICE
        )
        size = self._tree.block_size
        compute_s = self._costs.compute_s(nodes[0].depth * size, len(nodes) * size)
        return self._costs.copy_s(num_bytes + ahead_bytes) < compute_s

    def copy_in(self, nodes: Sequence[KvNode], block_ids: Sequence[BlockId], now_s: float) -> None:
        """Copy neighbours that only the host has, and that are held, to these blocks."""
        slots: list[HostSlot] = []
        for node, block_id in zip(nodes, block_ids, strict=True):
            assert node.host_slot is not None, node
            slots.append(node.host_slot)
            self._tree.assign_block(node, block_id)
        self._coming.update(nodes)
        self._slots.use(nodes)
        command = KvTransfer(
            self._transfers.new_id(), Direction.TO_DEVICE, tuple(block_ids), tuple(slots)
        )
        self._begin(command, nodes, len(nodes), now_s)

    def copy_ahead(self, max_history_blocks: int | None, now_s: float) -> None:
        """Copy what would leave the device next, if little is free or copied already.

        ``max_history_blocks``: that may be there although no request uses them; None = all.
        """
        num_blocks = self._pool.num_blocks
        num_free = self._pool.num_available_blocks
        if max_history_blocks is not None:
            num_free = min(num_free, max_history_blocks - self._tree.num_unreferenced_blocks)
        num_wanted = max(1, round(_READY_SHARE * num_blocks)) - num_free
        if not self._is_short(num_wanted):
            return
        nodes, walked = self._next_to_copy(
            num_wanted + max(1, round(_CHANGE_SHARE * num_blocks)) - self._num_leaving,
            max(1, round(_PLAN_SHARE * num_blocks)),
        )
        self._num_copied_ahead = len(walked) - len(nodes)
        slots = self._take_slots(len(nodes), walked)
        self._has_more = len(slots) == len(nodes) > 0
        if slots:
            self._copy_out(sorted(nodes[: len(slots)], key=_block_id), sorted(slots), now_s)
        self._num_claims = self._tree.num_claims
        self._num_unreferenced = self._tree.num_unreferenced_blocks

    def end(self, copy: OpenCopy, *, has_failed: bool) -> None:
        """What was copied can be used, or, where nothing has come to a block, is forgotten."""
        self.num_pinned_blocks -= copy.num_pinned_blocks
        if copy.direction is Direction.TO_DEVICE:
            self._coming.difference_update(copy.nodes)
            if has_failed:  # with all behind it
                self._prefixes.free(self._tree.drop_content(copy.nodes[0]))
            self._prefixes.release(copy.nodes)
            return
        self._num_leaving -= len(copy.nodes)
        for node, slot in zip(copy.nodes, copy.command.host_slots, strict=True):
            if has_failed:
                self._slots.return_unused((slot,))
            else:
                self._tree.set_host_slot(node, slot)
                self._slots.fill(slot, node)
                self._num_copied_ahead += 1
        self._slots.use(_with_ancestors(copy.nodes))
        for node in copy.nodes:
            self._prefixes.release((node,))
        self._has_more = True

    def held_blocks(self) -> set[BlockId]:
        """Blocks that copies hold, and all before these."""
        held = set()
        for copy in self._transfers:
            if isinstance(copy, OpenCopy):
                held |= {_block_id(node) for node in _with_ancestors(copy.nodes)}
        return held

    def check_invariants(self) -> None:
        """Assert that copies hold what they move, and that what is counted is what moves."""
        copies = [one for one in self._transfers if isinstance(one, OpenCopy)]
        for copy in copies:
            for node, block_id in zip(copy.nodes, copy.command.block_ids, strict=True):
                assert node.num_references > 0 and node.block_id == block_id, (copy, node)
        coming = [one.nodes for one in copies if one.direction is Direction.TO_DEVICE]
        leaving = [one.nodes for one in copies if one.direction is Direction.TO_HOST]
        assert {node for nodes in coming for node in nodes} == self._coming
        assert sum(map(len, coming)) == len(self._coming), "a block comes twice"
        assert sum(map(len, leaving)) == self._num_leaving
        assert sum(one.num_pinned_blocks for one in copies) == self.num_pinned_blocks

    def _is_short(self, num_wanted: int) -> bool:
        """Whether so many copied blocks may be missing, and something can be done about it."""
        num_claimed = self._tree.num_claims - self._num_claims
        num_left = max(0, self._num_copied_ahead - num_claimed)
        if num_left + self._num_leaving >= num_wanted:
            return False
        num_changed = num_claimed + abs(self._tree.num_unreferenced_blocks - self._num_unreferenced)
        return self._has_more or num_changed >= max(1, _CHANGE_SHARE * self._pool.num_blocks)

    def _next_to_copy(self, num_wanted: int, max_nodes: int) -> tuple[list[KvNode], list[KvNode]]:
        """Return what is not copied yet of the first blocks to go, and these."""
        nodes: list[KvNode] = []
        walked: list[KvNode] = []
        for node in self._next_to_go():
            if len(walked) >= num_wanted or len(nodes) >= max_nodes:
                break
            walked.append(node)
            if node.host_slot is None:
                nodes.append(node)
        return nodes, walked

    def _next_to_go(self) -> Iterator[KvNode]:
        """Yield blocks about as they would leave the device.

        A parent is next when its last child has gone, since it was used when that was: how the
        policy would rank it then, it does not say. What leaves with its adapter goes at once, so
        its beginning is first: the rest is of no use alone.
        """
        num_gone: dict[KvNode, int] = {}
        seen: set[KvNode] = set()
        for item in self._policy.victims():
            if isinstance(item, DeviceCopy) and self._policy.rules.ties_kv_to_adapter:
                for one in reversed(self._prefixes.behind(item.adapter_id)):
                    if one not in seen:
                        seen.add(one)
                        yield one
            node = item if isinstance(item, KvNode) else None
            while node is not None and node not in seen:
                seen.add(node)
                yield node
                parent = node.parent
                if parent is None or parent.num_references:
                    break
                num_gone[parent] = num_gone.get(parent, 0) + 1
                node = parent if num_gone[parent] == parent.num_device_children else None

    def _take_slots(self, num_slots: int, walked: Sequence[KvNode]) -> list[HostSlot]:
        """As many as there are, or as can be freed: not of blocks that go as soon."""
        slots: list[HostSlot] = []
        spared = set(walked)
        while len(slots) < num_slots:
            slot = self._slots.take()
            if slot is not None:
                slots.append(slot)
                continue
            oldest = self._slots.oldest(spared)
            if oldest is None:
                break
            self._prefixes.free(self._tree.clear_host_slot(oldest))
        return slots

    def _copy_out(self, nodes: Sequence[KvNode], slots: Sequence[HostSlot], now_s: float) -> None:
        num_unreferenced = self._tree.num_unreferenced_blocks
        for node in nodes:
            self._prefixes.hold((node,))
        # What is held backs no reservation.
        self._pool.reserve_growth(self._pool.num_reserved_blocks)
        command = KvTransfer(
            self._transfers.new_id(), Direction.TO_HOST, tuple(map(_block_id, nodes)),
            tuple(slots), is_demand=False,
        )  # fmt: skip
        self._num_leaving += len(nodes)
        num_pinned = num_unreferenced - self._tree.num_unreferenced_blocks
        self._begin(command, nodes, num_pinned, now_s)

    def _begin(
        self, command: KvTransfer, nodes: Sequence[KvNode], num_pinned: int, now_s: float
    ) -> None:
        self.num_pinned_blocks += num_pinned
        num_bytes = len(nodes) * self._tree.block_bytes
        copy = OpenCopy(
            command=command, part_bytes=(num_bytes,), nodes=tuple(nodes),
            num_pinned_blocks=num_pinned,
        )  # fmt: skip
        self._transfers.begin(copy, now_s)


def _block_id(node: KvNode) -> BlockId:
    assert node.block_id is not None, node
    return node.block_id


def _with_ancestors(nodes: Sequence[KvNode]) -> list[KvNode]:
    """Each once, parents before their children."""
    found: dict[KvNode, None] = {}
    for node in nodes:
        one: KvNode | None = node
        while one is not None and one not in found:
            found[one] = None
            one = one.parent
    return sorted(found, key=lambda node: node.depth)
