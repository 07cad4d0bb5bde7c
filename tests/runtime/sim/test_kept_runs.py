"""Simulated figures stay as they are: small runs of every policy and machine, replayed.

``kept_runs.json`` has the figures of each run, and the seconds that its first tokens waited, by
part. Numbers are compared to nine digits, because vectors of other CPUs round the tenth. After a
change that is meant to change figures, write the file again: ``python test_kept_runs.py``.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.cluster.policy.placement.registry import PLACEMENTS
from corun.runtime.cluster.policy.registry import ROUTERS
from corun.runtime.memory.policies.registry import MEMORY_POLICIES
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES
from corun.runtime.sim.cluster import replay_cluster
from corun.runtime.sim.cluster_log import ClusterReplayed
from corun.runtime.sim.cluster_spec import ClusterSpec, ServerLife
from corun.runtime.sim.engine import SimulationOptions, simulate
from corun.runtime.sim.figures import figures_of
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.replay import Replayed
from corun.runtime.sim.workload_file import read_workload
from corun.runtime.sim.workload_spec import LengthSpec, SessionSpec
from corun.runtime.sim.workloads import Workload, draw_workload

_FILE = Path(__file__).with_name("kept_runs.json")
_Kept = dict[str, Any]
_PADDED = "tp4-llama7b-padded"
_OF_QUEUES = ("chameleon", "chameleon-paper", "output-only")
_SERVERS = (ServerLife(),) * 3
_CAPACITY = ((8, 6000.0), (32, 4800.0), (128, 2800.0))


def _kept(replayed: Replayed | ClusterReplayed, machine: str, workload: Any) -> _Kept:  # of one run
    parts = Counter[str]()
    for record in replayed.records:
        parts.update(record.parts_s)
    figures = asdict(figures_of(replayed, workload, MACHINES[machine]))
    return {"figures": figures | figures.pop("policy_counts"), "parts": {**parts}}


def _drawn(name: str, rate_rps: float, number: int, **changes: Any) -> Workload:
    """A workload with outputs so short that a run takes little time."""
    changes = {"lengths": LengthSpec(prompt_divisor=4, output_divisor=16)} | changes
    spec = read_workload(name)
    return draw_workload(replace(spec, rps=rate_rps, requests=number, seed=5, **changes), None)


def _one(machine: str, workload: Workload, memory_gib: float | None = None, **options: Any) -> _Kept:
    """A run of one engine; ``memory_gib``: so little that policies must choose."""
    simulated = MACHINES[machine]
    if memory_gib is not None:
        simulated = replace(simulated, memory_bytes=int(memory_gib * 2**30))
    return _kept(simulate(simulated, workload, SimulationOptions(**options)), machine, workload)


def _many(workload: Workload, **cluster: Any) -> _Kept:
    """A run of three engines that store half of the adapters each."""
    machine = MACHINES[_PADDED]
    store_bytes = sum(workload.ranks) * machine.adapter_bytes_per_rank // 2
    spec = ClusterSpec(servers=_SERVERS, store_bytes=store_bytes, seed=5, **cluster)
    options = SimulationOptions(scheduling_policy="corun", memory_policy="corun")
    return _kept(replay_cluster(machine, workload, options, spec), _PADDED, workload)


def _sums(name: str) -> _Kept:
    workload = _drawn(name, 4.0, 60, lengths=read_workload(name).lengths)
    requests = workload.requests
    return {
        "arrival_s": sum(one.arrival_s for one in requests),
        "prompt_tokens": sum(one.prompt_tokens for one in requests),
        "output_tokens": sum(one.output_tokens for one in requests),
        "adapters": sum(index * one.adapter for index, one in enumerate(requests)),
        "ranks": sum(workload.ranks[one.adapter] for one in requests),
        "sessions": len({one.session for one in requests}),
    }


def _runs() -> Mapping[str, Callable[[], _Kept]]:
    lengths = LengthSpec(prompt_divisor=5, output_divisor=10)
    crowded = partial(_one, "a40-llama8b-workers", _drawn("zipf", 30.0, 110, lengths=lengths), memory_gib=2.0)
    policies = [f"{name}:refresh=1" if name in _OF_QUEUES else name for name in SCHEDULER_POLICIES]
    scheduling = {
        f"scheduling {name.partition(':')[0]}": partial(crowded, scheduling_policy=name, slo_ttft_s=1.0)
        for name in policies
    } | {
        "scheduling chameleon with two queues": partial(
            crowded, scheduling_policy="chameleon:queues=2,refresh=1", slo_ttft_s=1.0
        )
    }
    follow_ups = SessionSpec(follow_up_share=0.6, min_gap_s=0.5)
    cached = partial(
        _one,
        "a40-llama7b",
        _drawn("prod50", 12.0, 60, sessions=follow_ups),
        memory_gib=2.5,
        prefix_cache=True,
        scheduling_policy="corun",
        host_bytes=2**31,
    )
    memory = {f"memory {name}": partial(cached, memory_policy=name) for name in MEMORY_POLICIES}
    few = _drawn("S1", 8.0, 4)
    machines = {f"machine {name}": partial(_one, name, few, scheduling_policy="corun") for name in MACHINES}
    names = (
        "S1",
        "S2",
        "zipf",
        "S1-16",
        "prod50",
        "prod100",
        "prod200",
        "uniform",
        "exp",
        "shifting",
        "bursts",
    )
    workloads = {f"workload {name}": partial(_sums, name) for name in names}
    routed = _drawn("prod50", 120.0, 70)
    routers = {
        f"router {name}": partial(_many, routed, router=name, placement="everywhere", placement_every_s=0.15)
        for name in ROUTERS
    }
    placed = partial(
        _many, _drawn("shifting", 120.0, 70), router="loraserve", placement_every_s=0.15, capacity=_CAPACITY
    )
    placements = {f"placement {name}": partial(placed, placement=name) for name in PLACEMENTS}
    return scheduling | memory | machines | workloads | routers | placements


_RUNS = _runs()


@pytest.fixture(scope="module")
def kept() -> _Kept:
    found: _Kept = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def test_there_is_a_run_of_everything(kept: _Kept) -> None:
    assert kept.keys() == _RUNS.keys()


@pytest.mark.parametrize("name", _RUNS)
def test_figures_are_as_kept(kept: _Kept, name: str) -> None:
    found = _RUNS[name]()
    assert found.keys() == kept[name].keys()
    for part, expected in kept[name].items():
        assert found[part] == pytest.approx(expected, rel=1e-9, abs=1e-12), part


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(run())}" for name, run in _RUNS.items()]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
