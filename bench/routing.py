"""Which router and placement serves best? All of it simulated: engines' cores on virtual time.

The results that LoRAServe and Toppings report of their clusters, row by row, and the bounds of
corun's own router (``routes/rows.py``). A load is 120 s of arrivals. The first 5 % do not count; a
request that has not started a minute after the last arrival counts with that time. Compared runs
get the same requests. A router that sustains k times the load of another is judged at two fixed
rates: the other misses its SLO at r, and this one holds it at k r.

Results of a run are stored under a digest of the product's code, so an interrupted command
continues. The last line is JSON.

    python bench/routing.py [--full] [--only "LoRAServe 17" ...] [--seeds 3] [--seconds 120]
        [--traces DIR] [--processes 2] [--results DIR]
    python bench/routing.py --capacities [PADDED_P2C_RPS ...]   what the fixed rates come from
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from corun.runtime.errors import ConfigError
from corun.runtime.sim.draw_inputs import trace_directory
from corun.runtime.sim.planning import Slo, capacities
from corun.runtime.sim.study import Study
from paired import report
from replays.real import product_digest
from routes import rows
from routes.bounds import PERCENTILE, Outcomes
from routes.settings import Setting

_RESULTS = Path(__file__).with_name("results") / "routing"
_RUN_S_PER_SERVER = 2.0  # on one core, for 120 s; for what is said before anything was run
_START_RPS = 4.0  # for each server: where a search begins


def main() -> None:
    """Run, judge and print."""
    options = _options()
    try:
        folder = options.results / product_digest()
        folder.mkdir(parents=True, exist_ok=True)
        with Study(folder, options.processes, _say) as study:
            if options.capacities is not None:
                _search(options, study)
            else:
                _judge(options, study)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"routing.py: {error}\n")
        sys.exit(2)


def _judge(options: argparse.Namespace, study: Study) -> None:
    chosen = _chosen(options)
    settings = list(dict.fromkeys(one for row in chosen for bound in row.bounds for one in bound.settings))
    num_servers = sum(setting.num_servers for setting in settings) * options.seeds
    minutes = num_servers * _RUN_S_PER_SERVER * options.seconds / 120 / options.processes / 60
    _say(f"{len(settings) * options.seeds} runs, about {minutes:.0f} min (simulated)")
    began_s = time.monotonic()
    outcomes = _outcomes(options, study, settings)
    bounds, figures = {}, {}
    for row in chosen:
        print(f"\n{row.name} (simulated)")
        for bound in row.bounds:
            for verdict in bound.verdicts(outcomes):
                name = f"{row.name}: {verdict.text}"
                bounds[name], figures[name] = verdict.is_held, verdict.figures
                print(f"{'holds' if verdict.is_held else 'FAILS'}  {verdict.text}")
                print(f"       {verdict.figures}")
    workload = {"seeds": options.seeds, "seconds": options.seconds, "full": options.full}
    took_min = round((time.monotonic() - began_s) / 60, 1)
    report("routing", workload, {"simulated": figures, "took_min": took_min}, dict(bounds))


def _outcomes(options: argparse.Namespace, study: Study, settings: Iterable[Setting]) -> Outcomes:
    traces = trace_directory(options.traces)
    runs = {
        setting: setting.runs(options.seeds, options.seconds, rows.POINTS, traces) for setting in settings
    }
    found = study.run(one for of_setting in runs.values() for one in of_setting)
    return {setting: [found[one] for one in of_setting] for setting, of_setting in runs.items()}


def _search(options: argparse.Namespace, study: Study) -> None:
    """Find the largest rate within the SLO for each setting that a fixed rate comes from."""
    wanted = rows.capacities()
    unknown = [name for name in options.capacities if name not in wanted]
    if unknown:
        raise ConfigError(f"--capacities has {unknown[0]!r}, must be of: {', '.join(wanted)}")
    traces = trace_directory(options.traces)
    for name in options.capacities or wanted:
        setting = wanted[name]
        setups = {name: setting.runs(options.seeds, options.seconds, rows.POINTS, traces)}
        slo = Slo(rows.SLO_S[setting.machine], PERCENTILE)
        found = capacities(study, setups, slo, _START_RPS)[name]
        rates = ", ".join(f"{rate:g}" for rate in found.rates_rps)
        _say(f"{name}: {found.median_rps:g} requests/s, by seed {rates} (simulated)")


def _chosen(options: argparse.Namespace) -> Sequence[rows.Row]:
    """Raises ``ConfigError`` for a name that there is not."""
    named = {row.name: row for row in rows.rows()}
    if options.only is None:
        return [row for row in named.values() if options.full or not row.is_full]
    for name in options.only:
        if name not in named:
            raise ConfigError(f"--only has {name!r}, must be of: {', '.join(named)}")
    return [named[name] for name in options.only]


def _say(text: str) -> None:
    print(text, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="also rows with 8 and 60 servers")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows by name")
    parser.add_argument(
        "--capacities", nargs="*", metavar="NAME", help="search these capacities; default: all"
    )
    parser.add_argument("--seeds", type=_number, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of arrivals")
    parser.add_argument("--traces", metavar="DIR", help="directory of trace files (default: CORUN_TRACES)")
    parser.add_argument("--processes", type=_number, default=os.cpu_count() or 2, help="number in parallel")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="directory of stored runs")
    return parser.parse_args()


def _number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, must be at least 1")
    return value


if __name__ == "__main__":
    main()
