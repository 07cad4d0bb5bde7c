"""KV of prefixes that requests have computed, and the adapter versions that can use it. Pure.

Connects the tree, which knows contents and references, with the pool, which knows free blocks.
Blocks that no request holds stay, and are evictable.
"""

from collections.abc import Callable, Sequence

from ..plan import BASE_ADAPTER, AdapterId, BlockId
from .block_pool import BlockPool
from .host_slots import HostSlots
from .kv_tree import FreedKv, KvNode, KvTree
from .policies.policy import MemoryPolicy
from .policy_inputs import ReuseShare

_MIN_NAMESPACES = 1024


class PrefixCache:
    """Prefixes that requests find, hold, store and release."""

    def __init__(
        self, pool: BlockPool, tree: KvTree | None, policy: MemoryPolicy, slots: HostSlots,
        reuse: ReuseShare | None = None,
    ) -> None:  # fmt: skip
        """``tree``: blocks of ``pool``, ranked by ``policy``; None = no prefixes are kept.

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

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that no request holds."""
        return 0 if self._tree is None else self._tree.num_unreferenced_blocks

    @property
    def num_host_slots(self) -> int:
        """Blocks that fit the host."""
        return self._slots.num_slots

    @property
    def num_host_blocks(self) -> int:
        """Blocks with a copy on the host."""
        return 0 if self._tree is None else self._tree.num_host_blocks

    def match(
        self, namespace: bytes, token_ids: tuple[int, ...], max_tokens: int
    ) -> Sequence[KvNode]:
        """Return the blocks of the longest known prefix, of at most ``max_tokens`` tokens."""
        return () if self._tree is None else self._tree.match(namespace, token_ids, max_tokens)

    def hold(self, path: Sequence[KvNode]) -> None:
        """Hold the blocks of ``path`` until ``release``."""
        if self._tree is not None and path:
            self._tree.hold(path[-1])
            self._mark_cached()

    def visit(
        self, adapter_id: AdapterId, namespace: bytes, path: Sequence[KvNode], now_s: float
    ) -> None:
        """Record that a request begins with these blocks, which its version can use."""
        if path and adapter_id != BASE_ADAPTER:
            self._record_namespace(namespace, adapter_id)
        self._reuse.record(num_found=len(path))
        for node in path:
            self._policy.visit(node, now_s)
        self._slots.use(path)

    def store(
        self, adapter_id: AdapterId, namespace: bytes, parent: KvNode | None,
        token_ids: tuple[int, ...], block_id: BlockId, now_s: float,
    ) -> KvNode:  # fmt: skip
        """Store a computed block after ``parent`` (None = as the first), held by its request.

        If an equal block was stored before, ``block_id`` still belongs to the request.
        """
        assert self._tree is not None, "nothing is kept"
        if parent is None and adapter_id != BASE_ADAPTER:
            self._record_namespace(namespace, adapter_id)
        node = self._tree.insert(namespace, parent, token_ids, block_id)
        self._policy.visit(node, now_s)
        self._reuse.record(num_computed=1)
        if self.num_evictable_blocks != self._pool.num_cached_blocks:
            # An equal block was there without holds. It is in use now, so it cannot be reserved.
            self._mark_cached()
            self._pool.reserve_growth(self._pool.num_reserved_blocks)
        return node

    def release(self, path: Sequence[KvNode]) -> None:
        """Release the blocks of ``path``."""
        if self._tree is not None and path:
            self.free(self._tree.release(path[-1]))

    def evict(self, node: KvNode) -> None:
        """Evict the block of a free leaf."""
        assert self._tree is not None
        self.free(self._tree.evict(node))

    def evict_behind(
        self, adapter_id: AdapterId, is_on_device: Callable[[AdapterId], bool]
    ) -> bool:
        """Evict the KV of ``adapter_id`` that no version on the device can use.

        Versions with the same content share KV. Returns whether all of it was evicted: blocks that
        copies in progress hold stay.
        """
        num_left = 0
        for namespace in self._namespaces.get(adapter_id, ()):
            if not any(map(is_on_device, self._versions[namespace])):
                assert self._tree is not None
                for node in self._tree.unreferenced(namespace):
                    self.evict(node)
                num_left += self._tree.num_blocks_of(namespace)
        return not num_left

    def behind(self, adapter_id: AdapterId) -> list[KvNode]:
        """Return unreferenced nodes that a version can use, children before parents.

        O(namespaces of the version + their nodes).
        """
        found: list[KvNode] = []
        for namespace in self._namespaces.get(adapter_id, ()):
            assert self._tree is not None
            found += self._tree.unreferenced(namespace)
        return found

    def num_blocks_of_version(self, adapter_id: AdapterId) -> tuple[int, int]:
        """Return the blocks that a version can use: on the device, and copies on the host."""
        num_device_blocks = num_host_blocks = 0
        for namespace in self._namespaces.get(adapter_id, ()):
            assert self._tree is not None
            num_device_blocks += self._tree.num_blocks_of(namespace)
            num_host_blocks += self._tree.num_host_blocks_of(namespace)
        return num_device_blocks, num_host_blocks

    def take_changed_versions(self) -> set[AdapterId]:
        """Return the versions with changes of their blocks since the last call."""
        changed = set[AdapterId]()
        if self._tree is not None:
            for namespace in self._tree.changed:
                changed |= self._versions.get(namespace, set())
            self._tree.changed.clear()
        return changed

    def num_blocks_without(self, is_on_device: Callable[[AdapterId], bool]) -> int:
        """Return the blocks of namespaces without a version on the device. O(namespaces)."""
        if self._tree is None:
            return 0
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
                assert self._tree is not None
                self.free(self._tree.drop_namespace(namespace))

    def check_invariants(self) -> None:
        """Assert that tree and pool agree."""
        assert self._pool.num_cached_blocks == self.num_evictable_blocks
        self._slots.check_invariants()
        if self._tree is not None:
            self._tree.check_invariants()

    def _record_namespace(self, namespace: bytes, adapter_id: AdapterId) -> None:
        assert self._tree is not None
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
