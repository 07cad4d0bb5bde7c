"""Copies KV blocks to the host ahead of eviction, and back. Pure.

Copying is separate from eviction: blocks that are likely to be evicted soon are copied ahead, so
that they can be evicted without waiting. Blocks without a copy are dropped and computed again.
A copy holds its blocks from its plan to its end, and belongs to no request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...profiles.link import Direction
from ..plan import BlockId, HostSlot, KvTransfer
from ..request import Request
from .adapter_cache import DeviceCopy
from .block_pool import BlockPool
from .grant import Need, Verdict
from .kv_tree import KvNode, KvTree
from .policies.policy import RankingPolicy
from .prefix_cache import HostSlots, PrefixCache
from .reload_cost import ReloadCosts
from .room import RoomMaker
from .transfers import OpenCopy, TransferTable

# Share of the pool that should be free, or copied and unused, at any time. An admitted prompt takes
# many blocks at once, and dropping the beginning of a prefix drops the copies of its end, too. With
# 5 %, conversations waited 12 to 15 % longer.
_READY_SHARE = 0.2
# Share that one plan copies. It is the same while requests wait for blocks from the host, because
# these use the other direction of the link.
_PLAN_SHARE = 0.03
# Share that must be used or evicted before the order of eviction is read again.
_CHANGE_SHARE = 0.01
_MAX_SWAP_INS = 2  # copies from the host for a waiting request; then it computes the KV


@dataclass(slots=True, eq=False)
class KvSwapper:
    """Plans copies of KV blocks between the device and the host."""

    _tree: KvTree  # with blocks of the pool and slots
    _pool: BlockPool
    _prefixes: PrefixCache  # frees blocks and slots that the tree returns
    _slots: HostSlots
    _policy: RankingPolicy  # of evictions from the device
    _transfers: TransferTable
    _costs: ReloadCosts
    _room: RoomMaker
    _coming: dict[KvNode, OpenCopy] = field(default_factory=dict)  # their blocks must not be read yet
    _num_leaving: int = 0  # blocks of copies to the host
    # When the order was last read: blocks at its beginning with copies, and the tree's counts.
    _num_copied_ahead: int = 0
    _num_claims: int = 0
    _num_unreferenced: int = 0
    _has_more: bool = True  # more could have been copied

    def num_readable(self, path: Sequence[KvNode]) -> int:
        """Return the number of blocks at the beginning of a path with KV on the device."""
        for number, node in enumerate(path):
            if node.block_id is None or node in self._coming:
                return number
        return len(path)

    def is_coming(self, node: KvNode) -> bool:
        """Whether a copy to the node's block is under way."""
        return node in self._coming

    def swap_in(self, need: Need, path: Sequence[KvNode], num_found: int, now_s: float) -> Verdict | None:
        """Copy the blocks of ``path`` that only the host has; None = the request computes them.

        The request does not hold the copied blocks, so other requests may evict them before it
        runs; only the watermarks leave them alone. After two copies it computes what is missing.
        """
        request, pool, nodes = need.request, self._pool, path[num_found:]
        size = self._tree.block_size
        coming_tokens = range(num_found * size, len(path) * size)
        if self.is_coming(nodes[0]):  # maybe for another request, or for none
            self._transfers.promote_copy(self._coming[nodes[0]], now_s)
            self._keep_for(request, path)
            request.found.coming_tokens = coming_tokens
            return Verdict.LOADING
        if request.found.num_swap_ins == _MAX_SWAP_INS or not self.is_copy_faster(nodes):
            return None
        num_blocks = need.kv_bytes // pool.block_bytes - num_found
        if self._room.blocks_to_come(need, path[:num_found], num_blocks) is None:
            return Verdict.NO_KV
        self._prefixes.hold(path)
        num_reserved = need.running.num_growth_blocks()
        pool.reserve_growth(num_reserved)
        if pool.num_available_blocks < len(nodes):
            self._room.reclaim_for(need, len(nodes))
        block_ids = pool.allocate(len(nodes))
        if block_ids is None:
            self._prefixes.release(path)
            return Verdict.NO_KV
        self.copy_in(nodes, block_ids, now_s)
        self._keep_for(request, path)
        pool.reserve_growth(num_reserved)
        request.found.num_swap_ins += 1
        request.found.coming_tokens = coming_tokens
        return Verdict.LOADING

    def _keep_for(self, request: Request, path: Sequence[KvNode]) -> None:
        """Swap out nothing of what a waiting request will use."""
        for node in path:
            node.awaited_by = request

    def is_copy_faster(self, nodes: Sequence[KvNode]) -> bool:
        """Whether copying these nodes to the device is faster than computing them again."""
        num_bytes = len(nodes) * self._tree.block_bytes
        # Demand transfers share the link equally until the shorter one ends.
        ahead_bytes = sum(
            min(num_bytes, sum(one.part_bytes[one.num_arrived :]))
            for one in self._transfers
            if one.is_demand and one.direction is Direction.TO_DEVICE
        )
        size = self._tree.block_size
        compute_s = self._costs.compute_s(nodes[0].depth * size, len(nodes) * size)
        return self._costs.copy_s(num_bytes + ahead_bytes) < compute_s

    def copy_in(
        self, nodes: Sequence[KvNode], block_ids: Sequence[BlockId], now_s: float, *, is_demand: bool = True
    ) -> None:
        """Copy consecutive held nodes that only the host has to ``block_ids``."""
        slots: list[HostSlot] = []
        for node, block_id in zip(nodes, block_ids, strict=True):
            assert node.host_slot is not None, node
            slots.append(node.host_slot)
            self._tree.assign_block(node, block_id)
        self._slots.use(nodes)
        self._slots.begin_read(slots)
        command = KvTransfer(
            self._transfers.new_id(), Direction.TO_DEVICE, tuple(block_ids), tuple(slots), is_demand
        )
        self._coming.update(dict.fromkeys(nodes, self._begin(command, nodes, len(nodes), now_s)))

    def bring(self, nodes: Sequence[KvNode], now_s: float) -> bool:
        """Copy consecutive nodes that only the host has, and that no request waits for.

        Returns False if there are too few blocks beside those reserved for growth.
        """
        pool = self._pool
        num_reserved = pool.num_reserved_blocks
        self._prefixes.hold(nodes)
        has_room = len(nodes) * pool.block_bytes <= pool.budget.available_bytes
        block_ids = pool.allocate(len(nodes)) if has_room else None
        if block_ids is None:
            self._prefixes.release(nodes)
            return False
        self.copy_in(nodes, block_ids, now_s, is_demand=False)
        pool.reserve_growth(num_reserved)
        return True

    def copy_ahead(self, max_history_blocks: int | None, now_s: float) -> None:
        """Copy the next blocks to be evicted, if too few are free or copied already.

        ``max_history_blocks``: limit of unused blocks on the device; None = no limit.
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
        """Apply the end of a copy. The blocks and slots of a failed copy are dropped."""
        self._room.num_copied_blocks -= copy.num_pinned_blocks
        if copy.direction is Direction.TO_DEVICE:
            self._slots.end_read(copy.command.host_slots)
            for node in copy.nodes:
                del self._coming[node]
            if has_failed:  # with descendants
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

    def _is_short(self, num_wanted: int) -> bool:
        """Whether fewer than ``num_wanted`` blocks surely have copies, and a reading may help."""
        num_claimed = self._tree.num_claims - self._num_claims
        num_left = max(0, self._num_copied_ahead - num_claimed)
        if num_left + self._num_leaving >= num_wanted:
            return False
        num_changed = num_claimed + abs(self._tree.num_unreferenced_blocks - self._num_unreferenced)
        return self._has_more or num_changed >= max(1, _CHANGE_SHARE * self._pool.num_blocks)

    def _next_to_copy(self, num_wanted: int, max_nodes: int) -> tuple[list[KvNode], list[KvNode]]:
        """Read the order for ``num_wanted`` nodes. Return those to copy, and all that were read."""
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
        """Yield blocks approximately in order of eviction.

        A parent follows its last child, because both were used at the same time. The policy does
        not rank the parent before that. KV that is tied to an adapter leaves together with it, and
        its parents come first: the end of a prefix is useless without its beginning.
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
        """Take free slots, and slots of the oldest copies outside ``walked``."""
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
        # Held blocks cannot be reserved.
        self._pool.reserve_growth(self._pool.num_reserved_blocks)
        command = KvTransfer(
            self._transfers.new_id(),
            Direction.TO_HOST,
            tuple(map(_block_id, nodes)),
            tuple(slots),
            is_demand=False,
        )
        self._num_leaving += len(nodes)
        num_pinned = num_unreferenced - self._tree.num_unreferenced_blocks
        self._begin(command, nodes, num_pinned, now_s)

    def _begin(self, command: KvTransfer, nodes: Sequence[KvNode], num_pinned: int, now_s: float) -> OpenCopy:
        self._room.num_copied_blocks += num_pinned
        num_bytes = len(nodes) * self._tree.block_bytes
        copy = OpenCopy(
            command=command, part_bytes=(num_bytes,), nodes=tuple(nodes), num_pinned_blocks=num_pinned
        )
        self._transfers.begin(copy, now_s)
        return copy


def _block_id(node: KvNode) -> BlockId:
    assert node.block_id is not None, node
    return node.block_id


def _with_ancestors(nodes: Sequence[KvNode]) -> list[KvNode]:
    """Return the nodes and their ancestors, each once, parents before children."""
    found: dict[KvNode, None] = {}
    for node in nodes:
        one: KvNode | None = node
        while one is not None and one not in found:
            found[one] = None
            one = one.parent
    return sorted(found, key=lambda node: node.depth)
