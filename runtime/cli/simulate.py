"""``corun simulate``: engines under a workload, on virtual time."""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from ...profiles.picture import check_matplotlib
from ...profiles.profile import ProfileError
from ..cluster.settings import OperatingPoints
from ..config.engine import EngineConfig
from ..config.flags import build_configs
from ..config.simulate import SimulateConfig
from ..errors import ConfigError
from ..sim.configure import cluster_of, machine_of
from ..sim.draw_inputs import trace_directory
from ..sim.operating_capacity import operating_capacity, with_capacity
from ..sim.results import (
    RUNS_NAME,
    Cell,
    Results,
    cut_short,
    foot,
    missed_by_one,
    prepared_folder,
    table,
    write_results,
)
from ..sim.study import SimulatedRun, Study
from ..sim.variants import Variant, check_number, rates_of, specs_of, variants_of
from ..sim.workload_file import read_workload
from ..sim.workload_spec import WorkloadSpec
from ..whole_file import write_whole
from .main import in_order
from .profile import ProgressLine


@in_order()
def run(arguments: argparse.Namespace) -> int:
    """Simulate all variants, print a table, and write figures and pictures."""
    engine, config = build_configs(
        vars(arguments), (EngineConfig, SimulateConfig), environment=os.environ, command="simulate"
    )
    given = frozenset(vars(arguments))
    if config.operating_points is not None:
        return _write_operating_points(Path(config.operating_points), engine, config, given)
    cells = list(cells_of(engine, config, given))
    setups = [setup for cell in cells for setup in cell.setups]
    folder = None
    if config.out is not None:
        digest = hashlib.sha256("".join(one.digest for one in setups).encode()).hexdigest()
        folder = prepared_folder(Path(config.out), digest, is_forced=config.force)
    kept = None if folder is None else folder / RUNS_NAME
    with Study(kept, _num_processes(config), ProgressLine().say) as study:
        outcomes = study.run(setups)
    results = Results(cells, outcomes, config.workload, config.percentile, engine.slo_ttft_s)
    for line in (*table(results), *missed_by_one(results), *cut_short(results)):
        print(line)
    print(foot(results))
    if folder is not None:
        for path in write_results(folder, results, may_draw=_may_draw()):
            print(path)
    return 0


def _write_operating_points(
    path: Path, engine: EngineConfig, config: SimulateConfig, given: frozenset[str]
) -> int:
    """Search for the capacity of one server at each rank. Raises ``ConfigError``."""
    others = given & {"compare", "sweep", "servers", "router", "placement", "out"}
    if others:
        flag = f"--{min(others).replace('_', '-')}"
        raise ConfigError(f"--operating-points simulates one server of one kind: leave out {flag}")
    setup = SimulatedRun(
        name="operating points",
        machine=machine_of(engine.profile, config.workload, engine, given),
        config=engine,
        workload=read_workload(config.workload),
        traces=trace_directory(config.traces),
        horizon_s=config.horizon_s,
    )
    found = operating_capacity(
        setup,
        "--operating-points",
        engine.slo_ttft_s,
        config.percentile,
        _num_processes(config),
        ProgressLine().say,
    )
    assert engine.slo_ttft_s is not None
    points = OperatingPoints(setup.machine.name, engine.slo_ttft_s, config.percentile, dict(found))
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(points), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--operating-points {path}: {error.strerror or error}") from error
    print(path)
    return 0


def cells_of(engine: EngineConfig, config: SimulateConfig, given: frozenset[str]) -> Iterator[Cell]:
    """Yield all variants at all loads; ``given``: names of options. Raises ``ConfigError``."""
    variants = variants_of(engine, config)
    workloads = [read_workload(variant.config.workload) for variant in variants]
    rates_rps = rates_of(config, workloads[0])
    check_number(len(variants), len(rates_rps), config.seeds)
    for variant, workload in zip(variants, workloads, strict=True):
        named = given | variant.compared
        machine = machine_of(variant.engine.profile, variant.config.workload, variant.engine, named)
        cluster = cluster_of(variant.config, named)
        for rate_rps in rates_rps:
            setups = [
                SimulatedRun(
                    name=_name(variant, spec),
                    machine=machine,
                    config=variant.engine,
                    workload=spec,
                    traces=trace_directory(config.traces),
                    log_digest=_log_digest(spec),
                    horizon_s=config.horizon_s,
                    cluster=cluster,
                )
                for spec in specs_of(config, workload, rate_rps)
            ]
            if cluster is not None:
                placed = with_capacity(
                    cluster,
                    setups[0],
                    engine.slo_ttft_s,
                    config.percentile,
                    _num_processes(config),
                    ProgressLine().say,
                )
                setups = [replace(setup, cluster=placed) for setup in setups]
            yield Cell(variant.name, tuple(setups))


def _num_processes(config: SimulateConfig) -> int:
    return config.jobs or os.cpu_count() or 1


def _name(variant: Variant, spec: WorkloadSpec) -> str:
    load = f"{spec.rps:g} requests/s" if spec.rps else ""
    return ", ".join(filter(None, (variant.name, load, f"seed {spec.seed}")))


def _log_digest(spec: WorkloadSpec) -> str:
    """Raises ``ConfigError`` if the log cannot be read."""
    if spec.json_lines is None:
        return ""
    try:
        return hashlib.sha256(Path(spec.json_lines).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"--workload {spec.json_lines}: {error.strerror or error}") from error


def _may_draw() -> bool:
    try:
        check_matplotlib()
    except ProfileError as error:
        print(f"corun: no pictures: {error}", file=sys.stderr)
        return False
    return True
