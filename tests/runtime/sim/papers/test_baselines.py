"""Baselines: adapters that are always on the device, and loads between steps."""

from dataclasses import replace

import pytest
from corun.runtime.coldstart.planner import PlannerConfig
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import build_engine
from corun.runtime.errors import ConfigError
from corun.runtime.sim.configure import options_of
from corun.runtime.sim.engine import SimulationOptions, simulate
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.papers.recipes import RECIPES
from corun.runtime.sim.workloads import Workload, WorkloadRequest, make_workload

_A40 = MACHINES["a40-llama7b"]
_LOAD_S = 128 * _A40.adapter_bytes_per_rank / _A40.model.link.bytes_per_s + _A40.model.link.latency_s


def _first_tokens_s(strategy: str, *, is_crowded: bool = False) -> tuple[list[float], int]:
    """Of requests for one adapter after the other, and the evictions."""
    machine = _A40
    if is_crowded:  # room for two adapters
        machine = replace(_A40, memory_bytes=2 * 128 * _A40.adapter_bytes_per_rank + 50 * _A40.block_bytes)
    requests = tuple(WorkloadRequest(2.0 * index, index % 3, 100, 3) for index in range(6))
    options = options_of(EngineConfig(load_strategy=strategy))
    replayed = simulate(machine, Workload(requests, (128,) * 3, 3), options)
    times_s = [(one.first_token_s or 0.0) - one.arrival_s for one in replayed.records]
    return times_s, replayed.stats.num_device_evictions


def test_of_cached_adapters_none_is_loaded_or_evicted() -> None:
    cached_s, num_evictions = _first_tokens_s("cached", is_crowded=True)
    assert num_evictions == 0
    assert cached_s == pytest.approx([cached_s[0]] * 6)
    warm_s, _ = _first_tokens_s("pipelined")
    assert cached_s[3:] == pytest.approx(warm_s[3:])
    assert warm_s[0] > cached_s[0] + 0.01


def test_a_serial_load_begins_after_the_step_and_others_wait_for_all_of_it() -> None:
    requests = Workload((WorkloadRequest(0.0, 0, 500, 40), WorkloadRequest(0.3, 1, 100, 2)), (8, 128), 40)

    def end_s(options: SimulationOptions) -> float:
        return simulate(_A40, requests, options).records[0].end_s or 0.0

    blocking = PlannerConfig(forced=LoadStrategy.BLOCKING)
    waiting_s = end_s(SimulationOptions(cold_starts=PlannerConfig(forced=LoadStrategy.ASYNC_LOAD)))
    blocking_s = end_s(SimulationOptions(cold_starts=blocking))
    serial_s = end_s(options_of(EngineConfig(load_strategy="serial")))
    assert serial_s == pytest.approx(waiting_s + _LOAD_S, abs=0.002)
    assert blocking_s == pytest.approx(waiting_s, abs=0.002)  # the step hides the load


@pytest.mark.parametrize("name", ["cached", "serial"])
def test_no_engine_has_them(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}', which only corun simulate has"):
        build_engine(EngineConfig(model="any", load_strategy=name), on_progress=print, own_process=False)


def test_recipes_name_one_adapter_after_the_other() -> None:
    workload = make_workload("toppings-S3", rate_rps=9.0, num_requests=250, seed=1, traces=None)
    assert [one.adapter for one in workload.requests] == [index % 200 for index in range(250)]
    assert set(workload.ranks) == {64}
    rates = {name: RECIPES[f"toppings-{name}"].spec.rps for name in ("S1", "S2", "S3", "S4", "S5", "S6")}
    assert rates == {"S1": 9.0, "S2": 6.0, "S3": 9.0, "S4": 3.0, "S5": 3.0, "S6": 3.0}
