"""Results of a study: a table, a file of figures, pictures."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from ..errors import ConfigError, ResourceError
from . import pictures
from .cluster_log import ClusterFigures
from .figures import Figures
from .study import RunOutcome, SimulatedRun
from .variants import spread_of

RESULT_NAME = "result.json"
RUNS_NAME = "runs"
_Figures = TypeVar("_Figures", Figures, ClusterFigures)
_PICTURES = tuple(f"{name}.png" for name in ("first_tokens", "memory", "parts", "load", "servers"))


@dataclass(frozen=True, slots=True)
class Cell:
    """A variant at a load; ``setups`` differ in their seeds."""

    variant: str  # "" = no options are compared
    setups: tuple[SimulatedRun, ...]

    @property
    def rate_rps(self) -> float:
        """Requests/s; 0 = the own load of a log of requests."""
        return self.setups[0].workload.rps or 0.0

    @property
    def load(self) -> str:
        return f"{self.rate_rps:g} requests/s" if self.rate_rps else "its own load"


@dataclass(frozen=True, slots=True)
class Results:
    """All cells with the outcomes of their runs."""

    cells: Sequence[Cell]
    outcomes: Mapping[SimulatedRun, RunOutcome]
    workload: str  # its name
    percentile: float  # of first tokens
    slo_s: float | None

    def of(self, cell: Cell) -> list[RunOutcome]:
        return [self.outcomes[setup] for setup in cell.setups]

    def ttft_percentiles_s(self, cell: Cell) -> list[float]:
        """By seed."""
        return [percentile_s(one, self.percentile) for one in self.of(cell)]

    def ttft_percentile_s(self, cell: Cell) -> float:
        """The median over seeds, as for all figures of a cell."""
        return spread_of(self.ttft_percentiles_s(cell))[0]

    def slo_share(self, cell: Cell) -> float:
        """The share of requests with a first token within the SLO: the median over seeds."""
        slo_s = self.slo_s
        assert slo_s is not None
        shares = [float((ttft_s(one) <= slo_s).mean()) for one in self.of(cell)]
        return spread_of(shares)[0]


def percentile_s(outcome: RunOutcome, percentile: float) -> float:
    """A percentile of a run's first tokens, interpolated linearly between the two nearest."""
    return float(np.percentile(ttft_s(outcome), percentile))


def ttft_s(outcome: RunOutcome) -> pictures.Seconds:
    """First tokens of all requests; to the cut of the run for requests without one."""
    return np.array([one.ttft_s for one in outcome.requests])


def missed_by_one(results: Results) -> Iterator[str]:
    """Yield a line for each run that would hold the SLO without its slowest request."""
    slo_s = results.slo_s
    if slo_s is None:
        return
    for setup, outcome in results.outcomes.items():
        times_s = np.sort(ttft_s(outcome))
        if len(times_s) < 2:
            continue
        all_s, others_s = (
            float(np.percentile(some_s, results.percentile)) for some_s in (times_s, times_s[:-1])
        )
        if others_s <= slo_s < all_s:
            yield (
                f"{setup.name}: P{results.percentile:g} misses {slo_s:g} s by one request alone, "
                f"which took {times_s[-1]:.3g} s; use more requests"
            )


def cut_short(results: Results) -> Iterator[str]:
    """Yield a line if some runs were cut before all their requests had ended."""
    if any(outcome.figures.num_unfinished for outcome in results.outcomes.values()):
        yield (
            f"Runs were cut {results.cells[0].setups[0].horizon_s:g} s after their last arrival "
            "(--horizon-s); requests that had not ended are unfinished and count to the cut."
        )


# Columns, each with the format of its median over seeds.
_COLUMNS: Mapping[str, tuple[Callable[[Figures], float], str]] = {
    "mean": (lambda one: one.ttft_mean_s, ".3g"),
    "P50": (lambda one: one.ttft_p50_s, ".3g"),
    "P99": (lambda one: one.ttft_p99_s, ".3g"),
    "TPOT ms": (lambda one: 1e3 * one.tpot_mean_s, ".1f"),
    "tokens/s": (lambda one: one.tokens_per_s, ".0f"),
    "prefix hits": (lambda one: one.hit_share, ".0%"),
    "evicted": (lambda one: one.num_evictions, ".0f"),
    "GB in": (lambda one: one.link_bytes / 1e9, ".1f"),
    "preempted": (lambda one: one.num_preempted, ".0f"),
    "refused": (lambda one: one.num_refused, ".0f"),
    "unfinished": (lambda one: one.num_unfinished, ".0f"),
}

_CLUSTER_COLUMNS: Mapping[str, tuple[Callable[[ClusterFigures], float], str]] = {
    "busiest/mean": (lambda one: one.largest_over_mean_load, ".2f"),
    "most files": (lambda one: one.most_files, ".0f"),
    "GB fetched": (lambda one: one.fetched_bytes / 1e9, ".1f"),
    "moved": (lambda one: one.num_moved, ".0f"),
}


def table(results: Results) -> Iterator[str]:
    """Yield aligned lines; figures without a unit are seconds to first tokens.

    Every figure is the median over seeds.
    """
    head = ["" if not any(cell.variant for cell in results.cells) else "variant", "req/s"]
    head.append(f"P{results.percentile:g}")
    head += [f"within {results.slo_s:g} s"] if results.slo_s is not None else []
    has_servers = any(one.cluster is not None for one in results.outcomes.values())
    rows = [[*head, *_COLUMNS, *(_CLUSTER_COLUMNS if has_servers else ())]]
    for cell in results.cells:
        row = [cell.variant, f"{cell.rate_rps:g}" if cell.rate_rps else "own"]
        row.append(f"{results.ttft_percentile_s(cell):.3g}")
        row += [f"{results.slo_share(cell):.1%}"] if results.slo_s is not None else []
        outcomes = results.of(cell)
        row += _medians(_COLUMNS, [one.figures for one in outcomes])
        if has_servers:
            of_servers = [one.cluster.figures for one in outcomes if one.cluster is not None]
            row += _medians(_CLUSTER_COLUMNS, of_servers)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others] if first.strip() else others).rstrip()


def _medians(
    columns: Mapping[str, tuple[Callable[[_Figures], float], str]], figures: Sequence[_Figures]
) -> list[str]:
    """One cell of each column; empty ones where there are no figures."""
    if not figures:
        return [""] * len(columns)
    return [
        format(spread_of([figure(one) for one in figures])[0], style) for figure, style in columns.values()
    ]


def foot(results: Results) -> str:
    """What was simulated: for the end of a table and every picture."""
    setups = results.cells[0].setups
    first, last = setups[0].workload.seed, setups[-1].workload.seed
    seeds = f"seed {first}" if first == last else f"seeds {first} to {last}"
    trace = "" if results.outcomes[setups[0]].has_trace else ", lengths of a table for its trace"
    num_requests = results.outcomes[setups[0]].num_requests
    return (
        f"Simulated, not measured. Machine: {setups[0].machine.name}{_servers(results)}. Workload: "
        f"{results.workload}{trace}, {num_requests} requests a run, {seeds}."
    )


def _servers(results: Results) -> str:
    """The number of servers and their router, if they are the same for all cells."""
    clusters = {cell.setups[0].cluster for cell in results.cells}
    texts = {
        "one server" if one is None else f"servers: {len(one.servers)}, router {one.router}"
        for one in clusters
    }
    if clusters == {None}:
        return ""
    if len(texts) == 1:
        return f" ({texts.pop()})"
    numbers = sorted({1 if one is None else len(one.servers) for one in clusters})
    return f" (servers: {', '.join(map(str, numbers))})"


def write_results(folder: Path, results: Results, *, may_draw: bool) -> list[Path]:
    """Write figures and pictures; return their paths. Raises ``ResourceError``."""
    path = folder / RESULT_NAME
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(to_json(results)), indent=1))
        return [path, *(draw(folder, results) if may_draw else ())]
    except OSError as error:
        raise ResourceError(f"{folder} cannot be written: {error}") from error


def to_json(results: Results) -> dict[str, Any]:
    """All figures, run by run."""
    return {
        "simulated": True,
        "of": foot(results),
        "percentile": results.percentile,
        "slo_ttft_s": results.slo_s,
        "cells": [
            {
                "variant": cell.variant,
                "rate_rps": cell.rate_rps,
                "runs": [
                    {
                        "seed": setup.workload.seed,
                        "ttft_percentile_s": percentile_s(outcome, results.percentile),
                        "figures": asdict(outcome.figures),
                        **_of_servers(outcome),
                    }
                    for setup, outcome in zip(cell.setups, results.of(cell), strict=True)
                ],
            }
            for cell in results.cells
        ],
    }


def _of_servers(outcome: RunOutcome) -> dict[str, Any]:
    if outcome.cluster is None:
        return {}
    return {"servers": asdict(outcome.cluster.figures)}


def prepared_folder(path: Path, digest: str, *, is_forced: bool) -> Path:
    """Make the folder; an interrupted run of the same study in it is continued.

    Raises ``ConfigError`` if it holds another study's results, or cannot be written.
    """
    mark = path / "study"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(path.iterdir()) and not is_forced:
            raise ConfigError(f"--out {path} holds other files; name another folder, or --force")
        if mark.exists() and mark.read_text() != digest:
            if not is_forced:
                raise ConfigError(
                    f"--out {path} holds the results of another study; name another folder, or --force"
                )
            for name in (RESULT_NAME, *_PICTURES):  # the new study may not write all of them
                (path / name).unlink(missing_ok=True)
        mark.write_text(digest)
        (path / RUNS_NAME).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}") from error
    return path


def draw(folder: Path, results: Results) -> list[Path]:
    """Draw all pictures for which there are results."""
    at_foot = foot(results)
    loads = sorted({cell.rate_rps for cell in results.cells})
    # At the largest load, where policies differ most.
    shown = [cell for cell in results.cells if cell.rate_rps == loads[-1]]
    *paths, load_path, servers_path = (folder / name for name in _PICTURES)
    curves = {_label(cell): _first_tokens(results, cell) for cell in shown}
    title = _title_of_times(curves, results.percentile, shown[0].load)
    pictures.draw_first_tokens(curves, results.percentile, results.slo_s, title, at_foot, paths[0])
    _draw_memory(results, shown[0], at_foot, paths[1])
    _draw_parts(results, shown[0], at_foot, paths[2])
    if len(loads) > 1:
        paths.append(load_path)
        _draw_loads(results, at_foot, load_path)
    if results.of(shown[0])[0].cluster is not None:
        paths.append(servers_path)
        _draw_servers(results, shown[0], at_foot, servers_path)
    return paths


def _label(cell: Cell) -> str:
    return cell.variant or cell.load


def _first_tokens(results: Results, cell: Cell) -> pictures.FirstTokenCurve:
    """A curve of percentiles, each the median over seeds as in the table."""
    shares = np.array([np.percentile(ttft_s(one), pictures.SHARES) for one in results.of(cell)])
    return pictures.FirstTokenCurve(np.median(shares, axis=0), results.ttft_percentile_s(cell))


def _title_of_times(curves: Mapping[str, pictures.FirstTokenCurve], percentile: float, load: str) -> str:
    marks_s = {name: curve.at_percentile_s for name, curve in curves.items()}
    best, worst = min(marks_s, key=marks_s.__getitem__), max(marks_s, key=marks_s.__getitem__)
    text = f"At {load} {percentile:g} % of first tokens come within {marks_s[best]:.3g} s"
    return text if best == worst else f"{text} with {best}, {marks_s[worst]:.3g} s with {worst}"


def _draw_memory(results: Results, cell: Cell, at_foot: str, path: Path) -> None:
    memory = results.of(cell)[0].memory
    shown = {kind: values for kind, values in memory.num_bytes.items() if kind != "reserved"}
    total = sum(sum(values) for values in shown.values())
    share = {kind: sum(values) / total for kind, values in shown.items()}
    most = max(share, key=share.__getitem__)
    name = pictures.in_words(most)
    title = f"{share[most]:.0%} of the memory is {name}, {share['adapters']:.0%} adapters ({_label(cell)})"
    over_time = pictures.MemoryOverTime(memory.time_s, shown)
    pictures.draw_memory(over_time, title, at_foot, path)


def _draw_servers(results: Results, cell: Cell, at_foot: str, path: Path) -> None:
    """Loads over time, of the first seed."""
    cluster = results.of(cell)[0].cluster
    assert cluster is not None
    title = (
        f"The busiest of {len(cluster.loads.num_requests)} servers has "
        f"{cluster.figures.largest_over_mean_load:.2f} times the mean load ({_label(cell)})"
    )
    loads = pictures.LoadsOverTime(cluster.loads.time_s, cluster.loads.num_requests)
    pictures.draw_server_loads(loads, title, at_foot, path)


def _draw_parts(results: Results, cell: Cell, at_foot: str, path: Path) -> None:
    """Mean parts of the time to first tokens, by rank."""
    of_rank = defaultdict[int, list[Mapping[str, float]]](list)
    for outcome in results.of(cell):
        for request in outcome.requests:
            of_rank[request.rank].append(request.parts_s)
    parts = {
        str(rank): {
            name: statistics.fmean(one.get(name, 0.0) for one in rows)
            for name in sorted({name for one in rows for name in one})
        }
        for rank, rows in sorted(of_rank.items())
    }
    means = {rank: sum(one.values()) for rank, one in parts.items()}
    slowest = max(means, key=means.__getitem__)
    part = max(parts[slowest], key=parts[slowest].__getitem__, default="nothing")
    title = (
        f"Requests of rank {slowest} wait longest, {means[slowest]:.3g} s, most of it for "
        f"{pictures.in_words(part)} ({_label(cell)})"
    )
    pictures.draw_parts(parts, title, at_foot, path)


def _draw_loads(results: Results, at_foot: str, path: Path) -> None:
    curves = defaultdict[str, list[pictures.LoadPoint]](list)
    for cell in results.cells:
        spread = spread_of(results.ttft_percentiles_s(cell))
        curves[cell.variant or "as configured"].append(pictures.LoadPoint(cell.rate_rps, *spread))
    title = f"P{results.percentile:g} of first tokens grows with the load"
    if results.slo_s is not None:
        held = {name: _held_rps(curve, results.slo_s) for name, curve in curves.items()}
        title = f"P{results.percentile:g} stays within {results.slo_s:g} s " + ", ".join(
            f"up to {rate_rps:g} requests/s ({name})" if rate_rps else f"at no load ({name})"
            for name, rate_rps in held.items()
        )
    pictures.draw_load_curve(curves, results.percentile, results.slo_s, title, at_foot, path)


def _held_rps(curve: Sequence[pictures.LoadPoint], slo_s: float) -> float:
    """The largest load up to which the SLO holds; 0 = at none."""
    held = 0.0
    for point in curve:
        if point.median_s > slo_s:
            break
        held = point.rate_rps
    return held
