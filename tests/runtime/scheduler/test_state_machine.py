"""Random histories: all requests end, with the right tokens."""

import contextlib
import random
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from corun.runtime.adapter import AdapterFacts
from corun.runtime.errors import RequestError
from corun.runtime.memory.host_budget import HostSections
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.memory.policies.registry import MEMORY_POLICIES
from corun.runtime.memory.relief import MemoryRoom
from corun.runtime.plan import AdapterId, AdapterTransfer, Outcome, RequestId, StepPlan, SubBatchKind
from corun.runtime.request import Request
from corun.runtime.sampling import StructuredOutput
from corun.runtime.scheduler.events import RequestUpdate
from corun.runtime.scheduler.policy import PolicyWithLimits
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES, make_policy
from corun.runtime.scheduler.step_times import ProfiledTimes
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.fake_executor import expected_output
from support.invariants import check_invariants
from support.profiles import PROFILE
from support.random_cold_starts import RandomColdStarts
from support.scheduling import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    Guess,
    make_executor,
    make_memory,
    make_request,
    make_scheduler,
    policy_facts,
)

EOS = frozenset({3})
MAX_MODEL_LEN = 24
NUM_ADAPTERS = 4
REFRESH_S = 20.0  # of policies that cut queues
OUTCOMES = (Outcome.TOKENS, Outcome.RETRY, Outcome.FAILED)


# Which rows have a forward pass of their own.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "decode apart": {"mix_decode_with_prefill": False},
    "cold apart": {"separate_assisted_rows": True},
}


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler, an executor that ends steps and transfers on command, and failures."""

    depth = 1
    policy = "fcfs"

    @initialize(
        num_blocks=st.integers(5, 14),
        spare_bytes=st.integers(-300, 700),
        max_num_batched_tokens=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        layout=st.sampled_from(tuple(LAYOUTS)),
        recompute_at_tokens=st.none() | st.integers(4, 20),
        max_overtaking_tokens=st.integers(0, 40),
        cold_start_share=st.sampled_from([0.0, 0.5, 1.0]),
        cold_seed=st.integers(0, 1000),
        max_cold=st.tuples(st.integers(1, 12), st.integers(1, 3)),
        limit_bytes=st.none() | st.integers(200, 1200),
        has_pages=st.booleans(),
        host_pages=st.none() | st.integers(NUM_ADAPTERS, 3 * NUM_ADAPTERS),
        is_host_shared=st.booleans(),
        guess_tokens=st.integers(1, 20),
        keeps_prefixes=st.booleans(),
        num_host_slots=st.sampled_from([0, 2, 6, 40]),
        token_s=st.sampled_from([0.0, 1.0, 1.0]),
        memory_policy=st.sampled_from(tuple(MEMORY_POLICIES)),
        max_decode_gap_s=st.sampled_from([1e4, None, 0.002, 0.010]),
    )
    def build(
        self,
        *,
        num_blocks: int,
        spare_bytes: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        layout: str,
        recompute_at_tokens: int | None,
        max_overtaking_tokens: int,
        cold_start_share: float,
        cold_seed: int,
        max_cold: tuple[int, int],
        limit_bytes: int | None,
        has_pages: bool,
        host_pages: int | None,
        is_host_shared: bool,
        guess_tokens: int,
        keeps_prefixes: bool,
        num_host_slots: int,
        token_s: float,
        memory_policy: str,
        max_decode_gap_s: float | None,
    ) -> None:
        capacity_bytes = max(num_blocks * BLOCK_BYTES + spare_bytes, BLOCK_BYTES)
        if limit_bytes is not None:
            capacity_bytes = num_blocks * BLOCK_BYTES + limit_bytes
        self.has_pages = has_pages
        if has_pages:
            capacity_bytes -= capacity_bytes % BLOCK_BYTES
        host = host_sections = None
        if host_pages is not None:
            is_host_shared &= limit_bytes is None and not has_pages
            if num_host_slots and not is_host_shared:
                num_sections = max(host_pages, (host_pages + num_host_slots) // 2)
                host_sections = HostSections(num_sections, PAGESIZE, 2, host_pages // 2)
                host_pages = num_sections
            host = HostCache(host_pages * PAGESIZE, is_device_memory=is_host_shared)
        has_queues = self.policy.startswith(("chameleon", "output"))
        self.made_policy = make_policy(
            self.policy + f":refresh={REFRESH_S}" * has_queues,
            policy_facts(
                max_overtaking_tokens=max_overtaking_tokens,
                capacity_tokens=capacity_bytes * BLOCK_SIZE // BLOCK_BYTES,
            ),
        )
        memory = make_memory(
            num_blocks=num_blocks,
            capacity_bytes=capacity_bytes,
            limit_bytes=limit_bytes,
            has_pages=has_pages,
            host=host,
            keeps_prefixes=keeps_prefixes,
            num_host_slots=num_host_slots,
            host_sections=host_sections,
            token_s=token_s,
            policy=memory_policy,
        )
        self.rooms: list[MemoryRoom] = []
        memory.relief.watch(lambda: self.rooms.pop() if self.rooms else None, lambda: None)
        self.cold_starts = RandomColdStarts(
            random.Random(cold_seed), memory.transfers, start_share=cold_start_share, blocking_share=0.1
        )
        self.scheduler = make_scheduler(
            memory=memory,
            policy=self.made_policy,
            eos_token_ids=EOS,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            **LAYOUTS[layout],
            recompute_at_tokens=recompute_at_tokens,
            growth_headroom=0.0,
            max_assisted_tokens_per_step=max_cold[0],
            max_assisted_rows_per_step=max_cold[1],
            cold_starts=self.cold_starts,
            predictor=Guess(guess_tokens),
            times=ProfiledTimes(PROFILE.model, max_num_batched_tokens),
            max_decode_gap_s=max_decode_gap_s,
        )
        self.executor = make_executor(self.scheduler, is_automatic=False)
        self.executor.outcome_of = self.outcome_of
        self.executor.spoils = lambda request_id, kind: request_id in self.cursed
        self.cursed: set[RequestId] = set()  # every forward pass with them fails
        self.layout = layout
        self.outcomes: list[Outcome] = []  # of the next rows
        self.requests: dict[RequestId, Request] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, RequestUpdate] = {}
        self.versions = [AdapterId(number) for number in range(NUM_ADAPTERS + 1)]  # newest ones
        self.dropped: set[AdapterId] = set()
        self.failing_adapters: set[AdapterId] = set()
        self.was_failed: set[RequestId] = set()
        self.now_s = 0.0
        self.next_id = 1

    def outcome_of(self, request_id: RequestId, start: int) -> Outcome:
        outcome = self.outcomes.pop() if self.outcomes else Outcome.TOKENS
        if outcome is not Outcome.TOKENS:
            self.was_failed.add(request_id)
        return outcome

    @rule(
        prompt_len=st.integers(1, MAX_MODEL_LEN - 1),
        family=st.none() | st.integers(0, 2),
        max_tokens=st.none() | st.integers(1, 20),
        adapter=st.integers(0, NUM_ADAPTERS),
        ignore_eos=st.booleans(),
        is_structured=st.booleans(),
        age_s=st.sampled_from([0.0, 0.0, 2.0]),
        count=st.integers(1, 4),
    )
    def arrive(
        self,
        prompt_len: int,
        family: int | None,
        max_tokens: int | None,
        adapter: int,
        ignore_eos: bool,
        is_structured: bool,
        age_s: float,
        count: int,
    ) -> None:
        """Requests of one family have a prefix in common."""
        for index in range(count):
            prompt: int | tuple[int, ...] = max(1, prompt_len - index)
            if family is not None:
                prompt = tuple((family + 5 * position) % 61 for position in range(prompt_len))
                prompt = (*prompt[:-1], index)
            self.arrive_one(
                prompt, max_tokens, adapter, ignore_eos, self.now_s - age_s, is_structured=is_structured
            )

    @precondition(lambda self: self.outputs)
    @rule(
        index=st.integers(0, 50),
        num_more=st.integers(1, 4),
        other_adapter=st.none() | st.integers(0, NUM_ADAPTERS),
    )
    def follow_up(self, index: int, num_more: int, other_adapter: int | None) -> None:
        """The next turn of a conversation, perhaps with another adapter."""
        request = list(self.requests.values())[index % len(self.requests)]
        prompt = (*request.prompt_token_ids, *self.outputs[request.request_id], *range(num_more))
        adapter = request.adapter_id and (request.adapter_id - 1) % NUM_ADAPTERS + 1
        adapter = adapter if other_adapter is None else other_adapter
        self.arrive_one(prompt[: MAX_MODEL_LEN - 1], 5, adapter, False, self.now_s)

    def arrive_one(
        self,
        prompt: int | tuple[int, ...],
        max_tokens: int | None,
        adapter: int,
        ignore_eos: bool,
        arrival_s: float,
        *,
        is_structured: bool = False,
    ) -> None:
        request_id = RequestId(self.next_id)
        request = make_request(
            request_id,
            prompt=prompt,
            max_tokens=max_tokens,
            arrival_s=arrival_s,
            adapter_id=self.versions[adapter],
            adapter=self.facts_of(self.versions[adapter]) if adapter else None,
            ignore_eos=ignore_eos,
            min_tokens=min(2, max_tokens or 2),
            structured_output=StructuredOutput("regex", "a") if is_structured else None,
        )
        self.next_id += 1
        self.now_s += 1.0
        try:
            self.scheduler.add_request(request, self.now_s)
        except RequestError:
            return
        self.requests[request_id] = request
        self.outputs[request_id] = []

    @precondition(lambda self: self.scheduler.num_in_flight < self.depth)
    @rule()
    def schedule(self) -> None:
        self.schedule_one()

    def schedule_one(self) -> bool:
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return False
        self.check_layout(plan)
        self.executor.submit(plan)
        return True

    def check_layout(self, plan: StepPlan) -> None:
        """No more forward passes than needed, with rows of one adapter side by side."""
        for batch in plan.sub_batches:
            adapters = [self.requests[request_id].adapter_id for request_id in batch.request_ids]
            assert adapters == sorted(adapters)
        if self.cursed:
            return  # rows may have to be apart from others
        kinds = [batch.kind for batch in plan.sub_batches]
        assert len(kinds) <= (1 if self.layout == "one pass" else 2)
        if len(kinds) == 2:
            apart = "DECODE" if self.layout == "decode apart" else "ASSISTED"
            assert kinds.count(SubBatchKind[apart]) == 1

    @precondition(lambda self: self.executor.steps)
    @rule(
        outcomes=st.lists(st.sampled_from([Outcome.TOKENS] * 6 + [Outcome.RETRY, Outcome.FAILED]), max_size=4)
    )
    def finish_step(self, outcomes: list[Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.executor.finish_step()
        self.outcomes = []
        self.poll()

    @precondition(lambda self: self.executor.steps)
    @rule()
    def lose_step(self) -> None:
        plan = self.executor.lose_step()
        for batch in plan.sub_batches:
            self.was_failed |= set(batch.request_ids)
        self.was_failed |= {update.request_id for update in plan.block_updates}
        for transfer in plan.transfers:  # those that ended before are not given up
            if self.executor.transfers.get(transfer.transfer_id) is transfer:
                self.executor.finish_transfer(transfer.transfer_id, "the step was lost")
                if isinstance(transfer, AdapterTransfer):
                    self.failing_adapters.add(transfer.adapter_id)
        self.executor.poll()
        self.take(self.scheduler.fail_step(plan.step_id, "lost", self.now_s))

    @rule(num_turns=st.integers(1, 12), with_transfers=st.booleans())
    def run(self, num_turns: int, with_transfers: bool) -> None:
        """Run some turns without failures: most interesting states take a while."""
        for _ in range(num_turns):
            self.fill()
            if with_transfers:
                for transfer_id in list(self.executor.transfers):
                    self.executor.finish_transfer(transfer_id)
            if self.executor.steps:
                self.executor.finish_step()
            self.poll()

    @precondition(lambda self: self.executor.transfers)
    @rule(index=st.integers(0, 10), is_failing=st.sampled_from([False, False, False, True]))
    def finish_transfer(self, index: int, is_failing: bool) -> None:
        transfers = list(self.executor.transfers.values())
        transfer = transfers[index % len(transfers)]
        if is_failing and isinstance(transfer, AdapterTransfer):
            self.failing_adapters.add(transfer.adapter_id)
        self.executor.finish_transfer(transfer.transfer_id, "bad luck" if is_failing else None)
        self.poll()

    @precondition(lambda self: self.executor.transfers)
    @rule(index=st.integers(0, 10), num_groups=st.integers(1, 3))
    def progress_transfer(self, index: int, num_groups: int) -> None:
        loads = list(self.executor.transfers)
        self.executor.progress_transfer(loads[index % len(loads)], num_groups)
        self.poll()

    @rule(share=st.sampled_from([0.0, 0.09, 0.12, 0.2]), is_later=st.booleans())
    def see_memory(self, share: float, is_later: bool) -> None:
        """Other programs allocate or free memory of the machine."""
        self.rooms.append(MemoryRoom(int(share * 10_000), 10_000))
        self.now_s += 40.0 * is_later

    def facts_of(self, version: AdapterId) -> AdapterFacts:
        size = (version - 1) % NUM_ADAPTERS + 1
        run_pages = (1, size - 1)[:size] if self.has_pages else ()
        num_bytes = sum(run_pages) * BLOCK_BYTES or size * 130
        host_bytes = (PAGESIZE,) * size
        return AdapterFacts(f"content {version}", 8, num_bytes, host_bytes=host_bytes, run_pages=run_pages)

    @rule(adapter=st.integers(1, NUM_ADAPTERS), is_pinned=st.booleans())
    def pin(self, adapter: int, is_pinned: bool) -> None:
        """Pin an adapter if that leaves room for all requests, or unpin it."""
        memory = self.scheduler.memory
        adapter_id, pins = self.versions[adapter], memory.pins
        if not is_pinned:
            pins.unpin(adapter_id)
        elif memory.host is not None and memory.host.is_device_memory:
            return  # where it would lie, is so small here that nothing else would find room
        elif adapter_id not in pins:
            with contextlib.suppress(RequestError):
                self.scheduler.check_pin(self.facts_of(adapter_id).num_bytes)
                pins.pin(adapter_id, self.facts_of(adapter_id))

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50))
    def curse(self, index: int) -> None:
        self.cursed.add(RequestId(index % (self.next_id - 1) + 1))

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        request_id = RequestId(index % (self.next_id - 1) + 1)
        event = self.scheduler.abort(request_id, self.now_s)
        assert (event is None) == (request_id not in self.requests or request_id in self.ended)
        self.take([] if event is None else [event])

    @rule(adapter=st.integers(1, NUM_ADAPTERS))
    def drop(self, adapter: int) -> None:
        """Replace an adapter by other content. No later request names the old version."""
        version = self.versions[adapter]
        left = self.requests.keys() - self.ended.keys()
        if all(self.requests[request_id].adapter_id != version for request_id in left):
            self.scheduler.memory.pins.unpin(version)
            self.scheduler.memory.drop(version)
            self.dropped.add(version)
            self.versions[adapter] = AdapterId(version + NUM_ADAPTERS)

    def fill(self) -> None:
        while self.scheduler.num_in_flight < self.depth and self.schedule_one():
            self.parts_agree()

    def poll(self) -> None:
        for result in self.executor.poll():
            self.take(self.scheduler.update(result, self.now_s))

    def take(self, events: list[RequestUpdate]) -> None:
        for event in events:
            assert event.request_id not in self.ended, "an event after its end"
            self.outputs[event.request_id].extend(event.token_ids)
            if event.finish_reason is not None:
                self.ended[event.request_id] = event
                self.check_output(self.requests[event.request_id], event)

    def check_output(self, request: Request, event: RequestUpdate) -> None:
        expected, reason = expected_output(
            request.prompt_token_ids,
            request.sampling,
            request.adapter_id,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=EOS,
        )
        output = self.outputs[request.request_id]
        if event.finish_reason in ("stop", "length"):
            assert (output, event.finish_reason) == (expected, reason)
            is_stop = event.finish_reason == "stop"
            assert event.stop_token_id == (output[-1] if is_stop else None)
        else:
            assert output == expected[: len(output)]
        if event.finish_reason == "error":
            has_bad_adapter = request.adapter_id in self.failing_adapters
            assert has_bad_adapter or request.request_id in self.was_failed | self.cursed
            assert event.error

    @invariant()
    def parts_agree(self) -> None:
        if hasattr(self, "scheduler"):
            check_invariants(self.scheduler)

    def teardown(self) -> None:
        """Without further failures all requests end, and all memory is freed."""
        if not hasattr(self, "scheduler"):
            return
        for _ in self.turns_to_end():
            self.parts_agree()
        assert set(self.ended) == set(self.requests)
        memory = self.scheduler.memory
        for adapter in range(1, NUM_ADAPTERS + 1):
            memory.pins.unpin(AdapterId(adapter))
        for adapter_id in memory.cache.resident_ids():
            self.scheduler.memory.drop(adapter_id)
        dropped = set(memory.cache.resident_ids())
        for _ in self.turns_to_end():
            self.parts_agree()
        assert set(memory.take_removed()) == dropped | self.dropped
        if memory.host is not None:
            assert memory.host.num_used == 0
            assert self.executor.host is not None
            assert set(self.executor.host.places) == memory.host.place_ids
        num_kept_bytes = memory.pool.num_cached_blocks * memory.pool.block_bytes
        assert memory.budget.free_bytes + num_kept_bytes == memory.budget.capacity_bytes

    def turns_to_end(self) -> Iterator[int]:
        for turn in range(3000):
            if not self.scheduler.has_work():
                return
            self.fill()
            is_moving = self.executor.steps or self.executor.transfers
            if not is_moving and self.scheduler.has_work():
                wake_s = self.scheduler.wake_at_s()
                assert wake_s is not None, "stuck"
                self.now_s = max(self.now_s, wake_s)
            for transfer_id in list(self.executor.transfers):
                self.executor.finish_transfer(transfer_id)
            if self.executor.steps:
                self.executor.finish_step()
            self.poll()
            yield turn
        raise AssertionError("no end")


@pytest.mark.parametrize("num_histories", [30, pytest.param(300, marks=pytest.mark.full)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_everything_ends_with_the_right_tokens(policy: str, depth: int, num_histories: int) -> None:
    machine = type("Machine", (SchedulerMachine,), {"depth": depth, "policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# All policies at all depths; one depth of the default and of the simplest in every run.
CROWDS = [
    pytest.param(policy, depth, marks=() if depth == 2 and policy in ("corun", "fcfs") else pytest.mark.full)
    for policy in SCHEDULER_POLICIES
    for depth in (1, 2, 3)
]


@pytest.mark.parametrize(("policy", "depth"), CROWDS)
def test_long_crowded_histories(policy: str, depth: int) -> None:
    """More requests than fit, in histories longer than hypothesis makes them."""
    lived = [live_through(seed, policy, depth) for seed in range(60)]
    assert sum(one.num_preemptions for one in lived) > 40
    assert sum(one.num_cold_starts for one in lived) > 40
    assert sum(one.num_found_tokens for one in lived) > 400
    assert sum(one.num_host_tokens for one in lived) > 40


@pytest.mark.full
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["chameleon", "chameleon-paper", "output-only"])
def test_queues_are_cut_while_requests_run(policy: str, depth: int) -> None:
    """In histories of at least 64 requests, from which on sizes are known."""
    lived = [live_through(seed, policy, depth, num_acts=600) for seed in range(48)]
    assert max(one.num_queues for one in lived) > 1


class Lived(NamedTuple):
    """Totals of one history."""

    num_preemptions: int
    num_cold_starts: int
    num_queues: int  # at its end
    num_found_tokens: int  # of prompts, in the KV of others
    num_host_tokens: int  # of these, on the host


@pytest.mark.full
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("memory_policy", MEMORY_POLICIES)
@pytest.mark.parametrize("policy", ["corun", "chameleon"])
def test_every_pair_of_policies(policy: str, memory_policy: str, depth: int) -> None:
    for seed in range(100, 160):
        live_through(seed, policy, depth, memory_policy=memory_policy)


def live_through(
    seed: int, policy: str, depth: int, num_acts: int = 80, memory_policy: str | None = None
) -> Lived:
    """Run one random history, under a drawn memory policy unless one is given."""
    rng, host_rng = random.Random(seed), random.Random(f"host {seed}")
    kv_rng = random.Random(f"KV {seed}")
    drawn_policy = random.Random(f"memory {seed}").choice(tuple(MEMORY_POLICIES))
    machine = SchedulerMachine()
    machine.depth, machine.policy = depth, policy
    machine.build(
        num_blocks=rng.randint(6, 12),
        spare_bytes=rng.choice([0, 0, 130, 400, 900]),
        max_num_batched_tokens=rng.randint(2, 20),
        max_num_seqs=rng.randint(2, 6),
        layout=tuple(LAYOUTS)[int(rng.random() * len(LAYOUTS))],
        recompute_at_tokens=rng.choice([None, None, 8, 14]),
        max_overtaking_tokens=rng.choice([0, 20, 1000]),
        cold_start_share=rng.choice([0.0, 0.7, 1.0]),
        cold_seed=rng.randint(0, 1000),
        max_cold=(rng.choice([3, 20]), rng.choice([1, 4])),
        limit_bytes=rng.choice([None, None, 600, 1000]),
        has_pages=random.Random(f"pages {seed}").random() < 0.5,
        host_pages=host_rng.choice([None, 4, 6, 10]),
        is_host_shared=host_rng.random() < 0.5,
        guess_tokens=host_rng.choice([1, 1, 1, 5]),
        keeps_prefixes=host_rng.random() < 0.5,
        num_host_slots=kv_rng.choice([0, 9, 40, 40]),
        token_s=kv_rng.choice([0.0, 1.0, 1.0, 1.0, 1.0]),
        memory_policy=memory_policy or drawn_policy,
        max_decode_gap_s=kv_rng.choice([1e4, None, 0.002, 0.010]),
    )
    curses = rng.choice([0, 0, 3])
    for _ in range(num_acts):
        act(machine, rng, curses=curses)
        machine.parts_agree()
    counters = machine.scheduler.counters
    machine.teardown()
    made = machine.made_policy
    num_queues = int(made.counts()["num_queues"]) if isinstance(made, PolicyWithLimits) else 1
    num_found = sum(request.found.num_cached_tokens or 0 for request in machine.requests.values())
    num_host = sum(request.found.num_host_cached_tokens for request in machine.requests.values())
    return Lived(counters.num_preemptions, machine.cold_starts.num_started, num_queues, num_found, num_host)


def act(machine: SchedulerMachine, rng: random.Random, *, curses: int) -> None:
    """Run one random action, if possible. ``curses``: weight of cursing a request."""
    scheduler, executor = machine.scheduler, machine.executor
    actions: list[tuple[int, bool, Callable[[], None]]] = [
        (20, True, lambda: arrive(machine, rng)),
        (25, scheduler.num_in_flight < machine.depth, machine.schedule),
        (
            30,
            bool(executor.steps),
            lambda: machine.finish_step(rng.choices(OUTCOMES, weights=(60, 2, 1), k=6)),
        ),
        (
            15,
            bool(executor.transfers),
            lambda: machine.finish_transfer(rng.randint(0, 10), rng.random() < 0.1),
        ),
        (5, True, lambda: machine.run(rng.randint(1, 6), rng.random() < 0.5)),
        (3, bool(machine.requests), lambda: machine.abort(rng.randint(0, 50))),
        (5, bool(machine.requests), lambda: follow_up(machine, rng)),
        (curses, bool(machine.requests), lambda: machine.curse(rng.randint(0, 50))),
        (2, bool(executor.steps), machine.lose_step),
        (3, True, lambda: machine.pin(rng.randint(1, NUM_ADAPTERS), rng.random() < 0.3)),
        (1, True, lambda: machine.drop(rng.randint(1, NUM_ADAPTERS))),
    ]
    (_, can_happen, action), *_ = rng.choices(actions, weights=[one[0] for one in actions])
    if can_happen:
        action()


def follow_up(machine: SchedulerMachine, rng: random.Random) -> None:
    """Continue the conversation of another request, mostly with its adapter."""
    other_adapter = rng.choice([None, None, None, 1])
    machine.follow_up(rng.randint(0, 50), rng.randint(1, 3), other_adapter)


def arrive(machine: SchedulerMachine, rng: random.Random) -> None:
    """Let a few requests arrive."""
    machine.arrive(
        prompt_len=rng.randint(1, 12),
        family=rng.choice([None, 0, 1]),
        max_tokens=rng.choice([None, 3, 9]),
        adapter=rng.choice([0, 0, 1, 2, 3, 4]),
        ignore_eos=rng.random() < 0.5,
        is_structured=rng.random() < 0.4,
        age_s=rng.choice([0.0, 0.0, 2.0]),
        count=rng.randint(1, 3),
    )
