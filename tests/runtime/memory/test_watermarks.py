"""The use of memory is kept between two watermarks, beside all that requests wait for."""

import random
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from corun.profiles.link import Direction
from corun.runtime.memory import watermarks
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.kv_tree import KvNode
from corun.runtime.memory.loads import AdapterLoads
from corun.runtime.memory.policies.policy import SwappingPolicy
from corun.runtime.memory.watermarks import WatermarkSwaps
from corun.runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    BlockId,
    KvTransfer,
    Transfer,
    TransferResult,
)
from corun.runtime.request import RequestStatus
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.invariants import check_invariants
from support.kept_prefixes import keep, load, tokens_of
from support.scheduling import BLOCK_BYTES, BLOCK_SIZE, facts, make_memory, make_request, make_scheduler

NUM_BLOCKS = 100  # with marks at 70 and 95
BASE, FILLING = b"adapter 0", b"filling"
FILLER = AdapterId(99)


class Tier:
    """A memory under ``libra``. Nothing ends or passes by itself."""

    def __init__(self, policy: str = "libra", num_host_slots: int = 200, **options: object) -> None:
        self.memory: DeviceMemory = make_memory(
            num_blocks=NUM_BLOCKS,
            keeps_prefixes=True,
            num_host_slots=num_host_slots,
            policy=policy,
            token_s=1e-12,  # so that all KV costs as much, with a copy or without
            **options,  # type: ignore[arg-type]
        )
        self.now_s = 0.0
        self._first_tokens = iter(range(10**6, 10**9, 10**3))
        self.plan()  # with a look, so that the next one is 0.1 s later

    @property
    def swaps(self) -> WatermarkSwaps:
        assert self.memory.swaps is not None
        return self.memory.swaps

    @property
    def used(self) -> int:
        """In blocks."""
        return self.swaps.used_bytes // self.memory.block_bytes

    def plan(self, now_s: float | None = None) -> list[Transfer]:
        """Return what the next plan begins."""
        self.now_s = self.now_s if now_s is None else now_s
        transfers = list(self.memory.commands(self.now_s).transfers)
        check_invariants(self.memory)
        return transfers

    def end(self, *transfers: Transfer, error: str | None = None) -> None:
        for one in transfers:
            self.memory.end_transfer(TransferResult(one.transfer_id, error), self.now_s)
            check_invariants(self.memory)

    def settle(self) -> None:
        """Carry out plans until one begins nothing. No time passes."""
        while transfers := self.plan():
            self.end(*transfers)

    def away(
        self, first_token: int, num_blocks: int, used_s: float, adapter_id: AdapterId = BASE_ADAPTER
    ) -> list[KvNode]:
        """Return a prefix that only the host has. The device keeps nothing else."""
        load(self.memory, FILLER, 1)
        self.memory.cache.acquire(FILLER)
        namespace = f"adapter {adapter_id}".encode()
        path = keep(self.memory, first_token, num_blocks, adapter_id=adapter_id, namespace=namespace)
        self.visit(path, used_s, adapter_id)
        for _ in range(20):
            if not any(node.block_id is not None or node.host_slot is None for node in path):
                break
            num_free = self.memory.pool.num_available_blocks
            filling = keep(
                self.memory, next(self._first_tokens), num_free, adapter_id=FILLER, namespace=FILLING
            )
            self.visit(filling, used_s + 1.0, FILLER)
            self.settle()
            for node in reversed(path):
                if node.is_free_leaf and node.host_slot is not None:
                    self.memory.prefixes.evict_all((node,))
        else:
            raise AssertionError("it does not leave")
        self.memory.prefixes.drop_version(FILLER)
        self.memory.cache.release(FILLER)
        self.evict(FILLER)
        return path

    def visit(self, path: list[KvNode], now_s: float, adapter_id: AdapterId = BASE_ADAPTER) -> None:
        self.memory.prefixes.hold(path)
        self.memory.prefixes.visit(adapter_id, f"adapter {adapter_id}".encode(), path, now_s)
        self.memory.prefixes.release(path)

    def evict(self, adapter_id: AdapterId) -> None:
        """Evict by a call; what the memory knows of the adapter stays."""
        adapter = self.memory.loads.known[adapter_id]
        assert self.memory.evict(adapter_id)
        self.memory.begin_plan(0, self.now_s)
        self.settle()
        if adapter_id != FILLER:
            self.memory.loads.known[adapter_id] = adapter


def blocks_of(transfers: list[Transfer]) -> list[int]:
    return [len(one.block_ids) for one in transfers if isinstance(one, KvTransfer)]


def num_coming(transfers: list[Transfer]) -> int:
    return sum(not isinstance(one, KvTransfer) or one.direction is Direction.TO_DEVICE for one in transfers)


def num_on_device(path: list[KvNode]) -> int:
    return sum(node.block_id is not None for node in path)


# Back.


def test_what_is_ranked_highest_comes_back_from_its_root_up_to_the_low_mark() -> None:
    tier = Tier()
    old, new = tier.away(1, 40, 10.0), tier.away(200, 40, 20.0)
    assert tier.used == 0
    transfers = tier.plan(30.0)
    assert blocks_of(transfers) == [40, 30] and tier.used == 70
    assert all(one.direction is Direction.TO_DEVICE for one in transfers if isinstance(one, KvTransfer))
    assert num_on_device(new) == 40 and num_on_device(old[:30]) == 30
    tier.end(*transfers)
    assert tier.plan(30.1) == [] and tier.swaps.wake_at_s is None
    tokens = tokens_of(200, 40)
    path = tier.memory.prefixes.match(BASE, tokens, len(tokens))
    assert tier.memory.swapper is not None and tier.memory.swapper.num_readable(path) == 40


def test_nothing_moves_between_the_marks() -> None:
    tier = Tier()
    tier.away(1, 20, 10.0)
    path = keep(tier.memory, 300, 70, namespace=BASE)
    assert tier.plan(20.0) == [] and tier.swaps.wake_at_s is None
    more = keep(tier.memory, 500, 25, namespace=BASE)
    tier.settle()
    tier.plan(21.0)
    assert tier.used == 95 and num_on_device(path + more) == 95


def test_adapters_come_before_their_kv_and_those_without_a_use_last() -> None:
    tier = Tier()
    for number, num_bytes in ((1, 1), (2, 500)):  # 1 ranks below its KV
        load(tier.memory, number, num_bytes)
        tier.memory.cache.acquire(AdapterId(number), 5.0)
        tier.memory.cache.release(AdapterId(number))
    tier.away(1, 10, 10.0, AdapterId(1))
    for number in (1, 2):
        tier.evict(AdapterId(number))
    for number, num_bytes in ((4, 900), (3, 700), (5, 9600)):
        tier.memory.loads.known[AdapterId(number)] = facts(num_bytes, f"{number}")
    transfers = tier.plan(20.0)
    order = [one.adapter_id if isinstance(one, AdapterTransfer) else None for one in transfers]
    assert order == [2, 1, None, 3, 4], "5 would pass the high mark"
    assert not any(one.is_demand for one in transfers)


def test_without_dependencies_kv_needs_no_adapter() -> None:
    tier = Tier("libra:dependencies=0")
    load(tier.memory, 1, 300)
    tier.away(1, 10, 10.0, AdapterId(1))
    assert tier.memory.evict(AdapterId(1))
    tier.memory.begin_plan(0, 11.0)
    assert blocks_of(tier.plan(11.0)) == [10], "what was evicted by a call does not come back"
    assert tier.memory.cache.state(AdapterId(1)) is AdapterState.ABSENT


@pytest.mark.parametrize("policy", ["libra", "corun:swapper=1"])
def test_a_dropped_version_does_not_come_back(policy: str) -> None:
    tier = Tier(policy)
    load(tier.memory, 1, 300)
    tier.evict(AdapterId(1))
    tier.memory.drop(AdapterId(1))
    remembers = tier.memory.cache.policy
    assert isinstance(remembers, SwappingPolicy) and len(list(remembers.returns())) == 1
    tier.memory.begin_plan(0, 1.0)
    assert tier.plan(1.0) == [] and not list(remembers.returns())


def test_a_load_that_failed_is_not_repeated_before_a_request_names_the_adapter() -> None:
    tier = Tier()
    tier.memory.know(AdapterId(1), facts(500))
    tier.end(*tier.plan(1.0), error="bad luck")
    assert tier.plan(2.0) == [] and tier.swaps.wake_at_s is None
    assert tier.memory.loads.begin(AdapterId(1), facts(500), 3.0)
    tier.end(*tier.plan(3.0), error="bad luck")
    assert num_coming(tier.plan(4.0)) == 1


def test_no_adapter_is_read_from_files_before_a_request_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier()
    tier.memory.know(AdapterId(1), facts(100))
    with monkeypatch.context() as patch:
        patch.setattr(AdapterLoads, "is_from_memory", lambda *_: False)
        assert tier.plan(20.0) == []
    (load,) = tier.plan(20.2)
    assert isinstance(load, AdapterTransfer) and load.adapter_id == AdapterId(1)


def test_a_look_considers_the_latest_adapters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermarks, "_MAX_CANDIDATES", 2)
    tier = Tier()
    for number, num_bytes in ((1, 100), (2, 300), (3, 200)):
        tier.memory.know(AdapterId(number), facts(num_bytes, f"{number}"))
    order = [one.adapter_id for one in tier.plan(1.0) if isinstance(one, AdapterTransfer)]
    assert order == [3, 2]


@pytest.mark.parametrize(("is_known", "num_back"), [(False, 0), (True, 25)])
def test_a_look_visits_each_node_once(monkeypatch: pytest.MonkeyPatch, is_known: bool, num_back: int) -> None:
    tier = Tier(max_history_blocks=25)
    load(tier.memory, 1, 300)
    tier.away(1, 40, 10.0, AdapterId(1))
    tier.evict(AdapterId(1))
    if not is_known:
        del tier.memory.loads.known[AdapterId(1)]
    visited: list[KvNode] = []
    can_come = watermarks.can_come

    def visit(node: KvNode) -> bool:
        visited.append(node)
        return can_come(node)

    monkeypatch.setattr(watermarks, "can_come", visit)
    assert sum(blocks_of(tier.plan(20.0))) == num_back
    assert len(visited) <= (40 + num_back if is_known else 0), "when chosen, and at the begin"


def test_history_beyond_its_limit_does_not_come_back() -> None:
    tier = Tier(max_history_blocks=25)
    tier.away(1, 40, 10.0)
    transfers = tier.plan(20.0)
    assert blocks_of(transfers) == [25]
    tier.end(*transfers)
    tier.memory.begin_plan(0, 20.1)
    assert tier.plan(20.1) == [] and tier.used == 25


def test_a_copy_that_fails_takes_what_is_behind_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermarks, "_RUN_BYTES", 10 * BLOCK_BYTES)
    tier = Tier()
    path = tier.away(1, 30, 10.0)
    first, second, third = tier.plan(20.0)
    tier.end(first, error="bad luck")
    tier.end(third, second)
    assert tier.used == 0 and all(node.root is None for node in path)


# Out.


@pytest.mark.parametrize(("num_host_slots", "num_left"), [(200, 95), (2, 98), (0, 100)])
def test_leaves_that_the_host_has_go_down_to_the_high_mark(num_host_slots: int, num_left: int) -> None:
    tier = Tier(num_host_slots=num_host_slots)
    path = keep(tier.memory, 1, 100, namespace=BASE)
    tier.settle()
    assert tier.used == 100, "there was no look since"
    tier.plan(1.0)
    assert tier.used == num_left == num_on_device(path[:num_left])


def test_an_adapter_does_not_leave_before_its_kv() -> None:
    tier = Tier()
    load(tier.memory, 1, 1)  # which ranks lowest
    path = keep(tier.memory, 1, 99, adapter_id=AdapterId(1), namespace=b"adapter 1")
    tier.visit(path, 1.0, AdapterId(1))
    tier.settle()
    tier.plan(1.0)
    assert num_on_device(path) == 99, "the host has the beginning, not the leaves"
    assert tier.memory.cache.state(AdapterId(1)) is AdapterState.RESIDENT


def test_adapters_of_waiting_requests_stay() -> None:
    tier = Tier(num_host_slots=0)
    for number in range(1, 11):
        load(tier.memory, number, 1000)
        tier.memory.cache.add_waiting(AdapterId(number))
    tier.plan(1.0)
    assert tier.used == 100
    tier.memory.cache.remove_waiting(AdapterId(7))
    tier.plan(1.1)
    assert tier.used == 90 and tier.memory.cache.state(AdapterId(7)) is AdapterState.ABSENT


@pytest.mark.parametrize("end", [RequestStatus.RUNNING, RequestStatus.ENDED])
def test_kv_that_was_copied_for_a_request_stays_while_it_waits(end: RequestStatus) -> None:
    tier, request = Tier(), make_request(1)
    path = tier.away(1, 40, 10.0)
    tier.visit(keep(tier.memory, 300, 60, namespace=BASE), 20.0)
    tier.memory.prefixes.hold(path)
    block_ids = tier.memory.pool.allocate(40)
    assert block_ids is not None and tier.memory.swapper is not None
    tier.memory.swapper.copy_in(path, block_ids, 0.0)
    for node in path:
        node.awaited_by = request
    tier.settle()
    tier.plan(30.0)
    assert tier.used == 97 and num_on_device(path) == 40, "of the others, the host has three"
    tier.memory.prefixes.hold(path)  # as an admission that is refused in the end
    tier.memory.prefixes.release(path)
    tier.plan(30.25)
    assert tier.used == 97 and num_on_device(path) == 40
    request.status = end
    tier.plan(30.5)
    assert tier.used == 95 and num_on_device(path) == 38


# Beside requests.


def test_looks_are_a_tenth_of_a_second_apart() -> None:
    tier = Tier()
    tier.plan(1.0)
    tier.away(1, 10, 0.5)
    assert tier.plan(1.0625) == [] and tier.swaps.wake_at_s == pytest.approx(1.1)
    assert blocks_of(tier.plan(1.125)) == [10]


def large() -> Tier:
    """With 40 blocks away, of which four fill the window of swaps."""
    tier = Tier(block_bytes=watermarks._RUN_BYTES)
    tier.away(1, 40, 10.0)
    return tier


def test_swaps_begin_a_few_at_a_time_and_a_demand_cancels_the_rest() -> None:
    tier = large()
    first, *others = tier.plan(20.0)
    assert len(others) == 3
    tier.end(first)
    (next_one,) = tier.plan(20.01)
    assert tier.memory.loads.begin(AdapterId(1), facts(100), 20.02)
    (demand,) = tier.plan(20.02)
    assert isinstance(demand, AdapterTransfer)
    tier.end(*others, next_one)
    assert tier.plan(20.2) == [], "it is still open"
    tier.end(demand)
    assert tier.plan(20.25) == [] and tier.swaps.wake_at_s == pytest.approx(20.3)
    assert len(tier.plan(20.3)) == 4


def test_while_the_machine_is_short_of_memory_nothing_comes_back() -> None:
    tier = large()
    tier.swaps.turn(20.0, may_bring=False)
    assert not len(tier.memory.transfers) and tier.swaps.wake_at_s is None
    assert len(tier.plan(20.2)) == 4


def test_swaps_that_would_pass_the_high_mark_are_cancelled() -> None:
    tier = large()
    first, *others = tier.plan(20.0)
    keep(tier.memory, 900, 95, namespace=BASE)
    tier.end(first)
    copies = tier.plan(20.01)
    assert num_coming(copies) == 0 and tier.used == 99
    tier.end(*others, *copies)
    assert tier.memory.room.reclaim(50, 0, include_waiting=True, keep=BASE_ADAPTER)
    assert num_coming(tier.plan(20.02)) == 0 and tier.used < 70


def test_a_request_promotes_the_copy_that_it_waits_for() -> None:
    tier = large()
    first, *others = tier.plan(20.0)
    scheduler = make_scheduler(memory=tier.memory, max_num_batched_tokens=256, max_model_len=256)
    scheduler.add_request(make_request(1, prompt=(*tokens_of(1, 40), 7)), 20.01)
    plan = scheduler.schedule(20.01)
    assert plan is not None and plan.promoted_transfers == (first.transfer_id,)
    assert not plan.transfers and scheduler.wake_at_s() is None, "a copy's end leads to the next plan"
    tier.end(first, *others)
    assert scheduler.schedule(20.02) is not None
    assert scheduler.wake_at_s() == tier.swaps.wake_at_s == pytest.approx(20.1)


def test_no_room_that_is_reserved_for_growth_is_taken() -> None:
    tier = Tier()
    tier.away(1, 40, 10.0)
    tier.memory.pool.reserve_growth(90)
    transfers = tier.plan(20.0)
    assert blocks_of(transfers) == [10] and tier.memory.pool.num_reserved_blocks == 90
    tier.end(*transfers)
    tier.memory.pool.reserve_growth(90)
    assert tier.plan(20.125) == [] and tier.swaps.wake_at_s is None, "nothing changes until an event"
    tier.memory.pool.reserve_growth(60)
    assert blocks_of(tier.plan(20.25)) == [30] and tier.memory.pool.num_reserved_blocks == 60


def test_no_part_of_a_look_goes_to_an_adapter_without_room() -> None:
    tier = Tier(limit_bytes=2000)  # which is 20 of 120 blocks
    for number, num_bytes in ((1, 1000), (2, 1800)):
        load(tier.memory, number, num_bytes)
        tier.memory.cache.acquire(AdapterId(number), 5.0)
        tier.memory.cache.release(AdapterId(number))
        tier.evict(AdapterId(number))
    tier.away(1, 40, 10.0)
    tier.away(200, 40, 11.0)
    transfers = tier.plan(20.0)
    assert [one.adapter_id for one in transfers if isinstance(one, AdapterTransfer)] == [2]
    assert blocks_of(transfers) == [40, 26]


def test_while_a_transfer_comes_nothing_wakes_the_swapper() -> None:
    tier = Tier()
    tier.away(1, 40, 10.0)
    assert tier.memory.loads.begin(AdapterId(1), facts(100), 20.0)
    (demand,) = tier.plan(20.0)
    assert tier.swaps.wake_at_s is None
    assert tier.plan(20.05) == [] and tier.swaps.wake_at_s is None
    tier.end(demand)
    assert tier.plan(20.06) == [] and tier.swaps.wake_at_s == pytest.approx(20.1)
    copies = tier.plan(20.125)
    assert blocks_of(copies) == [40] and tier.swaps.wake_at_s is None
    tier.end(*copies)
    assert tier.plan(20.15) == [] and tier.swaps.wake_at_s == pytest.approx(20.225)


VARIANTS = ("libra", "libra:dependencies=0", "libra:costs=0", "corun:swapper=1")


@dataclass(eq=False)
class _Running:
    adapter_id: AdapterId
    path: list[KvNode]
    own: list[BlockId]
    num_growth: int  # blocks


class BalanceMachine(RuleBasedStateMachine):
    """Requests and adapters in any order. When nothing happens, swaps go one way, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(variant=st.sampled_from(VARIANTS), window_blocks=st.sampled_from([10, 20, 1000]))
    def build(self, variant: str, window_blocks: int) -> None:
        """Begin with three prefixes, and the adapters of two, that only the host has.

        ``window_blocks``: of swaps under way; if they are few, swaps begin long after the decision.
        """
        self.patch.setattr(watermarks, "_RUN_BYTES", window_blocks // 2 * BLOCK_BYTES)
        self.patch.setattr(watermarks, "_MAX_OPEN_BYTES", window_blocks * BLOCK_BYTES)
        self.tier = Tier(variant, num_host_slots=120)
        marks = self.tier.memory.cache.policy.rules.watermarks
        assert marks is not None
        self.most = round(marks.high * NUM_BLOCKS)
        self.open: list[Transfer] = []
        self.running: list[_Running] = []
        self.versions = [BASE_ADAPTER, *map(AdapterId, range(1, 5))]  # newest ones
        self.ways = set[str]()  # of swaps since a request did something, or a transfer failed
        for number in (0, 3, 3, 4, 4):  # the first request for an adapter loads it
            self.begin(number, 25, 1.0, 0, stays=False)
            self.settle()
        self.need_all(5, with_adapters=True)

    @rule(
        number=st.integers(0, 6),
        num_blocks=st.integers(1, 60),
        seconds=st.floats(0.0, 30.0),
        num_growth=st.sampled_from([0, 10, 40]),
        stays=st.booleans(),
    )
    def begin(self, number: int, num_blocks: int, seconds: float, num_growth: int, stays: bool) -> None:
        """Find and hold what is readable, and compute the rest, if the adapter is there."""
        memory, slot = self.tier.memory, max(0, number - 2)
        self.act(seconds)
        if not self.is_resident(slot):
            return
        adapter_id = self.versions[slot]
        namespace, tokens = f"adapter {adapter_id}".encode(), tokens_of(1_000 * number, num_blocks)
        assert memory.swapper is not None
        path = list(memory.prefixes.match(namespace, tokens, len(tokens)))
        path = path[: memory.swapper.num_readable(path)]
        memory.prefixes.hold(path)
        memory.cache.acquire(adapter_id, self.tier.now_s)
        memory.prefixes.visit(adapter_id, namespace, path, self.tier.now_s)
        self.reserve()  # what is held cannot be reserved
        running = _Running(adapter_id, path, [], num_growth)
        self.running.append(running)
        num_missing = num_blocks - len(path)
        memory.room.reclaim(num_missing, 0, include_waiting=True, keep=adapter_id)
        for block_id in memory.pool.allocate(num_missing) or ():
            parent, start = path[-1] if path else None, len(path) * BLOCK_SIZE
            content = tokens[start : start + BLOCK_SIZE]
            node = memory.prefixes.store(adapter_id, namespace, parent, content, block_id, self.tier.now_s)
            path.append(node)
            if node.block_id != block_id:
                running.own.append(block_id)
        if not stays:
            self.end_request(-1)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9))
    def end_request(self, index: int) -> None:
        self.act(0.0)
        running = self.running.pop(index % len(self.running))
        self.tier.memory.pool.free(running.own)
        self.tier.memory.prefixes.release(running.path)
        self.tier.memory.cache.release(running.adapter_id)

    @rule(number=st.integers(1, 4))
    def replace_version(self, number: int) -> None:
        self.act(0.0)
        self.tier.memory.drop(self.versions[number])
        self.tier.memory.begin_plan(0, self.tier.now_s)
        self.versions[number] = AdapterId(1 + max(self.versions))

    @rule(num_blocks=st.integers(1, 100))
    def make_room(self, num_blocks: int) -> None:
        self.act(0.0)
        self.tier.memory.room.reclaim(num_blocks, 0, include_waiting=True, keep=BASE_ADAPTER)

    @rule(num_rounds=st.integers(1, 6), with_adapters=st.booleans())
    def need_all(self, num_rounds: int, with_adapters: bool) -> None:
        """Let requests take all that is free, so that idle KV is copied, and leaves."""
        memory, taken = self.tier.memory, list[BlockId]()
        for _ in range(num_rounds):
            taken += memory.pool.allocate(memory.pool.num_available_blocks) or ()
            self.act(0.0)
            self.settle()
            num_blocks = min(20, memory.prefixes.num_evictable_blocks)
            memory.room.free_up(0, num_blocks, include_waiting=True, keep=BASE_ADAPTER)
        while with_adapters and memory.room.evict_adapters(1, include_waiting=True):
            pass
        memory.pool.free(taken)
        self.act(0.0)

    @rule(
        seconds=st.sampled_from([0.0, 0.05, 0.1, 5.0]),
        num_ended=st.integers(0, 9),
        has_failed=st.sampled_from([False, False, True]),
        num_growths=st.lists(st.sampled_from([0, 0, 90]), min_size=1, max_size=4),
    )
    def turn(self, seconds: float, num_ended: int, has_failed: bool, num_growths: list[int]) -> None:
        """``num_growths``: further blocks that are reserved, in one plan each."""
        for num_growth in num_growths:
            self.open += self.plan(seconds, num_growth)
            ended, self.open = self.open[:num_ended], self.open[num_ended:]
            self.tier.end(*ended, error="bad luck" if has_failed else None)
            if has_failed:  # what did not come leaves its memory free
                self.ways.clear()

    @rule()
    def rest(self) -> None:
        """Neither requests nor calls, until nothing would move."""
        tier = self.tier
        for _ in range(200):
            tier.end(*self.open)
            self.open = self.plan(0.1)
            if not self.open and tier.swaps.wake_at_s is None:
                break
        else:
            raise AssertionError("it never ends")
        still = tier.used
        assert not any(self.plan(0.1) for _ in range(3)) and tier.used == still

    def teardown(self) -> None:
        self.patch.undo()
        if hasattr(self, "tier"):
            while self.running:
                self.end_request(0)
            self.rest()
            assert self.tier.memory.pool.num_used_blocks == 0

    @invariant()
    def all_agrees(self) -> None:
        if hasattr(self, "tier"):
            check_invariants(self.tier.memory)

    def settle(self) -> None:
        """End all that is open, and what plans begin then. No time passes."""
        while begun := self.plan(0.0):
            self.tier.end(*self.open, *begun)
            self.open = []

    def act(self, seconds: float) -> None:
        """Let a request do something after so many seconds."""
        self.tier.now_s += seconds
        self.ways.clear()

    def plan(self, seconds: float, num_growth: int = 0) -> list[Transfer]:
        """Return what begins. Swaps go one way, below the high mark, beside reserved blocks and demands."""
        tier, pool = self.tier, self.tier.memory.pool
        self.reserve(num_growth)
        used, num_reserved = tier.used, pool.num_reserved_blocks
        has_demand = any(one.is_demand for one in tier.memory.transfers)
        begun = tier.plan(tier.now_s + seconds)
        num_in = num_coming([one for one in begun if not one.is_demand])
        assert not (num_in and has_demand)
        assert tier.used <= max(self.most, used)
        if num_in == len(begun):  # copies to the host hold what was to be evicted for growth
            assert pool.num_reserved_blocks == num_reserved
        if num_in:
            self.ways.add("in")
        elif tier.used < used and used > self.most:  # else KV follows its adapter, whose load failed
            self.ways.add("out")
        assert len(self.ways) < 2
        return begun

    def reserve(self, num_more: int = 0) -> None:
        num_growth = sum(one.num_growth for one in self.running)
        self.tier.memory.pool.reserve_growth(num_growth + num_more)

    def is_resident(self, number: int) -> bool:
        """Whether a request can use the newest version of an adapter; if it is absent, it is loaded."""
        memory, adapter_id = self.tier.memory, self.versions[number]
        if memory.cache.state(adapter_id) is AdapterState.ABSENT:
            adapter = facts(600 * number, f"{adapter_id}")
            memory.room.make_adapter_room(adapter, include_waiting=True)
            memory.loads.begin(adapter_id, adapter, self.tier.now_s)
        return memory.cache.state(adapter_id) is AdapterState.RESIDENT


TestBalance = BalanceMachine.TestCase
TestBalance.settings = settings(
    max_examples=8, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_long_histories() -> None:
    """Longer ones than hypothesis makes, in which most plans follow each other."""
    for seed in range(32):
        rng, machine = random.Random(seed), BalanceMachine()
        machine.build(rng.choice(VARIANTS), rng.choice([10, 20, 1000]))
        for _ in range(60):
            act(machine, rng)
            machine.all_agrees()
        machine.teardown()


def act(machine: BalanceMachine, rng: random.Random) -> None:
    """Run one random action, mostly some plans or a request."""
    number = rng.randint(0, 6)
    kind = rng.choices(
        ["turn", "begin", "end", "need all", "make room", "replace", "rest"], [40, 20, 15, 10, 3, 5, 3]
    )[0]
    if kind == "turn":
        growths = [rng.choice([0, 0, 0, rng.randint(1, 90)]) for _ in range(rng.randint(1, 4))]
        machine.turn(rng.choice([0.0, 0.05, 0.1, 5.0]), rng.randint(0, 4), rng.random() < 0.1, growths)
    elif kind == "begin":
        machine.begin(number, rng.randint(1, 60), rng.random(), rng.choice([0, 0, 10]), rng.random() < 0.5)
    elif kind == "end" and machine.running:
        machine.end_request(number)
    elif kind == "need all":
        machine.need_all(number, rng.random() < 0.5)
    elif kind == "make room":
        machine.make_room(rng.randint(1, 100))
    elif kind == "replace":
        machine.replace_version(rng.randint(1, 4))
    elif kind == "rest":
        machine.rest()
