"""``corun plan``: the load that a server holds within an SLO, and what would change it."""

import argparse
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..config.engine import EngineConfig
from ..config.flags import build_configs
from ..config.simulate import SimulateConfig
from ..errors import ConfigError, CorunError
from ..sim.cluster_spec import DEFAULT_ROUTER
from ..sim.configure import machine_of
from ..sim.draw_inputs import trace_directory
from ..sim.planning import (
    FIRST_SHARE,
    ONE_MORE_SERVER,
    Capacity,
    NoLimitError,
    Slo,
    adapters_that_fit,
    capacities,
    saturated,
    servers_for,
    what_binds,
    what_ifs,
)
from ..sim.study import SimulatedRun, Study
from ..sim.variants import specs_of
from ..sim.workload_file import read_workload
from ..sim.workloads import draw_workload
from .main import in_order
from .profile import ProgressLine

# bench/sim_vs_real.py, 25 November 2026, on a CPU at 0.7 of the largest load: see bench/RESULTS.md.
_OFF = (
    "on a real engine steps took 1.1 to 1.2 times as long as simulated, first tokens at 0.7 of "
    "this load 1.2 to 1.4 times"
)
_MAX_SIMULATED = 8  # servers; more take minutes
_SAME = 0.03  # smaller changes cannot be distinguished from the spread over seeds


@in_order()
def run(arguments: argparse.Namespace) -> int:
    """Search for the largest load, and print the report."""
    engine, config = build_configs(
        vars(arguments), (EngineConfig, SimulateConfig), environment=os.environ, command="plan"
    )
    if engine.slo_ttft_s is None:
        raise ConfigError("no limit of the time to first token: give --slo-ttft-s X, in seconds")
    slo = Slo(engine.slo_ttft_s, config.percentile)
    setups = _setups(engine, config, frozenset(vars(arguments)))
    try:
        with Study(None, config.jobs or os.cpu_count() or 1, ProgressLine().say) as study:
            start_rps = FIRST_SHARE * saturated(study, setups[0])
            base = capacities(study, {"as it is": setups}, slo, start_rps)["as it is"]
            changed = {} if config.quick else _changed(study, setups, slo, base)
            servers = _servers(study, setups, slo, config, base, changed)
    except NoLimitError as error:
        raise CorunError(
            f"P{slo.percentile:g} of the time to first token is not within {slo.ttft_s:g} s at any "
            f"load, or is at every load ({error}): corun simulate shows the times"
        ) from error
    for line in [*report(setups[0], config, slo, base, changed), *servers]:
        print(line)
    return 0


def _setups(engine: EngineConfig, config: SimulateConfig, given: frozenset[str]) -> list[SimulatedRun]:
    """One for each seed. Raises ``ConfigError``."""
    workload = read_workload(config.workload)
    if workload.json_lines is not None:
        raise ConfigError(
            f"--workload is {config.workload}, a log, and a log fixes the load: use corun simulate"
        )
    machine = machine_of(engine.profile, config.workload, engine, given)
    return [
        SimulatedRun(
            name="as it is",
            machine=machine,
            config=engine,
            workload=spec,
            traces=trace_directory(config.traces),
            horizon_s=config.horizon_s,
        )
        for spec in specs_of(config, workload, None)
    ]


def _changed(
    study: Study, setups: Sequence[SimulatedRun], slo: Slo, base: Capacity
) -> Mapping[str, Capacity]:
    by_name: dict[str, list[SimulatedRun]] = {}
    for setup in setups:
        for name, other in what_ifs(setup).items():
            by_name.setdefault(name, []).append(other)
    return capacities(study, by_name, slo, base.median_rps)


def report(
    setup: SimulatedRun, config: SimulateConfig, slo: Slo, base: Capacity, changed: Mapping[str, Capacity]
) -> Iterator[str]:
    """Yield the lines of the report."""
    low, high = min(base.rates_rps), max(base.rates_rps)
    yield f"Simulated, not measured. Machine: {setup.machine.name}. Workload: {config.workload}."
    yield (
        f"load      {base.median_rps:.3g} requests/s with a P{slo.percentile:g} of first tokens of "
        f"at most {slo.ttft_s:g} s ({low:.3g} to {high:.3g} over {len(base.rates_rps)} "
        f"seed{'s' if len(base.rates_rps) > 1 else ''})"
    )
    yield from _adapters(setup, base)
    binding = ", ".join(
        f"{share:.0%} {name.value}" for name, share in what_binds(base.outcomes).items() if share
    )
    busy = statistics.median(one.figures.busy_share for one in base.outcomes)
    link = statistics.median(one.figures.link_busy_share for one in base.outcomes)
    yield (
        f"binds     the slowest tenth waits for: {binding}; the device computes {busy:.0%} of the "
        f"time, the link copies {link:.0%}"
    )
    for name, capacity in changed.items():
        ratio = capacity.median_rps / base.median_rps
        word = f"{ratio - 1:+.0%}" if abs(ratio - 1) >= _SAME else "the same"
        yield f"what if   {name}: {capacity.median_rps:.3g} requests/s ({word})"
    yield f"off by    {_OFF}"


def _servers(
    study: Study,
    setups: Sequence[SimulatedRun],
    slo: Slo,
    config: SimulateConfig,
    base: Capacity,
    changed: Mapping[str, Capacity],
) -> list[str]:
    """Return how many servers hold ``--rps``: simulated, or from the load of two or of one."""
    if config.rps is None:
        return []
    two = changed.get(ONE_MORE_SERVER)
    of_one_rps = base.median_rps if two is None else two.median_rps / 2
    number, how = math.ceil(config.rps / of_one_rps), f"if each bears {of_one_rps:.3g}"
    if two is not None and number <= _MAX_SIMULATED:
        number = servers_for(study, setups, slo, config.rps, number)
        how = f"simulated, router {DEFAULT_ROUTER}"
    return [f"servers   {number} for {config.rps:g} requests/s, each with all adapters ({how})"]


def _adapters(setup: SimulatedRun, base: Capacity) -> Iterator[str]:
    workload = draw_workload(replace(setup.workload, rps=1.0), setup.traces)
    sizes = [setup.machine.adapter_facts("", rank).num_bytes for rank in workload.ranks]
    fit = statistics.median(adapters_that_fit(one, statistics.fmean(sizes)) for one in base.outcomes)
    hits = 1.0 - statistics.median(one.figures.cold_share for one in base.outcomes)
    yield (
        f"adapters  {len(sizes)}, {sum(sizes) / 2**30:.3g} GiB; at that load "
        f"{min(fit, len(sizes)):.0f} are on the device on average, and {hits:.0%} of requests find "
        "theirs there"
    )
