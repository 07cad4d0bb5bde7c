"""The use of memory is kept between two watermarks, beside all that requests wait for."""

import hypothesis.strategies as st
import pytest
from corun.profiles.link import Direction
from corun.runtime.memory import watermarks
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.kv_tree import KvNode
from corun.runtime.memory.policies.policy import SwappingPolicy
from corun.runtime.memory.watermarks import WatermarkSwaps
from corun.runtime.plan import BASE_ADAPTER, AdapterId, AdapterTransfer, KvTransfer, Transfer, TransferResult
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.kept_prefixes import keep, load, tokens_of
from support.scheduling import BLOCK_BYTES, facts, make_memory, make_request, make_scheduler

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
        self.memory.check_invariants()
        return transfers

    def end(self, *transfers: Transfer, error: str | None = None) -> None:
        for one in transfers:
            self.memory.end_transfer(TransferResult(one.transfer_id, error), self.now_s)
            self.memory.check_invariants()

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
                    self.memory.prefixes.evict(node)
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


def test_kv_that_was_copied_for_a_request_stays_until_it_begins() -> None:
    tier = Tier()
    path = tier.away(1, 40, 10.0)
    tier.visit(keep(tier.memory, 300, 60, namespace=BASE), 20.0)
    tier.memory.prefixes.hold(path)
    block_ids = tier.memory.pool.allocate(40)
    assert block_ids is not None and tier.memory.swapper is not None
    tier.memory.swapper.copy_in(path, block_ids, 0.0)
    tier.settle()
    tier.plan(30.0)
    assert tier.used == 97 and num_on_device(path) == 40, "of the others, the host has three"
    tier.memory.prefixes.hold(path)
    tier.memory.prefixes.release(path)
    tier.plan(30.25)
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
    first, *_ = tier.plan(20.0)
    scheduler = make_scheduler(memory=tier.memory, max_num_batched_tokens=256, max_model_len=256)
    scheduler.add_request(make_request(1, prompt=(*tokens_of(1, 40), 7)), 20.01)
    plan = scheduler.schedule(20.01)
    assert plan is not None and plan.promoted_transfers == (first.transfer_id,)
    assert not plan.transfers
    assert scheduler.wake_at_s() == tier.swaps.wake_at_s == pytest.approx(20.1)


def test_no_room_that_is_reserved_for_growth_is_taken() -> None:
    tier = Tier()
    tier.away(1, 40, 10.0)
    tier.memory.pool.reserve_growth(90)
    assert tier.plan(20.0) == [] and tier.memory.pool.num_reserved_blocks == 90
    assert tier.swaps.wake_at_s is None, "nothing changes until an event"
    tier.memory.pool.reserve_growth(60)
    assert blocks_of(tier.plan(20.1)) == [40] and tier.memory.pool.num_reserved_blocks == 60


class BalanceMachine(RuleBasedStateMachine):
    """Prefixes and adapters in any order. When nothing happens, swaps go one way, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        variant=st.sampled_from(["libra", "libra:dependencies=0", "libra:costs=0", "corun:swapper=1"]),
        is_window_small=st.booleans(),
    )
    def build(self, variant: str, is_window_small: bool) -> None:
        if is_window_small:  # so that swaps are decided long before they begin
            self.patch.setattr(watermarks, "_RUN_BYTES", 5 * BLOCK_BYTES)
            self.patch.setattr(watermarks, "_MAX_OPEN_BYTES", 10 * BLOCK_BYTES)
        self.tier = Tier(variant, num_host_slots=120)
        marks = self.tier.memory.cache.policy.rules.watermarks
        assert marks is not None
        self.most = round(marks.high * NUM_BLOCKS)
        self.open: list[Transfer] = []

    @rule(number=st.integers(0, 5), num_blocks=st.integers(1, 40), seconds=st.floats(0.0, 30.0))
    def use_prefix(self, number: int, num_blocks: int, seconds: float) -> None:
        """Find what is there, and compute the rest."""
        memory = self.tier.memory
        self.tier.now_s += seconds
        missing = num_blocks - memory.pool.num_available_blocks
        if missing > 0:
            memory.room.reclaim(num_blocks, 0, include_waiting=True, keep=BASE_ADAPTER)
        if memory.pool.num_available_blocks >= num_blocks:
            keep_computed(self.tier, 1_000 * number, num_blocks)

    @rule(number=st.integers(1, 4), seconds=st.floats(0.0, 30.0))
    def use_adapter(self, number: int, seconds: float) -> None:
        memory, adapter_id = self.tier.memory, AdapterId(number)
        self.tier.now_s += seconds
        if memory.cache.state(adapter_id) is AdapterState.ABSENT:
            adapter = facts(600 * number, f"{number}")
            memory.room.make_adapter_room(adapter, include_waiting=True)
            memory.loads.begin(adapter_id, adapter, self.tier.now_s)
        if memory.cache.state(adapter_id) is AdapterState.RESIDENT:
            memory.cache.acquire(adapter_id, self.tier.now_s)
            memory.cache.release(adapter_id)

    @rule(num_blocks=st.integers(1, 100))
    def make_room(self, num_blocks: int) -> None:
        self.tier.memory.room.reclaim(num_blocks, 0, include_waiting=True, keep=BASE_ADAPTER)

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.1, 5.0]), num_ended=st.integers(0, 9))
    def turn(self, seconds: float, num_ended: int) -> None:
        before = self.tier.used
        self.open += self.tier.plan(self.tier.now_s + seconds)
        assert self.tier.used <= max(self.most, before)
        ended, self.open = self.open[:num_ended], self.open[num_ended:]
        self.tier.end(*ended)

    @rule()
    def rest(self) -> None:
        """Neither requests nor calls, until nothing would move."""
        tier = self.tier
        ways = set[str]()
        for _ in range(200):
            before = tier.used
            tier.end(*self.open)
            self.open = tier.plan(tier.now_s + 0.1)
            if num_coming([one for one in self.open if not one.is_demand]):
                ways.add("in")
            elif tier.used < before:
                ways.add("out")
            if not self.open and tier.swaps.wake_at_s is None:
                break
        else:
            raise AssertionError("it never ends")
        assert len(ways) < 2
        still = tier.used
        assert not any(tier.plan(tier.now_s + 0.1) for _ in range(3)) and tier.used == still

    def teardown(self) -> None:
        self.patch.undo()

    @invariant()
    def all_agrees(self) -> None:
        if hasattr(self, "tier"):
            self.tier.memory.check_invariants()


def keep_computed(tier: Tier, first_token: int, num_blocks: int) -> None:
    """Let a request find a prefix, or compute all of it where its beginning is not readable."""
    memory = tier.memory
    assert memory.swapper is not None
    tokens = tokens_of(first_token, num_blocks)
    path = list(memory.prefixes.match(BASE, tokens, len(tokens)))
    path = path[: memory.swapper.num_readable(path)]
    if path:
        tier.visit(path, tier.now_s)
    elif not memory.prefixes.match(BASE, tokens, len(tokens)):
        tier.visit(keep(memory, first_token, num_blocks, namespace=BASE), tier.now_s)


TestBalance = BalanceMachine.TestCase
TestBalance.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
