"""Does the simulator agree with the real engine? Compares stored runs of ``policies_real.py``.

Each stored run is simulated: the same requests and policies, on the profile that was measured
before it, with the slowdown of the machine during the run. Figures are simulated over real, as
medians over runs with a 90 % interval. If the real engine distinguishes two policies (the interval
of their ratio on the same requests excludes 1), the simulator must order them the same way. Nothing
runs on the device. The last line is JSON.

    python bench/sim_vs_real.py [--traces DIR] [--results bench/results/policies_real]
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corun.profiles.profile import load_profile
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.errors import ConfigError
from corun.runtime.sim.draw_inputs import trace_directory
from corun.runtime.sim.figures import Figures
from corun.runtime.sim.machines import Factors
from paired import Ratio, ratio_of, report
from policies_real import RESULTS, Kept
from replays.cells import Cell, simulate_cell, workload_of
from replays.kept import read_figures
from replays.real import PRESSURES, Column, make_column

MAX_OFF, MAX_TTFT_OFF = 0.10, 0.20
_FIGURES: Mapping[str, Callable[[Figures], float]] = {
    "step time": lambda one: one.step_mean_s,
    "TPOT": lambda one: one.tpot_mean_s,
    "tokens/s": lambda one: one.tokens_per_s,
    "hit share": lambda one: one.hit_share,
    "hit share of the host": lambda one: one.host_hit_share,
    "mean TTFT": lambda one: one.ttft_mean_s,
    "link bytes": lambda one: one.link_bytes,
}
_WITHIN = {
    "step time": MAX_OFF,
    "TPOT": MAX_OFF,
    "tokens/s": MAX_OFF,
    "hit share": MAX_OFF,
    "hit share of the host": MAX_OFF,
    "mean TTFT": MAX_TTFT_OFF,
}


@dataclass(frozen=True, slots=True)
class Run:
    """One that is kept, and what the simulator makes of it."""

    cell: Cell
    is_b: bool  # of its pair
    real: Figures
    simulated: Figures

    @property
    def engine(self) -> Cell:
        """What runs of one engine at one rate have in common."""
        return replace(self.cell, seed=0)


def main() -> None:
    """Simulate, compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", metavar="DIR", help="directory of trace files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of stored real runs")
    options = parser.parse_args()
    try:
        runs = list(_runs(Kept(options.results), trace_directory(options.traces)))
    except ConfigError as error:
        sys.stderr.write(f"sim_vs_real.py: {error}\n")
        sys.exit(2)
    figures, bounds = compare(runs)
    orders, held = compare_orders(runs)
    workload = {"runs": len(runs)}
    report("sim_vs_real", workload, figures | orders, bounds | held)


def _runs(kept: Kept, traces: Path | None) -> Iterator[Run]:
    """Raises ``ConfigError`` if nothing is kept."""
    paths = sorted(kept.folder.glob("runs/*.json"))
    if not paths:
        raise ConfigError(f"{kept.folder} holds no runs of this code: run policies_real.py first")
    profile = load_profile(kept.folder / "profile.json")
    columns: dict[tuple[str, str, int], Column] = {}
    for path in paths:
        cell, real = _cell_of(path), read_figures(path)
        assert real is not None and cell.machine is not None
        pressure = PRESSURES[cell.machine.partition("-")[2]]
        key = cell.recipe, pressure.name, cell.num_requests
        if key not in columns:
            columns[key] = make_column(profile, cell.recipe, pressure, cell.num_requests, traces)
        slowness = json.loads(path.read_text(encoding="utf-8"))["slowness"]
        factors = Factors(step=slowness, workers=slowness)
        simulated = simulate_cell(cell, columns[key].machine, workload_of(cell, traces), factors)
        yield Run(cell, path.stem.endswith("-b"), real, simulated)


def _cell_of(path: Path) -> Cell:
    fields = json.loads(path.read_text(encoding="utf-8"))["cell"]
    strategy = fields["load_strategy"]
    return Cell(**fields | {"load_strategy": strategy and LoadStrategy(strategy)})


def compare(runs: Sequence[Run]) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Simulated over real by engine; figures that are 0 in both are equal."""
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    for engine in dict.fromkeys(run.engine for run in runs):
        of_engine = [run for run in runs if run.engine == engine]
        for name, value in _FIGURES.items():
            pairs = [(value(run.simulated), value(run.real)) for run in of_engine]
            if not any(real for _, real in pairs) and not any(simulated for simulated, _ in pairs):
                continue
            found = ratio_of([simulated / max(real, 1e-12) for simulated, real in pairs])
            label = f"{engine.name.replace('-seed0', '')}: {name}"
            figures[label] = found.to_json()
            if name in _WITHIN:
                bounds[f"{label} within {_WITHIN[name]:.0%}"] = is_within(found, _WITHIN[name])
            print(f"{label}: {_text(found)}", flush=True)
    return figures, bounds


def is_within(found: Ratio, share: float) -> bool:
    """Whether the median is off by no more than ``share`` of the real figure."""
    return abs(found.median - 1.0) <= share


def compare_orders(runs: Sequence[Run]) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Mean first tokens of A over those of B, real and simulated."""
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    b_of = {(run.cell.recipe, run.cell.rate_rps, run.cell.seed): run for run in runs if run.is_b}
    pairs: dict[str, list[tuple[Run, Run]]] = {}
    for a in (run for run in runs if not run.is_b):
        b = b_of.get((a.cell.recipe, a.cell.rate_rps, a.cell.seed))
        if b is not None and b.engine != a.engine:
            name = f"{a.engine.name} over {b.engine.name}".replace("-seed0", "")
            pairs.setdefault(name, []).append((a, b))
    for name, of_name in pairs.items():
        real = ratio_of([a.real.ttft_mean_s / b.real.ttft_mean_s for a, b in of_name])
        simulated = ratio_of([a.simulated.ttft_mean_s / b.simulated.ttft_mean_s for a, b in of_name])
        figures[name] = {"real": real.to_json(), "simulated": simulated.to_json()}
        print(f"{name}: real {_text(real)}, simulated {_text(simulated)}", flush=True)
        if not real.low <= 1.0 <= real.high:
            bounds[f"{name}: the same order"] = (simulated.median < 1.0) == (real.median < 1.0)
    return figures, bounds


def _text(found: Ratio) -> str:
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


if __name__ == "__main__":
    main()
