"""Prefix tree of full KV blocks on the device and on the host, by their tokens. Pure.

The tree counts references. It knows no pool, budget or link: it returns the blocks and slots that
it no longer needs.

A referenced node refers to its parent. So holding a node holds all its ancestors, and a node
without references has no referenced descendants. The parent of a node with a device block has one,
too: blocks leave the device from the leaves on, and return from the root on.

Source: FastLibra section 4 (one tree, leaves leave first). One node is one block.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ..plan import BlockId, HostSlot
from ..request import Request, RequestStatus
from .policies.policy import MemoryPolicy


class FreedKv(NamedTuple):
    """Blocks and slots without content, which the caller must free."""

    block_ids: list[BlockId]
    host_slots: list[HostSlot]


@dataclass(slots=True, eq=False)
class _Root:
    namespace: bytes
    num_device_blocks: int = 0
    num_host_blocks: int = 0
    children: "dict[bytes, KvNode]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class KvNode:
    """Keys and values of one full block, after those of its ancestors. Only the tree changes it."""

    is_adapter: ClassVar[bool] = False

    tokens: bytes  # ids of the block's tokens, 4 bytes each; the key among siblings
    depth: int  # number of ancestors
    num_bytes: int
    parent: "KvNode | None" = field(repr=False)  # None: the first block of its namespace
    root: _Root | None = field(repr=False)  # None: detached
    block_id: BlockId | None = None
    host_slot: HostSlot | None = None
    num_references: int = 0  # holds of requests and copies, and referenced children
    num_device_children: int = 0  # those with a block
    awaited_by: Request | None = field(default=None, repr=False)  # the last one it was copied for
    children: "dict[bytes, KvNode]" = field(default_factory=dict, repr=False)

    @property
    def is_awaited(self) -> bool:
        """Whether it was copied to the device for a request that still waits."""
        return self.awaited_by is not None and self.awaited_by.status is RequestStatus.WAITING

    @property
    def can_return(self) -> bool:
        """Whether the host has a copy."""
        return self.host_slot is not None

    @property
    def is_free_leaf(self) -> bool:
        """Whether its block may be evicted now."""
        return (
            self.block_id is not None
            and not self.num_references
            and not self.num_device_children
            and self.root is not None
        )


class KvTree:
    """Nodes by namespace and tokens. The policy is offered exactly the free leaves.

    A referenced node is detached if its content or that of an ancestor is gone. No match finds a
    detached node, and it is freed with its last reference. Each call takes O(blocks that it names
    or frees).
    """

    def __init__(self, block_size: int, block_bytes: int, policy: MemoryPolicy) -> None:
        """``block_size``: tokens of a block. ``block_bytes``: bytes of a block over all layers."""
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.num_nodes = 0
        self.num_device_blocks = 0
        self.num_unreferenced_blocks = 0  # on the device; all can be evicted, leaves first
        self.num_host_blocks = 0  # with or without a block on the device
        self.num_claims = 0  # how often an unreferenced block was referenced or evicted
        self._policy = policy
        self._pack = struct.Struct(f"={block_size}i").pack
        self.by_block: dict[BlockId, KvNode] = {}  # nodes on the device
        self.changed: set[bytes] = set()  # namespaces with changed blocks, until they are taken
        self._roots: dict[bytes, _Root] = {}
        self._detached: set[KvNode] = set()

    def match(self, namespace: bytes, token_ids: Sequence[int], max_tokens: int) -> list[KvNode]:
        """Return the longest path of known blocks among the first ``max_tokens`` tokens.

        Blocks on the device come first, then blocks only on the host. The path is not held yet.
        """
        path: list[KvNode] = []
        root = self._roots.get(namespace)
        if root is None:
            return path
        pack, size, children = self._pack, self.block_size, root.children
        for start in range(0, min(max_tokens, len(token_ids)) - size + 1, size):
            node = children.get(pack(*token_ids[start : start + size]))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def hold(self, node: KvNode) -> None:
        """Hold ``node`` and its ancestors until ``release``.

        A request holds its last block in the tree, a copy holds the block that it reads or writes.
        O(1) if the node is referenced already, otherwise O(its depth).
        """
        held: KvNode | None = node
        while held is not None:
            held.num_references += 1
            if held.num_references > 1:
                return
            if held.block_id is not None:
                self.num_unreferenced_blocks -= 1
                self.num_claims += 1
                if not held.num_device_children:
                    self._policy.withdraw(held)
            held = held.parent

    def release(self, node: KvNode) -> FreedKv:
        """End one ``hold`` of ``node``. Nodes without references stay unless they are detached."""
        freed = FreedKv([], [])
        released: KvNode | None = node
        while released is not None:
            assert released.num_references > 0, released
            released.num_references -= 1
            if released.num_references:
                break
            if released.root is None:
                self._detached.remove(released)
                self._unlink(released)
                self._free(released, freed)
            elif released.block_id is not None:
                self.num_unreferenced_blocks += 1
                if not released.num_device_children:
                    self._policy.offer(released)
            released = released.parent
        return freed

    def insert(
        self, namespace: bytes, parent: KvNode | None, token_ids: Sequence[int], block_id: BlockId
    ) -> KvNode:
        """Insert a request's full block after ``parent``, which the request holds; None = first.

        The hold moves from ``parent`` to the returned node. If there was a node with the same
        tokens and a block, it keeps its block, and ``block_id`` still belongs to the request.
        """
        tokens = self._pack(*token_ids)
        root, depth = None, 0
        if parent is not None:
            assert parent.num_references > 0 and parent.block_id is not None, parent
            root, depth = parent.root, parent.depth + 1
            siblings = parent.children
        else:
            root = self._roots.get(namespace)
            if root is None:
                root = self._roots[namespace] = _Root(namespace)
            siblings = root.children
        node = siblings.get(tokens)
        if node is None:
            # The request's reference to the parent becomes the node's.
            node = KvNode(tokens, depth, self.block_bytes, parent, root, num_references=1)
            siblings[tokens] = node
            self.num_nodes += 1
            if root is None:
                self._detached.add(node)
        else:
            self.hold(node)
            if parent is not None:
                parent.num_references -= 1
        if node.block_id is None:
            self.assign_block(node, block_id)
        return node

    def assign_block(self, node: KvNode, block_id: BlockId) -> None:
        """Assign a block to a held node that is only on the host. Its parent must have a block.

        The caller must not read the block before the copy to it has ended.
        """
        parent, root = node.parent, node.root
        assert node.block_id is None and node.num_references > 0, node
        assert parent is None or parent.block_id is not None, parent
        node.block_id = block_id
        self.by_block[block_id] = node
        self.num_device_blocks += 1
        if root is not None:
            root.num_device_blocks += 1
            self.changed.add(root.namespace)
        if parent is not None:
            parent.num_device_children += 1

    def set_host_slot(self, node: KvNode, host_slot: HostSlot) -> None:
        """Record that ``host_slot`` has a copy of the node's block. The node owns the slot."""
        assert node.host_slot is None and node.block_id is not None, node
        node.host_slot = host_slot
        self.num_host_blocks += 1
        if node.root is not None:
            node.root.num_host_blocks += 1
            self.changed.add(node.root.namespace)

    def clear_host_slot(self, node: KvNode) -> FreedKv:
        """Drop the copy on the host. A node without a block is removed with its descendants.

        A referenced node that is only on the host must not be dropped: a request waits for it.
        """
        assert node.host_slot is not None, node
        if node.block_id is None:
            assert not node.num_references, node
            return self._cut(node)
        freed = FreedKv([], [])
        self._free_slot(node, freed)
        return freed

    def evict(self, node: KvNode, freed: FreedKv | None = None) -> FreedKv:
        """Free the block of a free leaf. Without a copy on the host, remove it with descendants.

        Returns ``freed`` with what was freed; None = nothing before.
        """
        assert node.is_free_leaf, node
        freed = FreedKv([], []) if freed is None else freed
        if node.host_slot is not None:
            self._free_block(node, freed)
            self._policy.remove(node)
        else:
            self._unlink(node)
            if node.children:
                self._detach(node.children.values(), freed)
            self._free(node, freed)
        self._offer_if_free(node.parent)
        return freed

    def drop_content(self, node: KvNode) -> FreedKv:
        """Remove a node and its descendants from matches, after a copy to its block has failed.

        No error if the node was removed already.
        """
        return self._cut(node) if node.root is not None else FreedKv([], [])

    def drop_namespace(self, namespace: bytes) -> FreedKv:
        """Remove all nodes of a namespace from matches. O(nodes)."""
        freed = FreedKv([], [])
        root = self._roots.pop(namespace, None)
        if root is not None:
            self._detach(root.children.values(), freed)
        return freed

    def has_namespace(self, namespace: bytes) -> bool:
        """Whether a namespace has nodes, on the device or on the host."""
        return namespace in self._roots

    def num_blocks_of(self, namespace: bytes) -> int:
        """Return the blocks of a namespace on the device, without detached ones. O(1)."""
        root = self._roots.get(namespace)
        return 0 if root is None else root.num_device_blocks

    def num_host_blocks_of(self, namespace: bytes) -> int:
        """Return the blocks of a namespace with a host copy, without detached ones. O(1)."""
        root = self._roots.get(namespace)
        return 0 if root is None else root.num_host_blocks

    def unreferenced(self, namespace: bytes) -> list[KvNode]:
        """Return the evictable nodes of a namespace on the device, children before parents.

        O(nodes of the namespace).
        """
        root = self._roots.get(namespace)
        return [] if root is None else self.unreferenced_from(root.children.values())

    def unreferenced_from(self, tops: Iterable[KvNode]) -> list[KvNode]:
        """Return the evictable nodes among ``tops`` and their descendants, as ``unreferenced``."""
        left, found = list(tops), []
        while left:
            node = left.pop()
            if node.block_id is not None:
                left.extend(node.children.values())
                if not node.num_references:
                    found.append(node)
        found.reverse()  # parents were found before their children
        return found

    def _cut(self, node: KvNode) -> FreedKv:
        freed = FreedKv([], [])
        had_block = node.block_id is not None
        self._unlink(node)
        self._detach((node,), freed)
        if had_block:
            self._offer_if_free(node.parent)
        return freed

    def _unlink(self, node: KvNode) -> None:
        """Remove a node from its parent. A detached node may be replaced there already."""
        parent, root = node.parent, node.root
        owner = parent if parent is not None else root
        if owner is not None and owner.children.get(node.tokens) is node:
            del owner.children[node.tokens]
        if root is not None and not root.children:
            del self._roots[root.namespace]

    def _detach(self, tops: Iterable[KvNode], freed: FreedKv) -> None:
        """Free unreferenced nodes of unlinked subtrees, and detach the others."""
        left = list(tops)
        while left:
            node = left.pop()
            left.extend(node.children.values())
            if not node.num_references:
                self._free(node, freed)
                continue
            if node.root is not None:
                node.root.num_device_blocks -= node.block_id is not None
                node.root.num_host_blocks -= node.host_slot is not None
                self.changed.add(node.root.namespace)
            node.root = None
            self._detached.add(node)
            node.children = {t: child for t, child in node.children.items() if child.num_references}

    def _free(self, node: KvNode, freed: FreedKv) -> None:
        if node.block_id is not None:
            self._free_block(node, freed)
        if node.host_slot is not None:
            self._free_slot(node, freed)
        self._policy.remove(node)
        node.root = None
        node.children.clear()  # leave no reference cycle: the garbage collector may be off
        self.num_nodes -= 1

    def _free_slot(self, node: KvNode, freed: FreedKv) -> None:
        assert node.host_slot is not None, node
        freed.host_slots.append(node.host_slot)
        node.host_slot = None
        self.num_host_blocks -= 1
        if node.root is not None:
            node.root.num_host_blocks -= 1
            self.changed.add(node.root.namespace)

    def _free_block(self, node: KvNode, freed: FreedKv) -> None:
        assert node.block_id is not None, node
        freed.block_ids.append(node.block_id)
        del self.by_block[node.block_id]
        node.block_id = node.awaited_by = None
        self.num_device_blocks -= 1
        if node.parent is not None:
            node.parent.num_device_children -= 1
        if node.root is not None:
            node.root.num_device_blocks -= 1
            self.changed.add(node.root.namespace)
            # A detached node was referenced until now, and not counted.
            self.num_unreferenced_blocks -= 1
            self.num_claims += 1

    def _offer_if_free(self, node: KvNode | None) -> None:
        if node is not None and node.is_free_leaf:
            self._policy.offer(node)
