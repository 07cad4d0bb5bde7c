"""Parts of the time to first tokens: they add up under every policy, and each part occurs."""

from collections import Counter
from dataclasses import replace

import pytest
from corun.runtime.engine.messages import AddRequest
from corun.runtime.scheduler.events import RequestUpdate, TimePart
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES
from corun.runtime.sim.clock import VirtualClock
from corun.runtime.sim.engine import SimulationOptions, build_simulated_parts, requests_of
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.replay import replay
from corun.runtime.sim.workloads import make_workload
from support.scheduling import Guess

WITH_QUEUES = ("chameleon", "chameleon-paper", "output-only")
# Predicted outputs are too short, and adapters and history evict each other, so requests wait for
# every possible reason.
OPTIONS = SimulationOptions(
    memory_policy="corun",
    prefix_cache=True,
    growth_headroom=0.0,
    host_bytes=12 << 30,
    make_predictor=lambda _: Guess(8),
)


def parts_of(policy: str, *, max_steps_in_flight: int = 1) -> Counter[str]:
    """Serve an overload, and check the parts of each request against its own clock."""
    clock = VirtualClock()
    workload = make_workload("S1", rate_rps=1.5, num_requests=200, seed=7, traces=None)
    options = replace(OPTIONS, scheduling_policy=policy, max_steps_in_flight=max_steps_in_flight)
    built = build_simulated_parts(MACHINES["a40-llama7b"], workload, options, clock=clock, sleep=clock.sleep)
    core, executor = built.core, built.executor
    added_s: dict[int, float] = {}
    told: dict[int, dict[str, float]] = {}
    add_request, step = core.add_request, core.step

    def noted_add(message: AddRequest, arrival_s: float | None = None) -> None:
        added_s[message.request_id] = clock()
        add_request(message, arrival_s)

    def noted_step(timeout_s: float = 0.0) -> list[RequestUpdate]:
        updates = step(timeout_s)
        for update in updates:
            if update.timing is not None:
                assert update.request_id not in told, "it is told once"
                passed_s = clock() - added_s[update.request_id]
                assert sum(update.timing.parts.values()) == pytest.approx(passed_s, abs=1e-9)
                assert min(update.timing.parts.values(), default=0.0) >= 0
                told[update.request_id] = update.timing.parts
        return updates

    core.add_request, core.step = noted_add, noted_step  # type: ignore[method-assign]
    try:
        replayed = replay(
            core, requests_of(workload), clock, clock.sleep, executor.link_stats, executor.step_stats
        )
    finally:
        executor.close()
    assert told.keys() == {record.request_id for record in replayed.records}
    total = Counter[str]()
    for parts in told.values():
        total.update(parts)
    assert replayed.stats.first_token_parts_s == pytest.approx(dict(total))
    return total


def test_parts_add_up_under_every_policy_and_each_occurs() -> None:
    policies = [f"{name}:refresh=20" if name in WITH_QUEUES else name for name in SCHEDULER_POLICIES]
    seen = {policy.partition(":")[0]: set(parts_of(policy)) for policy in policies}
    assert set.union(*seen.values()) == set(TimePart) - {TimePart.CPU_WAIT}  # all cores are its own
    for policy, parts in seen.items():
        assert ("policy_limit" in parts) == (policy in WITH_QUEUES)
        assert {"order", "compute", "co_scheduled", "kv_memory", "recompute"} <= parts, policy


def test_parts_add_up_with_two_steps_in_flight() -> None:
    parts_of("corun", max_steps_in_flight=2)
