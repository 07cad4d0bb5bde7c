"""KV of prefixes that requests have computed, and the adapter versions that can use it. Pure.

Connects the tree, which knows contents and references, with the pool, which knows free blocks.
Blocks that no request holds stay, and are evictable.
"""

import hashlib
import heapq
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from ..plan import BASE_ADAPTER, AdapterId, BlockId, HostSlot
from .adapter_cache import AdapterCache
from .block_pool import BlockPool
from .kv_tree import FreedKv, KvNode, KvTree
from .policies.policy import MemoryPolicy
from .reload_cost import ReuseShare

_MIN_NAMESPACES = 1024
_COUNTED_EVERY_S = 0.5  # between counts of invalid blocks


class HostSlots:
    """Free slots, slots of transfers under way, and slots of nodes, least recently used first.

    The lowest free slots are handed out first, so that adjacent slots are copied together.
    """

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: number of slots; 0 = no KV is kept on the host."""
        self._slots_per_section = num_slots
        self._free: list[int] = []  # heap
        self._whole = [0] if num_slots else []  # heap: sections with free slots that are not in _free
        self.away: set[int] = set()  # sections without memory
        self._nodes: OrderedDict[HostSlot, KvNode] = OrderedDict()  # oldest use first
        self._last_use: dict[HostSlot, int] = {}  # of the slots of nodes
        self._next_use: Callable[[], int] = lambda: 0
        self._moving: set[HostSlot] = set()  # handed out, not yet of a node
        self._read: set[HostSlot] = set()  # of nodes whose copies to the device are open
        self._num_sections = 1
        self.lost_use: int | None = None  # the last use of what was dropped for room; 0 = unused

    @property
    def num_slots(self) -> int:
        """Slots with memory."""
        num_in_use = len(self._nodes) + len(self._moving)
        return len(self._free) + num_in_use + len(self._whole) * self._slots_per_section

    def take(self) -> HostSlot | None:
        """Hand out a free slot for a copy; None if there is none."""
        if not self._free:
            if not self._whole:
                return None
            self._free.extend(self._slots_of(heapq.heappop(self._whole)))
        slot = HostSlot(heapq.heappop(self._free))
        self._moving.add(slot)
        return slot

    def fill(self, slot: HostSlot, node: KvNode) -> None:
        """Assign a slot that was handed out to a node."""
        self._moving.remove(slot)
        self._nodes[slot] = node
        self._last_use[slot] = self._next_use()

    def return_unused(self, slots: Iterable[HostSlot]) -> None:
        """Free slots that were handed out and not filled."""
        for slot in slots:
            self._moving.remove(slot)
            heapq.heappush(self._free, slot)

    def begin_read(self, slots: Iterable[HostSlot]) -> None:
        """Keep slots of nodes, from which a copy reads, until ``end_read``."""
        self._read.update(slots)

    def end_read(self, slots: Iterable[HostSlot]) -> None:
        self._read.difference_update(slots)

    def free(self, slots: Iterable[HostSlot]) -> None:
        """Free slots that nodes have given up."""
        for slot in slots:
            del self._nodes[slot], self._last_use[slot]
            heapq.heappush(self._free, slot)

    def use(self, path: Sequence[KvNode]) -> None:
        """Mark the blocks of a path as used. The first one counts as the newest use."""
        if self._nodes:
            number = self._next_use()
            for node in reversed(path):
                if node.host_slot is not None:
                    self._nodes.move_to_end(node.host_slot)
                    self._last_use[node.host_slot] = number

    def oldest(self, spared: Collection[KvNode]) -> KvNode | None:
        """Return the least recently used node without references outside ``spared``, if any.

        The caller drops it. Skipped nodes move behind the others, so that later calls do not visit
        them again.
        """
        self.lost_use = self.lost_use or 0
        for _ in range(len(self._nodes)):
            slot, node = next(iter(self._nodes.items()))
            if not node.num_references and node not in spared:
                self.lost_use = max(self.lost_use, self._last_use[slot])
                return node
            self._nodes.move_to_end(slot)
        return None

    def divide(self, slots_per_section: int, away: range, next_use: Callable[[], int]) -> None:
        """Divide the slots into sections, the last of which are away; see ``HostCache.divide``."""
        self._slots_per_section, self._next_use = slots_per_section, next_use
        self._num_sections = away.stop
        self._whole, self.away = list(range(away.start)), set(away)

    def coldest_section(self, since: int) -> tuple[float, int] | None:
        """Return the section least used after ``since``, behind the share that was used.

        None if open copies use all of them. A node in use may lose its copy if it has a block.
        O(slots).
        """
        num_warm = dict.fromkeys(set(range(self._num_sections)) - self.away, 0)
        for slot in self._moving | self._read:
            num_warm.pop(slot // self._slots_per_section, None)
        for slot, node in self._nodes.items():
            section = slot // self._slots_per_section
            if node.num_references and node.block_id is None:
                num_warm.pop(section, None)
            elif section in num_warm:
                num_warm[section] += self._last_use[slot] > since
        coldest = min(num_warm, key=lambda section: (num_warm[section], -section), default=None)
        return None if coldest is None else (num_warm[coldest] / self._slots_per_section, coldest)

    def nodes_in(self, section: int) -> list[KvNode]:
        """Return the nodes with slots in a section."""
        return [self._nodes[slot] for slot in self._slots_of(section) if slot in self._nodes]

    def give_section(self, section: int) -> None:
        """Hand out the slots of a section no more. All of them must be free."""
        slots = self._slots_of(section)
        assert not any(slot in self._moving or slot in self._nodes for slot in slots), section
        self._whole = [one for one in self._whole if one != section]
        self._free = [slot for slot in self._free if slot // self._slots_per_section != section]
        heapq.heapify(self._whole)
        heapq.heapify(self._free)
        self.away.add(section)

    def take_section(self, section: int) -> None:
        """Hand out the slots of a section that has got memory."""
        self.away.remove(section)
        heapq.heappush(self._whole, section)

    def _slots_of(self, section: int) -> Sequence[HostSlot]:
        first = section * self._slots_per_section
        return [HostSlot(slot) for slot in range(first, first + self._slots_per_section)]


class PrefixCache:
    """Prefixes that requests find, hold, store and release."""

    def __init__(
        self,
        pool: BlockPool,
        tree: KvTree,
        policy: MemoryPolicy,
        slots: HostSlots,
        reuse: ReuseShare | None = None,
    ) -> None:
        """``tree``: blocks of ``pool``, ranked by ``policy``.

        ``slots``: on the host. ``reuse``: counts found and computed blocks; None = not counted.
        """
        self._pool = pool
        self._slots = slots
        self._reuse = ReuseShare() if reuse is None else reuse
        self._policy = policy
        self._tree = tree
        self._versions: dict[bytes, set[AdapterId]] = {}  # by KV namespace, without base model
        self._namespaces: dict[AdapterId, dict[bytes, None]] = {}  # the inverse
        self._max_namespaces = _MIN_NAMESPACES  # before namespaces without KV are removed
        self.num_ended_uses = 0  # releases, after which blocks may be evictable

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._tree.num_unreferenced_blocks

    @property
    def num_host_slots(self) -> int:
        """Blocks that fit the host."""
        return self._slots.num_slots

    @property
    def num_host_blocks(self) -> int:
        """Blocks with a copy on the host."""
        return self._tree.num_host_blocks

    def match(self, namespace: bytes, token_ids: tuple[int, ...], max_tokens: int) -> Sequence[KvNode]:
        """Return the blocks of the longest known prefix, of at most ``max_tokens`` tokens."""
        return self._tree.match(namespace, token_ids, max_tokens)

    def hold(self, path: Sequence[KvNode]) -> None:
        """Hold the blocks of ``path`` until ``release``."""
        if path:
            self._tree.hold(path[-1])
            self._mark_cached()

    def visit(self, adapter_id: AdapterId, namespace: bytes, path: Sequence[KvNode], now_s: float) -> None:
        """Record that a request begins with these blocks, which its version can use."""
        if path and adapter_id != BASE_ADAPTER:
            self._record_namespace(namespace, adapter_id)
        self._reuse.record(num_found=len(path))
        for node in path:
            node.awaited_by = None
            self._policy.visit(node, now_s)
        self._slots.use(path)

    def store(
        self,
        adapter_id: AdapterId,
        namespace: bytes,
        parent: KvNode | None,
        token_ids: tuple[int, ...],
        block_id: BlockId,
        now_s: float,
    ) -> KvNode:
        """Store a computed block after ``parent`` (None = as the first), held by its request.

        If an equal block was stored before, ``block_id`` still belongs to the request.
        """
        if parent is None and adapter_id != BASE_ADAPTER:
            self._record_namespace(namespace, adapter_id)
        node = self._tree.insert(namespace, parent, token_ids, block_id)
        self._policy.visit(node, now_s)
        self._reuse.record(num_computed=1)
        if self._tree.num_unreferenced_blocks != self._pool.num_cached_blocks:
            # An equal block was there without holds. It is in use now, so it cannot be reserved.
            self._mark_cached()
            self._pool.reserve_growth(self._pool.num_reserved_blocks)
        return node

    def release(self, path: Sequence[KvNode]) -> None:
        if path:
            self.num_ended_uses += 1
            self.free(self._tree.release(path[-1]))

    def give_host_section(self, section: int) -> None:
        """Drop the copies in a section of the host's slots without open copies; use it no more."""
        for node in self._slots.nodes_in(section):
            if node.host_slot is not None:  # else it went with a node before it
                self.free(self._tree.clear_host_slot(node))
        self._slots.give_section(section)

    def evict_all(self, nodes: Iterable[KvNode]) -> None:
        """Evict the blocks of nodes, each of which is a free leaf when it is taken."""
        freed = FreedKv([], [])
        for node in nodes:
            self._tree.evict(node, freed)
        self.free(freed)

    def node_at(self, block_id: BlockId) -> KvNode | None:
        """Return the node that has a block; None if the block is free, or a request's own."""
        return self._tree.by_block.get(block_id)

    def evicted_with(self, block_id: BlockId) -> list[BlockId]:
        """Return the blocks that ``evict_block`` evicts."""
        nodes = self._tree.unreferenced_from((self._tree.by_block[block_id],))
        return [node.block_id for node in nodes if node.block_id is not None]

    def evict_block(self, block_id: BlockId) -> None:
        """Evict an unreferenced block, and before it the blocks of its descendants."""
        self.evict_all([self._tree.by_block[one] for one in self.evicted_with(block_id)])

    def evict_behind(self, adapter_id: AdapterId, is_on_device: Callable[[AdapterId], bool]) -> bool:
        """Evict the KV of ``adapter_id`` that no version on the device can use.

        Versions with the same content share KV. Returns whether all of it was evicted: blocks that
        copies in progress hold stay.
        """
        num_left = 0
        for namespace in self._namespaces.get(adapter_id, ()):
            if not any(map(is_on_device, self._versions[namespace])):
                self.evict_all(self._tree.unreferenced(namespace))
                num_left += self._tree.num_blocks_of(namespace)
        return not num_left

    def behind(self, adapter_id: AdapterId) -> list[KvNode]:
        """Return unreferenced nodes that a version can use, children before parents.

        O(namespaces of the version + their nodes).
        """
        found: list[KvNode] = []
        for namespace in self._namespaces.get(adapter_id, ()):
            found += self._tree.unreferenced(namespace)
        return found

    def versions_of(self, namespace: bytes) -> Collection[AdapterId]:
        """Return the versions that can use a namespace; none = it is the base model's."""
        return self._versions.get(namespace, ())

    def num_blocks_of_version(self, adapter_id: AdapterId) -> tuple[int, int]:
        """Return the blocks that a version can use: on the device, and copies on the host."""
        num_device_blocks = num_host_blocks = 0
        for namespace in self._namespaces.get(adapter_id, ()):
            num_device_blocks += self._tree.num_blocks_of(namespace)
            num_host_blocks += self._tree.num_host_blocks_of(namespace)
        return num_device_blocks, num_host_blocks

    def take_changed_versions(self) -> set[AdapterId]:
        """Return the versions with changes of their blocks since the last call."""
        changed = set[AdapterId]()
        for namespace in self._tree.changed:
            changed |= self._versions.get(namespace, set())
        self._tree.changed.clear()
        return changed

    def num_blocks_without(self, is_on_device: Callable[[AdapterId], bool]) -> int:
        """Return the blocks of namespaces without a version on the device. O(namespaces)."""
        return sum(
            self._tree.num_blocks_of(namespace)
            for namespace, versions in self._versions.items()
            if not any(map(is_on_device, versions))
        )

    def drop_version(self, adapter_id: AdapterId) -> None:
        """Drop a version, and the KV that only it could use."""
        for namespace in self._namespaces.pop(adapter_id, ()):
            versions = self._versions[namespace]
            versions.remove(adapter_id)
            if not versions:
                del self._versions[namespace]
                self.free(self._tree.drop_namespace(namespace))

    def _record_namespace(self, namespace: bytes, adapter_id: AdapterId) -> None:
        """Record that a version can use a namespace. Remove those without KV if there are many."""
        self._versions.setdefault(namespace, set()).add(adapter_id)
        self._namespaces.setdefault(adapter_id, {})[namespace] = None
        if len(self._versions) > self._max_namespaces:  # each cache salt adds more
            for name in tuple(self._versions):
                if name != namespace and not self._tree.has_namespace(name):
                    for version in self._versions.pop(name):
                        del self._namespaces[version][name]
            self._max_namespaces = max(_MIN_NAMESPACES, 2 * len(self._versions))

    def free(self, freed: FreedKv) -> None:
        """Free blocks and slots that the tree has returned."""
        self._pool.free(freed.block_ids)
        self._slots.free(freed.host_slots)
        self._mark_cached()

    def _mark_cached(self) -> None:
        self._pool.mark_cached(self.num_evictable_blocks)


class TiedKv:
    """Evicts KV together with the adapter that computed it, if the policy's rules say so.

    KV that is still held is evicted later. Without this rule, KV without its adapter is only
    counted. Source: FastLibra section 4.
    """

    def __init__(self, cache: AdapterCache, prefixes: PrefixCache) -> None:
        self._cache = cache
        self._prefixes = prefixes
        self._is_on = cache.policy.rules.ties_kv_to_adapter
        self._left: dict[AdapterId, None] = {}  # adapters that left and may have KV
        # Blocks that no request can use, because their adapter is not on the device.
        self.num_invalid_blocks = 0
        self._count_at_s = -math.inf

    def count(self, now_s: float) -> None:
        """Count invalid blocks, at most every 0.5 seconds: there may be many namespaces."""
        if not self._is_on and now_s >= self._count_at_s:
            self.num_invalid_blocks = self._prefixes.num_blocks_without(self._is_on_device)
            self._count_at_s = now_s + _COUNTED_EVERY_S

    def adapter_left(self, adapter_id: AdapterId) -> None:
        """Evict KV that only this adapter can use. Blocks held by copies follow later."""
        if self._is_on and not self._prefixes.evict_behind(adapter_id, self._is_on_device):
            self._left[adapter_id] = None

    def load_failed(self, adapter_id: AdapterId) -> None:
        """Record a failed load: KV may have been computed while the adapter was loading."""
        self._left[adapter_id] = None

    def discard(self, adapter_id: AdapterId) -> None:
        """Drop the record of a version that is dropped with its KV."""
        self._left.pop(adapter_id, None)

    def evict_pending(self) -> None:
        """Evict KV that was still held when its adapter left, or when its load failed."""
        for adapter_id in tuple(self._left):
            if not self._cache.has_failed(adapter_id):  # else a request still refers to it
                del self._left[adapter_id]
                self.adapter_left(adapter_id)

    def _is_on_device(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter is on the device, or loading."""
        return adapter_id in self._cache.on_device


def kv_namespace(
    base_fingerprint: str, dtype: str, adapters: tuple[tuple[str, float], ...], cache_salt: str
) -> bytes:
    """Return the SHA-256 of a request's KV namespace, 32 bytes.

    ``base_fingerprint`` names the base model and its revision, ``adapters`` is the ordered list of
    (digest of its content or what stands for it, scale). Two requests may share KV only if this is
    equal. Every field is preceded by its length, so no two different inputs are encoded alike.
    """
    parts = [base_fingerprint.encode(), dtype.encode(), cache_salt.encode()]
    for digest, scale in adapters:
        parts += [digest.encode(), struct.pack(">d", scale)]
    return hashlib.sha256(_length_prefixed(parts)).digest()


def _length_prefixed(parts: Iterable[bytes]) -> bytes:
    """Join ``parts``, each behind its length, so that no two lists give equal bytes."""
    return b"".join(struct.pack(">Q", len(part)) + part for part in parts)
