import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from corun.runtime.memory.kv_tree import FreedKv, KvNode, KvTree
from corun.runtime.memory.policies.policy import MemoryItem
from corun.runtime.plan import BlockId, HostSlot
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.invariants import check_invariants

SIZE = 2
BLOCK_BYTES = 100
A, B = b"a" * 32, b"b" * 32


class RecordingPolicy:
    """Ranks in order of offers, and checks that calls are valid."""

    def __init__(self) -> None:
        self.offered: dict[MemoryItem, None] = {}
        self.forgotten: list[MemoryItem] = []

    def visit(self, item: MemoryItem, now_s: float) -> None:
        raise AssertionError("the tree has no clock")

    def offer(self, item: MemoryItem) -> None:
        assert item not in self.offered
        self.offered[item] = None

    def withdraw(self, item: MemoryItem) -> None:
        del self.offered[item]

    def remove(self, item: MemoryItem) -> None:
        self.offered.pop(item, None)
        self.forgotten.append(item)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        yield from (one for one in self.offered if is_adapter in (None, one.is_adapter))


def make_tree() -> tuple[KvTree, RecordingPolicy]:
    policy = RecordingPolicy()
    return KvTree(SIZE, BLOCK_BYTES, policy), policy


def enter(tree: KvTree, token_ids: Sequence[int], first_block: int, namespace: bytes = A) -> list[KvNode]:
    """All whole blocks of ``token_ids``, with ids from ``first_block`` on; the last one is held."""
    path: list[KvNode] = []
    for number in range(len(token_ids) // SIZE):
        tokens = token_ids[number * SIZE : (number + 1) * SIZE]
        parent = path[-1] if path else None
        path.append(tree.insert(namespace, parent, tokens, BlockId(first_block + number)))
    check_invariants(tree)
    return path


def keep(tree: KvTree, token_ids: Sequence[int], first_block: int, namespace: bytes = A) -> list[KvNode]:
    """The same, without a hold."""
    path = enter(tree, token_ids, first_block, namespace)
    assert tree.release(path[-1]) == ([], [])
    check_invariants(tree)
    return path


def to_host(tree: KvTree, node: KvNode, slot: int) -> None:
    """Copy a node to the host, and evict it from the device."""
    tree.set_host_slot(node, HostSlot(slot))
    block_id = node.block_id
    assert tree.evict(node) == ([block_id], [])
    check_invariants(tree)


def test_whole_blocks_of_equal_tokens_match_within_their_namespace() -> None:
    tree, _ = make_tree()
    path = keep(tree, (1, 2, 3, 4, 5, 6), 0)
    assert tree.match(A, (1, 2, 3, 4, 5, 6), 6) == path
    assert tree.match(A, [1, 2, 3, 4, 5, 6], 5) == path[:2]
    assert tree.match(A, (1, 2, 3, 4), 100) == path[:2]
    assert tree.match(A, (1, 2, 3, 5, 5, 6), 6) == path[:1]
    assert tree.match(A, (2, 1), 2) == tree.match(A, (3, 4), 2) == tree.match(A, (1, 2), 1) == []
    assert tree.match(B, (1, 2), 2) == []


def test_nothing_is_looked_at_behind_the_first_block_that_is_missing() -> None:
    tree, _ = make_tree()
    keep(tree, (1, 2), 0)

    class Watched(tuple[int, ...]):
        def __getitem__(self, index: Any) -> Any:
            assert index.stop <= 2 * SIZE
            return super().__getitem__(index)

    assert len(tree.match(A, Watched((1, 2, 9, 9, 9, 9, 9)), 7)) == 1


def test_what_exists_is_shared_and_the_second_block_stays_with_who_computed_it() -> None:
    tree, _ = make_tree()
    first = enter(tree, (1, 2, 3, 4), 0)
    second = enter(tree, (1, 2, 3, 4, 5, 6), 10)
    assert second[:2] == first
    assert [node.block_id for node in second] == [0, 1, 12]
    assert [node.depth for node in second] == [0, 1, 2]
    assert tree.num_device_blocks == tree.num_nodes == tree.num_blocks_of(A) == 3
    assert tree.num_blocks_of(B) == tree.num_unreferenced_blocks == 0
    tree.release(first[-1])
    assert tree.num_unreferenced_blocks == 0
    tree.release(second[-1])
    assert tree.num_unreferenced_blocks == 3


def test_only_free_leaves_are_offered_one_after_the_other() -> None:
    tree, policy = make_tree()
    root, left = enter(tree, (1, 2, 3, 4), 0)
    _, right = enter(tree, (1, 2, 5, 6), 2)
    assert not policy.offered
    tree.release(left)
    assert list(policy.offered) == [left]
    tree.hold(root)
    assert tree.evict(left) == ([1], [])
    assert tree.match(A, (1, 2, 3, 4), 4) == [root]
    tree.release(right)
    assert tree.evict(right) == ([3], []) and not policy.offered
    tree.release(root)
    assert list(policy.offered) == [root]
    tree.hold(root)
    assert not policy.offered
    tree.release(root)
    assert tree.evict(root) == ([0], [])
    assert tree.num_nodes == tree.num_device_blocks == 0
    check_invariants(tree)


def test_what_is_referenced_or_has_blocks_behind_it_cannot_be_evicted() -> None:
    tree, _ = make_tree()
    first, second = enter(tree, (1, 2, 3, 4), 0)
    for node in (first, second):
        with pytest.raises(AssertionError):
            tree.evict(node)
    tree.release(second)
    with pytest.raises(AssertionError):
        tree.evict(first)
    with pytest.raises(AssertionError):
        tree.release(second)


def test_nothing_enters_behind_what_is_not_held() -> None:
    tree, _ = make_tree()
    (node,) = keep(tree, (1, 2), 0)
    with pytest.raises(AssertionError):
        tree.insert(A, node, (3, 4), BlockId(1))


def test_a_hold_of_one_holds_all_before_it() -> None:
    tree, policy = make_tree()
    path = keep(tree, range(20), 0)
    tree.hold(path[4])
    assert [node.num_references for node in path] == [1] * 5 + [0] * 5
    assert tree.num_unreferenced_blocks == 5
    assert tree.unreferenced(A) == path[:4:-1]
    for node in tree.unreferenced(A):
        tree.evict(node)
    assert tree.num_unreferenced_blocks == 0 and not policy.offered
    tree.release(path[4])
    assert tree.unreferenced(A) == path[4::-1]
    check_invariants(tree)


def test_all_that_nobody_refers_to_can_be_evicted_leaves_first() -> None:
    tree, _ = make_tree()
    for first_block, end in ((0, (5, 6)), (10, (7, 8, 9, 9)), (20, ())):
        keep(tree, (1, 2, 3, 4, *end), first_block)
    keep(tree, (7, 7), 30)
    held = keep(tree, (1, 2), 40, B)
    freed = [tree.evict(node).block_ids for node in tree.unreferenced(A)]
    assert sorted(freed) == [[0], [1], [2], [12], [13], [30]]
    assert tree.unreferenced(A) == [] and tree.unreferenced(B) == held


def test_without_a_copy_on_the_host_what_is_behind_it_goes_too() -> None:
    tree, policy = make_tree()
    first, second, third = keep(tree, (1, 2, 3, 4, 5, 6), 0)
    to_host(tree, third, 7)
    to_host(tree, second, 8)
    assert tree.match(A, (1, 2, 3, 4, 5, 6), 6) == [first, second, third]
    assert (tree.num_device_blocks, tree.num_host_blocks, tree.num_nodes) == (1, 2, 3)
    assert policy.forgotten == [third, second]
    assert tree.unreferenced(A) == [first]
    freed = tree.evict(first)
    assert freed.block_ids == [0] and sorted(freed.host_slots) == [7, 8]
    assert tree.num_nodes == tree.num_host_blocks == 0
    check_invariants(tree)


def test_it_comes_back_from_the_root_on_while_it_is_held() -> None:
    tree, policy = make_tree()
    first, second = keep(tree, (1, 2, 3, 4), 0)
    to_host(tree, second, 0)
    to_host(tree, first, 1)
    with pytest.raises(AssertionError):
        tree.assign_block(first, BlockId(5))
    tree.hold(second)
    with pytest.raises(AssertionError):
        tree.assign_block(second, BlockId(5))
    with pytest.raises(AssertionError):
        tree.clear_host_slot(first)
    tree.assign_block(first, BlockId(5))
    tree.assign_block(second, BlockId(6))
    check_invariants(tree)
    assert not policy.offered and tree.num_unreferenced_blocks == 0
    tree.release(second)
    assert list(policy.offered) == [second] and tree.num_unreferenced_blocks == 2
    assert tree.clear_host_slot(first) == ([], [1])
    check_invariants(tree)
    assert tree.evict(second) == ([6], [])
    assert tree.evict(first) == ([5], [0])


def test_what_is_only_on_the_host_takes_the_block_of_who_computed_it_again() -> None:
    tree, _ = make_tree()
    first, second = keep(tree, (1, 2, 3, 4), 0)
    to_host(tree, second, 0)
    to_host(tree, first, 1)
    assert enter(tree, (1, 2), 9) == [first]
    assert first.block_id == 9 and first.host_slot == 1 and second.block_id is None


def test_a_slot_that_is_given_up_takes_what_lies_behind_it() -> None:
    tree, policy = make_tree()
    path = keep(tree, (1, 2, 3, 4, 5, 6), 0)
    to_host(tree, path[2], 0)
    to_host(tree, path[1], 1)
    freed = tree.clear_host_slot(path[1])
    assert freed.block_ids == [] and sorted(freed.host_slots) == [0, 1]
    assert tree.match(A, (1, 2, 3, 4), 4) == [path[0]]
    assert list(policy.offered) == [path[0]]
    check_invariants(tree)


def test_a_namespace_that_is_dropped_is_found_no_more_and_freed_when_released() -> None:
    tree, policy = make_tree()
    path = enter(tree, (1, 2, 3, 4), 0)
    keep(tree, (1, 2, 7, 8), 10)
    other = keep(tree, (1, 2), 20, B)
    assert tree.drop_namespace(A) == ([11], [])
    assert tree.match(A, (1, 2), 2) == [] and tree.match(B, (1, 2), 2) == other
    assert tree.num_blocks_of(A) == 0 and tree.num_device_blocks == 3
    check_invariants(tree)
    last = tree.insert(A, path[-1], (5, 6), BlockId(2))
    again = enter(tree, (1, 2, 3, 4), 30)
    assert again[0] is not path[0] and tree.num_blocks_of(A) == 2
    freed = tree.release(last)
    assert sorted(freed.block_ids) == [0, 1, 2]
    assert tree.match(A, (1, 2, 3, 4, 5, 6), 6) == again
    assert list(policy.offered) == other
    check_invariants(tree)
    assert tree.drop_namespace(b"unknown") == ([], [])


def test_a_failed_copy_is_found_no_more_nor_what_is_behind_it() -> None:
    tree, policy = make_tree()
    first, second, third = enter(tree, (1, 2, 3, 4, 5, 6), 0)
    keep(tree, (1, 2, 3, 4, 7, 8), 10)
    assert tree.drop_content(second) == ([12], [])
    assert tree.drop_content(third) == tree.drop_content(second) == ([], [])
    assert tree.match(A, (1, 2, 3, 4), 4) == [first]
    again = enter(tree, (1, 2, 3, 4), 20)
    assert again[0] is first and again[1].block_id == 21
    freed = tree.release(third)
    assert sorted(freed.block_ids) == [1, 2]
    assert tree.match(A, (1, 2, 3, 4), 4) == again
    tree.release(again[-1])
    assert list(policy.offered) == [again[-1]]
    assert tree.drop_content(again[-1]) == ([21], []) and list(policy.offered) == [first]
    check_invariants(tree)


def test_what_waits_for_a_copy_that_will_not_come_has_no_block_to_count() -> None:
    tree, _ = make_tree()
    first, second, third = keep(tree, (1, 2, 3, 4, 5, 6), 0)
    to_host(tree, third, 0)
    to_host(tree, second, 1)
    tree.hold(third)
    assert tree.drop_content(second) == ([], [])
    assert tree.num_blocks_of(A) == 1
    check_invariants(tree)
    freed = tree.release(third)
    assert freed.block_ids == [] and sorted(freed.host_slots) == [0, 1]
    assert tree.unreferenced(A) == [first]
    check_invariants(tree)


def test_requests_that_are_detached_share_until_each_has_ended() -> None:
    tree, _ = make_tree()
    (first,) = enter(tree, (1, 2), 0)
    tree.hold(first)
    tree.drop_namespace(A)
    second = tree.insert(A, first, (3, 4), BlockId(1))
    assert tree.insert(A, first, (3, 4), BlockId(2)) is second
    assert tree.release(second) == ([], [])
    tree.hold(first)
    assert tree.release(second) == ([1], [])
    check_invariants(tree)
    third = tree.insert(A, first, (3, 4), BlockId(3))
    assert third is not second
    check_invariants(tree)
    assert tree.release(third) == ([3, 0], [])


def test_what_is_detached_takes_its_slot_along() -> None:
    tree, _ = make_tree()
    (node,) = keep(tree, (1, 2), 0)
    tree.hold(node)
    tree.drop_namespace(A)
    tree.set_host_slot(node, HostSlot(3))
    assert tree.release(node) == ([0], [3])
    assert tree.num_nodes == tree.num_host_blocks == tree.num_device_blocks == 0


def test_a_block_has_as_many_tokens_as_a_block_has() -> None:
    tree, _ = make_tree()
    with pytest.raises(Exception, match="pack expected 2"):
        tree.insert(A, None, (1, 2, 3), BlockId(0))


def _num_alive() -> int:
    return sum(type(thing) is KvNode for thing in gc.get_objects())


def test_nothing_that_has_gone_waits_for_the_garbage_collector() -> None:
    """An engine runs without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = _num_alive()
        tree, policy = make_tree()
        for first_block, namespace in ((0, A), (100, B)):
            path = keep(tree, range(60), first_block, namespace)
            for number, node in enumerate(reversed(path[10:])):
                to_host(tree, node, first_block + number)
        tree.hold(path[3])
        tree.drop_namespace(A)
        tree.drop_namespace(B)
        tree.release(path[3])
        assert tree.num_nodes == 0
        policy.forgotten.clear()
        del path, node
        assert _num_alive() == before
    finally:
        gc.enable()


def test_the_longest_path_needs_no_recursion() -> None:
    tree, _ = make_tree()
    path = keep(tree, [7] * 20_000, 0)
    tree.hold(path[-1])
    tree.release(path[-1])
    tree.drop_content(path[5])
    assert len(tree.drop_namespace(A).block_ids) == 5
    assert tree.num_nodes == 0


@dataclass(eq=False)
class _Running:
    namespace: bytes
    token_ids: list[int] = field(default_factory=list)  # of whole blocks
    blocks: list[BlockId] = field(default_factory=list)
    private: set[BlockId] = field(default_factory=set)
    tip: KvNode | None = None


_Content = tuple[bytes, tuple[int, ...]]  # namespace, and all tokens up to the block's end


class TreeMachine(RuleBasedStateMachine):
    """Requests, copies, evictions and drops, compared with a flat list."""

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.policy = make_tree()
        self.kept: dict[_Content, KvNode] = {}  # what a match must find, and nothing else
        self.blocks: dict[BlockId, _Content] = {}  # handed out, with what is written there
        self.slots: dict[HostSlot, _Content] = {}
        self.requests: list[_Running] = []
        self.copies: list[tuple[KvNode, BlockId, HostSlot]] = []  # to the host
        self.swap_ins: list[tuple[KvNode, list[KvNode]]] = []  # what is held, and what is copied

    def take_block(self, content: _Content) -> BlockId:
        block_id = BlockId(next(n for n in range(10_000) if n not in self.blocks))
        self.blocks[block_id] = content
        return block_id

    def take_slot(self, content: _Content) -> HostSlot:
        slot = HostSlot(next(n for n in range(10_000) if n not in self.slots))
        self.slots[slot] = content
        return slot

    def free(self, freed: FreedKv) -> None:
        for block_id in freed.block_ids:
            del self.blocks[block_id]
        for slot in freed.host_slots:
            del self.slots[slot]

    def lose(self, content: _Content) -> None:
        """Remove a node and its descendants from the list."""
        namespace, tokens = content
        for other in list(self.kept):
            if other[0] == namespace and other[1][: len(tokens)] == tokens:
                del self.kept[other]

    @property
    def loading(self) -> set[KvNode]:
        return {node for _, nodes in self.swap_ins for node in nodes}

    @rule(namespace=st.sampled_from([A, B]), token_ids=st.lists(st.integers(0, 1), max_size=5 * SIZE))
    def begin(self, namespace: bytes, token_ids: list[int]) -> None:
        path = self.tree.match(namespace, token_ids, len(token_ids) - 1)
        path = [node for node in path if node.block_id is not None]
        if self.loading.intersection(path):
            return
        request = _Running(namespace, token_ids[: len(path) * SIZE])
        for node in path:
            assert node.block_id is not None
            request.blocks.append(node.block_id)
        if path:
            request.tip = path[-1]
            self.tree.hold(path[-1])
        self.requests.append(request)
        for start in range(len(path) * SIZE, len(token_ids) - SIZE + 1, SIZE):
            self.compute(request, token_ids[start : start + SIZE])

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 99), token_ids=st.tuples(*[st.integers(0, 1)] * SIZE))
    def extend(self, number: int, token_ids: tuple[int, ...]) -> None:
        self.compute(self.requests[number % len(self.requests)], token_ids)

    def compute(self, request: _Running, token_ids: Sequence[int]) -> None:
        request.token_ids += token_ids
        content = (request.namespace, tuple(request.token_ids))
        own = self.take_block(content)
        node = self.tree.insert(request.namespace, request.tip, token_ids, own)
        assert self.kept.get(content, node) is node or request.tip is not None
        is_found = request.tip is None or any(request.tip is kept for kept in self.kept.values())
        if is_found:
            assert self.kept.setdefault(content, node) is node
        if node.block_id != own:
            request.private.add(own)
        request.blocks.append(own)
        request.tip = node

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        request = self.requests.pop(number % len(self.requests))
        self.free(FreedKv(list(request.private), []))
        if request.tip is not None:
            self.free(self.tree.release(request.tip))

    @precondition(lambda self: self.policy.offered)
    @rule(number=st.integers(0, 99), num_blocks=st.integers(1, 4))
    def evict(self, number: int, num_blocks: int) -> None:
        for _ in range(num_blocks):
            offered = [item for item in self.policy.offered if isinstance(item, KvNode)]
            if offered:
                self.evict_one(offered[number % len(offered)])

    def evict_one(self, node: KvNode) -> None:
        assert node.block_id is not None
        if node.host_slot is None:
            self.lose(self.blocks[node.block_id])
        self.free(self.tree.evict(node))

    @rule(namespace=st.sampled_from([A, B]))
    def evict_namespace(self, namespace: bytes) -> None:
        for node in self.tree.unreferenced(namespace):
            self.evict_one(node)
        kept = {node for content, node in self.kept.items() if content[0] == namespace}
        assert not any(node.block_id is not None and not node.num_references for node in kept)

    @rule(namespace=st.sampled_from([A, B]))
    def drop_namespace(self, namespace: bytes) -> None:
        self.lose((namespace, ()))
        self.free(self.tree.drop_namespace(namespace))

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 99))
    def drop_content(self, number: int) -> None:
        content = sorted(self.kept)[number % len(self.kept)]
        node = self.kept[content]
        self.lose(content)
        self.free(self.tree.drop_content(node))
        assert self.tree.drop_content(node) == ([], [])

    @rule(number=st.integers(0, 99))
    def begin_copy(self, number: int) -> None:
        busy = self.loading.union(node for node, _, _ in self.copies)
        left = [
            (node, node.block_id)
            for _, node in sorted(self.kept.items())
            if node.block_id is not None and node.host_slot is None and node not in busy
        ]
        if left:
            node, block_id = left[number % len(left)]
            self.tree.hold(node)
            self.copies.append((node, block_id, self.take_slot(self.blocks[block_id])))

    @precondition(lambda self: self.copies)
    @rule(number=st.integers(0, 99), has_failed=st.booleans())
    def end_copy(self, number: int, has_failed: bool) -> None:
        node, block_id, slot = self.copies.pop(number % len(self.copies))
        assert self.blocks[block_id] == self.slots[slot], "its block was used for something else"
        if has_failed:
            self.free(FreedKv([], [slot]))
        else:
            self.tree.set_host_slot(node, slot)
        self.free(self.tree.release(node))

    @rule(number=st.integers(0, 99))
    def clear_host_slot(self, number: int) -> None:
        left = [
            (content, node)
            for content, node in sorted(self.kept.items())
            if node.host_slot is not None
            and node not in self.loading
            and (node.block_id is not None or not node.num_references)
        ]
        if left:
            content, node = left[number % len(left)]
            if node.block_id is None:
                self.lose(content)
            self.free(self.tree.clear_host_slot(node))

    @precondition(lambda self: self.policy.offered)
    @rule(num_blocks=st.integers(1, 6))
    def swap_out(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            node = next((item for item in self.policy.offered if isinstance(item, KvNode)), None)
            if node is not None:
                assert node.block_id is not None
                if node.host_slot is None:
                    self.tree.set_host_slot(node, self.take_slot(self.blocks[node.block_id]))
                self.evict_one(node)

    @rule(number=st.integers(0, 99), num_copied=st.integers(0, 4))
    def swap_in(self, number: int, num_copied: int) -> None:
        """Copy all or a part of the held nodes."""
        left = [content for content, node in sorted(self.kept.items()) if node.block_id is None]
        if not left:
            return
        namespace, tokens = left[number % len(left)]
        path = self.tree.match(namespace, tokens, len(tokens))
        if self.loading.intersection(path):
            return
        self.tree.hold(path[-1])
        copied = [node for node in path if node.block_id is None][:num_copied]
        for node in copied:
            assert node.host_slot is not None
            self.tree.assign_block(node, self.take_block(self.slots[node.host_slot]))
        self.swap_ins.append((path[-1], copied))

    @precondition(lambda self: self.swap_ins)
    @rule(number=st.integers(0, 99), first_failed=st.integers(0, 9))
    def end_swap_in(self, number: int, first_failed: int) -> None:
        held, nodes = self.swap_ins.pop(number % len(self.swap_ins))
        for node in nodes[first_failed : first_failed + 1]:
            for content, kept in self.kept.items():
                if kept is node:
                    self.lose(content)
                    break
            self.free(self.tree.drop_content(node))
        self.free(self.tree.release(held))

    @invariant()
    def a_match_finds_all_that_is_kept(self) -> None:
        for namespace, tokens in self.kept:
            found = self.tree.match(namespace, tokens, len(tokens))
            ends = range(SIZE, len(tokens) + 1, SIZE)
            assert found == [self.kept[namespace, tokens[:end]] for end in ends]
            for node, end in zip(found, ends, strict=True):
                content = (namespace, tokens[:end])
                assert node.block_id is None or self.blocks[node.block_id] == content
                assert node.host_slot is None or self.slots[node.host_slot] == content

    @invariant()
    def every_block_is_somebodys(self) -> None:
        private = [block for request in self.requests for block in request.private]
        assert len(self.blocks) == self.tree.num_device_blocks + len(private)
        assert len(self.slots) == self.tree.num_host_blocks + len(self.copies)
        for request in self.requests:
            for number, block in enumerate(request.blocks):
                end = (number + 1) * SIZE
                assert self.blocks[block] == (request.namespace, tuple(request.token_ids[:end]))

    @invariant()
    def the_tree_agrees(self) -> None:
        check_invariants(self.tree)
        found = {node for node in self.kept.values() if node.block_id is not None}
        assert self.tree.num_blocks_of(A) + self.tree.num_blocks_of(B) == len(found)

    def teardown(self) -> None:
        while self.requests:
            self.end(0)
        while self.copies:
            self.end_copy(0, False)
        while self.swap_ins:
            self.end_swap_in(0, 9)
        for namespace in (A, B):
            self.drop_namespace(namespace)
        check_invariants(self.tree)
        assert not self.blocks and not self.slots and not self.policy.offered
        assert self.tree.num_nodes == self.tree.num_unreferenced_blocks == 0


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
