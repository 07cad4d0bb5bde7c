"""Copies of KV to the host and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any

import hypothesis.strategies as st
import pytest
from corun.profiles.link import Direction
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.host_budget import HostSections
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.memory.kv_tree import KvNode
from corun.runtime.memory.policies.registry import MEMORY_POLICIES
from corun.runtime.memory.swapper import KvSwapper
from corun.runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    BlockId,
    HostSlot,
    KvTransfer,
    Transfer,
    TransferId,
    TransferResult,
)
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.invariants import check_invariants
from support.kept_prefixes import NAMESPACE, keep, load, num_found, tokens_of
from support.scheduling import BLOCK_BYTES, BLOCK_SIZE, facts, make_memory

NUM_BLOCKS = 100  # of which 5 are the reserve, and 3 the most that one plan copies


def make(num_blocks: int = NUM_BLOCKS, num_host_slots: int = 200, **options: Any) -> DeviceMemory:
    return make_memory(num_blocks=num_blocks, keeps_prefixes=True, num_host_slots=num_host_slots, **options)


def swapper_of(memory: DeviceMemory) -> KvSwapper:
    assert memory.swapper is not None
    return memory.swapper


def copies_of(memory: DeviceMemory) -> list[KvTransfer]:
    """Return the copies of the next plan."""
    commands = memory.commands(0.0).transfers
    check_invariants(memory)
    return [one for one in commands if isinstance(one, KvTransfer)]


def end(memory: DeviceMemory, copy: KvTransfer, error: str | None = None) -> None:
    memory.end_transfer(TransferResult(copy.transfer_id, error), 0.0)
    check_invariants(memory)


def copy_all(memory: DeviceMemory) -> int:
    """Run until nothing is left to copy. Return the number of copied blocks."""
    num_copied = 0
    for _ in range(200):
        copies = copies_of(memory)
        if not copies:
            return num_copied
        for copy in copies:
            num_copied += len(copy.block_ids)
            end(memory, copy)
    raise AssertionError("it never ends")


def bring(memory: DeviceMemory, first_token: int, num_blocks: int) -> KvTransfer:
    """Begin to copy a prefix in that is only partly on the device."""
    tokens = tokens_of(first_token, num_blocks)
    path = memory.prefixes.match(NAMESPACE, tokens, len(tokens))
    nodes = path[swapper_of(memory).num_readable(path) :]
    memory.prefixes.hold(path)
    block_ids = memory.pool.allocate(len(nodes))
    assert block_ids is not None
    swapper_of(memory).copy_in(nodes, block_ids, 0.0)
    check_invariants(memory)
    (copy,) = memory.transfers.take_commands()
    assert isinstance(copy, KvTransfer) and copy.direction is Direction.TO_DEVICE
    return copy


def send_away(
    memory: DeviceMemory, first_token: int, num_blocks: int, adapter_id: AdapterId = BASE_ADAPTER
) -> list[KvNode]:
    """Store a prefix, copy it to the host and evict it from the device."""
    path = keep(memory, first_token, num_blocks, adapter_id=adapter_id)
    fillers = iter(range(1_000, 1_000_000, 1_000))
    while path[0].block_id is not None:
        keep(memory, next(fillers), memory.pool.num_available_blocks)
        copy_all(memory)
        for node in reversed(path):
            if node.is_free_leaf and node.host_slot is not None:
                memory.prefixes.evict_all((node,))
    clear(memory)
    return path


def clear(memory: DeviceMemory) -> None:
    assert memory.room.reclaim(memory.pool.num_blocks, 0, include_waiting=True, keep=BASE_ADAPTER)
    assert memory.pool.num_free_ids == memory.pool.num_blocks


# To the host.


def test_what_goes_next_is_copied_ahead_a_little_at_a_time() -> None:
    memory = make()
    oldest = keep(memory, 100, 10)
    keep(memory, 200, 69)
    assert not copies_of(memory), "21 are free"
    keep(memory, 300, 4)
    (copy,) = copies_of(memory)
    assert copy.direction is Direction.TO_HOST and not copy.is_demand
    assert copy.block_ids == tuple(node.block_id for node in oldest[7:]), "3 from its end"
    assert not copies_of(memory), "with 17 that are free, these are enough"
    end(memory, copy)
    assert not copies_of(memory)
    assert [node.host_slot for node in oldest[7:]] == list(copy.host_slots)
    assert memory.room.reclaim(19, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert [node.block_id is None for node in oldest] == [False] * 8 + [True] * 2
    assert num_found(memory, 100) == 8, "which is all that was asked for"
    assert not copies_of(memory)
    keep(memory, 400, 4)
    (copy,) = copies_of(memory)
    assert copy.block_ids == tuple(node.block_id for node in oldest[4:7])


def test_blocks_of_a_copy_stay_until_its_end_and_others_make_way() -> None:
    memory = make()
    oldest, newest = keep(memory, 100, 10), keep(memory, 200, 90)
    (copy,) = copies_of(memory)
    assert memory.room.reclaim(60, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert all(node.block_id is not None for node in oldest)
    assert sum(node.block_id is None for node in newest) == 60
    assert memory.room.reclaim(91, 0, include_waiting=False, keep=BASE_ADAPTER), "when it has ended"
    assert not memory.room.reclaim(101, 0, include_waiting=False, keep=BASE_ADAPTER)
    end(memory, copy)
    assert memory.room.reclaim(100, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert memory.pool.num_free_ids == NUM_BLOCKS


def test_a_copy_that_fails_leaves_the_block_and_may_be_tried_again() -> None:
    memory = make()
    oldest = keep(memory, 100, 100)
    (copy,) = copies_of(memory)
    end(memory, copy, "bad luck")
    assert not any(node.host_slot is not None for node in oldest)
    (again,) = copies_of(memory)
    assert (again.block_ids, again.host_slots) == (copy.block_ids, copy.host_slots)


def test_a_host_with_little_room_is_not_filled_again_and_again() -> None:
    memory = make(num_host_slots=2)
    path = keep(memory, 100, 100)
    assert copy_all(memory) == 2
    for num_left in range(99, 90, -1):
        memory.prefixes.evict_all((path[num_left],))
        keep(memory, 1_000 * num_left, 1)
        assert copy_all(memory) <= 1, "its copy takes the place of one that is on the host alone"


def test_history_of_limited_size_is_copied_before_it_goes() -> None:
    memory = make_memory(
        num_blocks=NUM_BLOCKS, keeps_prefixes=True, num_host_slots=200, max_history_blocks=20
    )
    keep(memory, 100, 18)
    (copy,) = copies_of(memory)
    assert len(copy.block_ids) == 3


def test_policies_without_history_have_none_on_the_host() -> None:
    assert make_memory(keeps_prefixes=True, num_host_slots=8, policy="slora").swapper is None


# Back.


def test_a_prefix_comes_back_to_new_blocks_and_is_read_at_the_end() -> None:
    memory = make()
    path = send_away(memory, 1, 6)
    assert swapper_of(memory).num_readable(path) == 0
    copy = bring(memory, 1, 6)
    assert [node.host_slot for node in path] == list(copy.host_slots)
    assert [node.block_id for node in path] == list(copy.block_ids)
    assert swapper_of(memory).is_coming(path[0]) and swapper_of(memory).num_readable(path) == 0
    assert memory.pool.num_used_blocks == 6
    end(memory, copy)
    assert swapper_of(memory).num_readable(path) == 6
    assert memory.pool.num_used_blocks == 0


def test_what_no_request_waits_for_takes_no_reserved_blocks() -> None:
    memory = make()
    path = send_away(memory, 1, 6)
    for num_reserved in (NUM_BLOCKS - 5, NUM_BLOCKS - 6):
        memory.pool.reserve_growth(num_reserved)
        assert swapper_of(memory).bring(path, 0.0) == (num_reserved == NUM_BLOCKS - 6)
        assert memory.pool.num_reserved_blocks == num_reserved
        check_invariants(memory)


def test_slots_that_are_read_are_nobody_elses() -> None:
    memory = make(num_host_slots=3)
    path = send_away(memory, 1, 3)
    copy = bring(memory, 1, 3)
    keep(memory, 1_000, 97)
    assert not copies_of(memory), "there is no other room"
    end(memory, copy)
    memory.prefixes.hold(path)
    assert not copies_of(memory), "a request may have others to come to"
    memory.prefixes.release(path)
    (copy,) = copies_of(memory)
    assert set(copy.block_ids).isdisjoint(node.block_id for node in path)
    assert not any(node.host_slot is not None for node in path)


@pytest.mark.parametrize("error", [None, "bad luck"])
def test_slots_that_are_read_keep_their_memory(error: str | None) -> None:
    memory = make(host=HostCache(2 * PAGESIZE), host_sections=HostSections(2, PAGESIZE, 3, 1))
    path = send_away(memory, 1, 3)
    copy = bring(memory, 1, 3)
    assert memory.host is not None
    memory.host.is_short = True
    assert memory.commands(0.0).host_move is None
    end(memory, copy, error)
    memory.host.is_short = True
    assert memory.commands(10.0).host_move is not None
    assert not any(node.host_slot is not None for node in path)
    check_invariants(memory)


def test_what_did_not_come_is_forgotten_with_all_behind_it() -> None:
    memory = make()
    path = send_away(memory, 1, 6)
    copy = bring(memory, 1, 4)
    end(memory, copy, "bad luck")
    assert num_found(memory, 1) == 0
    assert memory.pool.num_free_ids == NUM_BLOCKS
    assert all(node.host_slot is None or node.root is None for node in path)
    assert copy_all(memory) == 0


@pytest.mark.parametrize("error", [None, "bad luck"])
@pytest.mark.parametrize("direction", Direction)
def test_a_version_is_dropped_while_its_blocks_move(direction: Direction, error: str | None) -> None:
    memory = make(policy="discard-idle")
    if direction is Direction.TO_DEVICE:
        send_away(memory, 1, 6, AdapterId(1))
        copy = bring(memory, 1, 6)
    else:
        keep(memory, 1, 100, adapter_id=AdapterId(1))
        (copy,) = copies_of(memory)
    memory.prefixes.drop_version(AdapterId(1))
    assert num_found(memory, 1) == 0
    check_invariants(memory)
    num_unused = memory.pool.num_unused_blocks
    end(memory, copy, error)
    assert memory.pool.num_unused_blocks > num_unused
    assert num_found(memory, 1) == 0
    clear(memory)


@pytest.mark.parametrize("direction", Direction)
def test_an_adapter_leaves_while_its_blocks_move(direction: Direction) -> None:
    """They are evicted with the first plan after their copy."""
    memory = make(capacity_bytes=NUM_BLOCKS * BLOCK_BYTES + 100)
    load(memory, 1, 100)
    path = keep(memory, 1, 100, adapter_id=AdapterId(1))
    (copy,) = copies_of(memory)
    assert copy.block_ids == tuple(node.block_id for node in path[:3]), "it would go as a whole"
    end(memory, copy)
    if direction is Direction.TO_DEVICE:
        for node in reversed(path):
            memory.prefixes.evict_all((node,))
        copy = bring(memory, 1, 3)
    else:
        (copy,) = copies_of(memory)
    assert memory.evict(AdapterId(1))
    memory.begin_plan(0, 0.0)
    check_invariants(memory)
    assert memory.commands(0.0).evict_adapters == (AdapterId(1),)
    assert memory.pool.num_used_blocks, "they are held"
    end(memory, copy)
    memory.commands(0.0)
    check_invariants(memory)
    assert memory.pool.num_free_ids == NUM_BLOCKS
    assert num_found(memory, 1) == (3 if direction is Direction.TO_DEVICE else 6)


def test_copying_is_compared_with_computing() -> None:
    for token_s, is_worth in ((1.0, True), (1e-9, False), (0.0, False)):
        memory = make(token_s=token_s)
        path = send_away(memory, 1, 2)
        assert swapper_of(memory).is_copy_faster(path) is is_worth
    # 200 bytes at 1 GB/s beside as much of a load, and 8 tokens.
    memory = make(token_s=1.5 * 2e-7 / 8, capacity_bytes=NUM_BLOCKS * BLOCK_BYTES + 5000)
    path = send_away(memory, 1, 2)
    assert swapper_of(memory).is_copy_faster(path)
    assert memory.loads.begin(AdapterId(1), facts(5000), 0.0)
    assert not swapper_of(memory).is_copy_faster(path)


_Content = tuple[bytes, tuple[int, ...]]  # namespace, and all tokens up to the block's end


@dataclass(eq=False)
class _Running:
    path: list[KvNode]
    own: list[BlockId]


class SwapMachine(RuleBasedStateMachine):
    """Requests, evictions, copies and drops, compared with contents of blocks and slots."""

    @initialize(
        policy=st.sampled_from([name for name in MEMORY_POLICIES if name != "slora"]),
        num_blocks=st.integers(8, 24),
        num_host_slots=st.sampled_from([1, 2, 3, 5, 9, 60]),
        max_history_blocks=st.none() | st.integers(3, 12),
    )
    def build(
        self, policy: str, num_blocks: int, num_host_slots: int, max_history_blocks: int | None
    ) -> None:
        self.memory = make_memory(
            num_blocks=num_blocks,
            keeps_prefixes=True,
            num_host_slots=num_host_slots,
            max_history_blocks=max_history_blocks,
            policy=policy,
            capacity_bytes=2 * num_blocks * BLOCK_BYTES,
        )
        self.swapper = swapper_of(self.memory)
        load(self.memory, 1, 100)
        self.memory.cache.acquire(AdapterId(1))
        self.blocks: dict[BlockId, _Content | None] = {}  # None: being written to
        self.slots: dict[HostSlot, _Content | None] = {}
        self.copies: dict[TransferId, KvTransfer] = {}
        self.requests: list[_Running] = []
        self.known: set[tuple[bytes, tuple[int, ...]]] = set()  # asked for so far
        self.now_s = 0.0

    @rule(is_adapter=st.booleans(), symbols=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, is_adapter: bool, symbols: list[int]) -> None:
        """Find, hold and compute blocks."""
        self.now_s += 1.0
        namespace = b"adapter" if is_adapter else b"base"
        adapter_id = AdapterId(1) if is_adapter else BASE_ADAPTER
        self.known.add((namespace, tuple(symbols)))
        path = list(self.match(namespace, symbols))
        path = path[: self.swapper.num_readable(path)]
        self.memory.prefixes.hold(path)
        self.memory.prefixes.visit(adapter_id, namespace, path, self.now_s)
        running = _Running(path, [])
        self.requests.append(running)
        for number in range(len(path), len(symbols)):
            if not self.memory.pool.num_available_blocks:
                self.memory.room.reclaim(1, 0, include_waiting=False, keep=BASE_ADAPTER)
            found = self.memory.pool.allocate(1)
            if found is None:
                return
            self.blocks[found[0]] = (namespace, tuple(symbols[: number + 1]))
            node = self.memory.prefixes.store(
                adapter_id,
                namespace,
                running.path[-1] if running.path else None,
                (symbols[number],) * BLOCK_SIZE,
                found[0],
                self.now_s,
            )
            running.path.append(node)
            if node.block_id != found[0]:
                running.own.append(found[0])

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 99))
    def end_request(self, number: int) -> None:
        request = self.requests.pop(number % len(self.requests))
        self.memory.pool.free(request.own)
        self.memory.prefixes.release(request.path)

    @rule(num_blocks=st.integers(1, 12))
    def make_room(self, num_blocks: int) -> None:
        self.memory.room.reclaim(num_blocks, 0, include_waiting=False, keep=BASE_ADAPTER)

    @rule(num_plans=st.integers(1, 4))
    def plan(self, num_plans: int) -> None:
        for _ in range(num_plans):
            self.begin_copies(self.memory.commands(self.now_s).transfers)

    @rule(is_adapter=st.booleans(), symbols=st.lists(st.integers(0, 1), min_size=2, max_size=12))
    def come_and_go(self, is_adapter: bool, symbols: list[int]) -> None:
        """The usual case: history that no request holds."""
        self.begin(is_adapter, symbols)
        self.end_request(len(self.requests) - 1)
        self.plan(2)
        while self.copies and len(symbols) % 3:
            self.end_copy(0, False)

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 99))
    def copy_in(self, number: int) -> None:
        namespace, symbols = sorted(self.known)[number % len(self.known)]
        path = self.match(namespace, symbols)
        num_found = self.swapper.num_readable(path)
        if num_found == len(path) or self.swapper.is_coming(path[num_found]):
            return
        self.memory.prefixes.hold(path)
        num_blocks = len(path) - num_found
        self.memory.room.reclaim(num_blocks, 0, include_waiting=False, keep=BASE_ADAPTER)
        block_ids = self.memory.pool.allocate(num_blocks)
        if block_ids is None:
            self.memory.prefixes.release(path)
            return
        self.swapper.copy_in(path[num_found:], block_ids, self.now_s)
        self.begin_copies(self.memory.transfers.take_commands())

    @precondition(lambda self: self.copies)
    @rule(number=st.integers(0, 9), has_failed=st.sampled_from([False, False, True]))
    def end_copy(self, number: int, has_failed: bool) -> None:
        copy = list(self.copies.values())[number % len(self.copies)]
        del self.copies[copy.transfer_id]
        if not has_failed:
            for block_id, slot in zip(copy.block_ids, copy.host_slots, strict=True):
                if copy.direction is Direction.TO_HOST:
                    self.slots[slot] = self.blocks[block_id]
                else:
                    self.blocks[block_id] = self.slots[slot]
        error = "bad luck" if has_failed else None
        self.memory.end_transfer(TransferResult(copy.transfer_id, error), self.now_s)

    @rule()
    def drop_version(self) -> None:
        self.memory.prefixes.drop_version(AdapterId(1))

    def begin_copies(self, copies: Sequence[Transfer]) -> None:
        """Overwrite the targets with garbage."""
        for copy in copies:
            assert isinstance(copy, KvTransfer)
            self.copies[copy.transfer_id] = copy
            if copy.direction is Direction.TO_HOST:
                self.slots.update(dict.fromkeys(copy.host_slots))
            else:
                self.blocks.update(dict.fromkeys(copy.block_ids))

    def match(self, namespace: bytes, symbols: Sequence[int]) -> Sequence[KvNode]:
        tokens = tuple(symbol for symbol in symbols for _ in range(BLOCK_SIZE))
        return self.memory.prefixes.match(namespace, tokens, len(tokens))

    @invariant()
    def what_is_found_is_what_was_asked_for(self) -> None:
        if not hasattr(self, "memory"):
            return
        check_invariants(self.memory)
        for namespace, symbols in self.known:
            path = self.match(namespace, symbols)
            num_readable = self.swapper.num_readable(path)
            for number, node in enumerate(path):
                content = (namespace, symbols[: number + 1])
                if number < num_readable:
                    assert node.block_id is not None and self.blocks[node.block_id] == content
                if node.host_slot is not None:
                    assert self.slots[node.host_slot] == content

    @invariant()
    def copies_share_nothing(self) -> None:
        if hasattr(self, "memory"):
            blocks = [one for copy in self.copies.values() for one in copy.block_ids]
            slots = [one for copy in self.copies.values() for one in copy.host_slots]
            assert len(set(blocks)) == len(blocks) and len(set(slots)) == len(slots)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        while self.copies:
            self.end_copy(0, False)
        while self.requests:
            self.end_request(0)
        check_invariants(self.memory)
        assert not len(self.memory.transfers)
        assert self.memory.pool.num_used_blocks == 0
        clear(self.memory)


TestSwapping = SwapMachine.TestCase
TestSwapping.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, derandomize=True, database=None
)
