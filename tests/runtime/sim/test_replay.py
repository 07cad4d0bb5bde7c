"""Replays: the engine's own core over a simulated machine, on virtual and on real time."""

import itertools
import random
import time
from dataclasses import replace

import msgspec
import pytest
from corun.profiles.models import LinkModel
from corun.runtime.coldstart import cold_start
from corun.runtime.coldstart.cold import AdapterShape, ColdRequest
from corun.runtime.coldstart.cold_start import PlannedColdStarts
from corun.runtime.coldstart.link import by_layer
from corun.runtime.coldstart.planner import Planner, PlannerConfig
from corun.runtime.coldstart.predict import predict
from corun.runtime.coldstart.strategy import AT_ONCE, LoadStrategy
from corun.runtime.engine.messages import AddRequest
from corun.runtime.errors import ConfigError
from corun.runtime.sampling import SamplingParams
from corun.runtime.sim.clock import VirtualClock
from corun.runtime.sim.engine import SimulationOptions, build_simulated_parts, requests_of, simulate
from corun.runtime.sim.machines import Factors, slowed
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.replay import Replayed, replay
from corun.runtime.sim.workloads import Workload, WorkloadRequest, make_workload
from support.scheduling import Guess
from support.simulation import MACHINE, MODEL

A40 = MACHINES["a40-llama7b"]
RANKS = (8, 8, 8)


def workload(*requests: tuple[float, int, int, int], max_tokens: int = 50) -> Workload:
    """Of (arrival, adapter, prompt, output)."""
    return Workload(tuple(WorkloadRequest(*one) for one in requests), RANKS, max_tokens)


def lengths(replayed: Replayed) -> list[int]:
    return [record.num_output_tokens for record in replayed.records]


@pytest.mark.parametrize(("policy", "is_cold"), [("libra", False), ("libra:swapper=0", True)])
def test_an_idle_engine_loads_adapters_that_nothing_asked_for_yet(policy: str, is_cold: bool) -> None:
    two = workload((0.0, 0, 700, 3), (5.0, 1, 700, 3))
    first, second = simulate(A40, two, SimulationOptions(memory_policy=policy)).records
    assert first.is_cold and second.is_cold is is_cold


def test_a_request_alone_takes_what_its_load_and_its_steps_take() -> None:
    (record,) = simulate(A40, workload((3.0, 0, 700, 3)), SimulationOptions()).records
    # Rank 8 is 12 MiB, for which the first layer waits.
    load_s, lora_s = 12 * 2**20 / 12e9 + 1e-3, 1.2e-6 * 8
    first_s = load_s + 12e-3 + 0.05e-3 + 512 * (0.2e-3 + lora_s) + 7e-9 * 512 * 513 / 2
    second_s = 12e-3 + 0.05e-3 + 188 * (0.2e-3 + lora_s) + 7e-9 * (188 * 512 + 188 * 189 / 2)
    assert record.arrival_s == 3.0
    assert record.first_token_s == pytest.approx(3.0 + first_s + second_s)
    # Two more tokens, which look at 701 and 702 keys; the weights are read for each.
    decode_s = 2 * (12e-3 + 23e-3 + 0.05e-3 + 4e-6 * 8) + 1e-6 * (701 + 702)
    assert record.end_s == pytest.approx(3.0 + first_s + second_s + decode_s)
    assert (record.num_output_tokens, record.finish_reason) == (3, "stop")


@pytest.mark.parametrize("link_bytes_per_s", [50.0, 1e3, 1e5])
@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 13])
def test_what_the_planner_predicts_of_a_request_alone_comes_true(
    link_bytes_per_s: float, num_prompt_tokens: int
) -> None:
    model = replace(MODEL, link=LinkModel(link_bytes_per_s, 0.5))
    machine = replace(MACHINE, model=model)
    replayed = simulate(machine, workload((0.0, 0, num_prompt_tokens, 2)), SimulationOptions())
    (strategy,) = replayed.stats.cold_starts
    facts = machine.adapter_facts("one", 8)
    assert facts.layers is not None
    lane_s = [size / link_bytes_per_s for size in facts.layers.group_bytes]
    arrival_s = [end_s + 0.5 for end_s in itertools.accumulate(lane_s)]
    cold = ColdRequest(
        num_tokens=num_prompt_tokens,
        adapter=AdapterShape(facts.num_bytes, facts.layers.rank_sums),
        ready_s=by_layer(facts.layers.group_of_layer, arrival_s),
        max_chunk_tokens=machine.max_num_batched_tokens,
        max_assisted_tokens=machine.max_num_batched_tokens,
        num_workers=1,
    )
    predicted = predict(model, cold, LoadStrategy(strategy))
    assert replayed.records[0].first_token_s == pytest.approx(predicted.first_token_s)


def test_the_same_replay_gives_the_same_bytes() -> None:
    def run() -> bytes:
        requests = make_workload("S1", rate_rps=1.3, num_requests=120, seed=7, traces=None)
        return msgspec.json.encode(simulate(A40, requests, SimulationOptions()))

    assert run() == run()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_preemption_changes_no_length(max_steps_in_flight: int) -> None:
    many = workload(*((0.5 * index, index % 3, 30, 20 + index) for index in range(24)))
    machine = replace(MACHINE, memory_bytes=3 * 2000 + 300 * MACHINE.kv_bytes_per_token)
    options = SimulationOptions(
        growth_headroom=0.0, max_steps_in_flight=max_steps_in_flight, make_predictor=lambda _: Guess(1)
    )
    replayed = simulate(machine, many, options)
    assert lengths(replayed) == [20 + index for index in range(24)]
    assert {record.finish_reason for record in replayed.records} == {"stop"}
    total = sum(record.num_preemptions for record in replayed.records)
    assert total == replayed.stats.num_preemptions > 0
    assert replayed.stats.generated_tokens == sum(lengths(replayed))


def test_a_limit_cuts_what_would_go_on() -> None:
    replayed = simulate(A40, workload((0.0, 0, 5, 60), max_tokens=8), SimulationOptions())
    assert [(one.num_output_tokens, one.finish_reason) for one in replayed.records] == [(8, "length")]


def test_what_can_never_fit_is_counted_and_nothing_waits_for_it() -> None:
    fits, too_long = (0.0, 0, 5, 2), (1.0, 1, 57_000, 2)
    replayed = simulate(
        A40, workload(fits, too_long, (2.0, 1, 60_000, 2), max_tokens=400), SimulationOptions()
    )
    assert replayed.refused == {"max_tokens": 1, "prompt": 1}
    assert [record.request_id for record in replayed.records] == [1]


def test_factors_slow_the_machine_and_tell_nobody() -> None:
    requests = workload(*((0.1 * index, index % 3, 300, 20) for index in range(20)))
    ends = [
        simulate(A40, requests, SimulationOptions(factors=factors)).duration_s
        for factors in (Factors(), Factors(step=2.0))
    ]
    assert ends[1] > 1.5 * ends[0]
    measured = replace(MODEL, decode_step_s=MODEL.step_s)
    assert slowed(measured, Factors()) == measured


def test_adapters_beyond_the_hosts_memory_are_read_from_files() -> None:
    requests = workload(*((0.5 * index, index % 3, 20, 5) for index in range(9)))
    # Room for the layers of one adapter on the host, and on the device for one and some KV.
    one = A40.adapter_facts("one", 8)
    machine = replace(A40, memory_bytes=one.num_bytes + 30 * A40.block_bytes)
    means = []
    for host_bytes in (None, sum(one.host_bytes)):
        replayed = simulate(machine, requests, SimulationOptions(host_bytes=host_bytes))
        assert lengths(replayed) == [5] * 9
        first_s = [record.first_token_s or 0.0 for record in replayed.records]
        means.append(sum(first_s) / len(first_s))
    assert means[1] > means[0]
    assert replayed.link["to_device"].num_bytes >= 3 * one.num_bytes


@pytest.mark.parametrize("forced", LoadStrategy)
def test_a_forced_strategy_is_used_again_soon_after_steps_were_held_up(forced: LoadStrategy) -> None:
    """One request decodes all the time; one of an adapter of its own comes each second."""
    machine = replace(A40, model=replace(A40.model, link=LinkModel(5e7, 1e-3)))
    others = (WorkloadRequest(2.0 + index, 1 + index, 900, 3) for index in range(60))
    requests = Workload((WorkloadRequest(0.0, 0, 100, 4000), *others), (8,) * 61, 5000)
    waits_s = []
    for num_bad_steps in (0, 20):
        clock = VirtualClock()
        parts = build_simulated_parts(machine, requests, SimulationOptions(), clock=clock, sleep=clock.sleep)
        config = PlannerConfig(forced=forced, priority=1000.0, max_stall_share=0.05)
        planner = Planner(machine.model, config)
        for _ in range(num_bad_steps):
            planner.observe_stall(forced, 0.0, 1.0)
            planner.observe_stall(LoadStrategy.PIPELINED, 0.0, 1.0)  # where no worker is free
        cold_starts = parts.scheduler.cold_starts
        assert isinstance(cold_starts, PlannedColdStarts)
        cold_starts.set_planner(planner)
        replayed = replay(
            parts.core,
            requests_of(requests),
            clock,
            clock.sleep,
            parts.executor.link_stats,
            parts.executor.step_stats,
        )
        parts.executor.close()
        assert lengths(replayed) == [4000] + [3] * 60
        assert replayed.stats.cold_starts == {forced: 61}
        waits_s.append([(one.first_token_s or 0.0) - one.arrival_s for one in replayed.records])
    as_ever, after = waits_s
    assert (after[1:20] == as_ever[1:20]) == (forced not in AT_ONCE)
    assert after[40:] == pytest.approx(as_ever[40:], rel=1e-6)
    if forced in AT_ONCE:
        assert sum(after[1:20]) > 1.2 * sum(as_ever[1:20])


def test_bursts_of_cold_requests_answer_sooner_if_the_largest_gain_has_the_link_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Than if loads follow each other as they began. Neither lets a request wait longer."""
    machine = MACHINES["a100-llama8b"]
    link = replace(machine.model.link, bytes_per_s=machine.model.link.bytes_per_s / 4)
    machine = replace(machine, model=replace(machine.model, link=link))
    rng = random.Random(1)
    requests = [
        WorkloadRequest(3.0 * burst + 0.002 * number, 8 * burst + number, rng.choice((32, 128, 512)), 8)
        for burst in range(4)
        for number in range(8)
    ]
    ranks = tuple(rng.choice((8, 32, 128)) for _ in requests)

    def first_tokens_s() -> list[float]:
        replayed = simulate(machine, Workload(tuple(requests), ranks, 64), SimulationOptions())
        return [(record.first_token_s or 0.0) - record.arrival_s for record in replayed.records]

    by_gain_s = first_tokens_s()
    monkeypatch.setattr(cold_start, "in_order", lambda loads, *_: list(loads))
    as_begun_s = first_tokens_s()
    assert sum(by_gain_s) <= 0.9 * sum(as_begun_s)
    assert max(by_gain_s) <= max(as_begun_s)


def test_a_policy_is_named_or_given() -> None:
    with pytest.raises(ConfigError, match="--scheduling-policy is 'best', must be one of: "):
        simulate(A40, workload((0.0, 0, 5, 2)), SimulationOptions(scheduling_policy="best"))


def test_real_time_is_time_as_well() -> None:
    fast = replace(MACHINE, model=slowed(MODEL, Factors(step=1e-4, link=1e-4, workers=1e-4)))
    requests = workload(*((0.002 * index, index % 3, 10, 6) for index in range(12)))
    parts = build_simulated_parts(fast, requests, SimulationOptions(), clock=time.monotonic, sleep=time.sleep)
    core, executor = parts.core, parts.executor
    try:
        arrivals = requests_of(requests)
        replayed = replay(
            core, arrivals, time.monotonic, time.sleep, executor.link_stats, executor.step_stats
        )
    finally:
        executor.close()
    assert lengths(replayed) == [6] * 12
    for record, (due_s, _) in zip(replayed.records, arrivals, strict=True):
        assert record.arrival_s == due_s
        assert record.first_token_s is not None and record.end_s is not None
        assert due_s < record.first_token_s < record.end_s <= replayed.duration_s


def test_requests_without_adapters_are_replayed_too() -> None:
    clock = VirtualClock()
    nobody = workload((0.0, 0, 4, 2))
    parts = build_simulated_parts(MACHINE, nobody, SimulationOptions(), clock=clock, sleep=clock.sleep)
    core, executor = parts.core, parts.executor
    base = AddRequest(1, (5,) * 4, SamplingParams(max_tokens=9))
    replayed = replay(core, [(1.0, base)], clock, clock.sleep, executor.link_stats, executor.step_stats)
    executor.close()
    assert lengths(replayed) == [2]
    # The prompt and one more token.
    assert replayed.steps.num_steps == 2
    assert replayed.steps.busy_s == pytest.approx(replayed.duration_s - 1.0)
    assert replayed.link["to_device"].num_bytes == 0
