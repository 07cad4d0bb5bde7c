"""Measures cells: all strategies in turn, each against the cached run of its own round."""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from floors import Floors
from paired import Ratio, ratio_of

from cold.rig import CACHED, PLANNER, STRATEGIES, Rig, Slowness, Timing, slowness_of
from cold.simulated import Chunk, arrivals_s
from cold.waits import GroupWait
from cold.workload import Cell

AGAIN = "cached again"  # the control
SERIES = (CACHED, *STRATEGIES, PLANNER, AGAIN)
COLD = (*STRATEGIES, PLANNER)
ASSISTED_SERIES = (CACHED, "assisted", AGAIN)
MOMENTS: dict[str, Callable[[Timing], float]] = {
    "first_token": lambda timing: timing.first_s,
    "second_token": lambda timing: timing.second_s,
    "end_to_end": lambda timing: timing.end_s,
}
NUM_OUTPUT_TOKENS = 8
_NUM_PREFILLS = 3  # to find out how long the cached first token takes


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell, measured."""

    cell: Cell
    slowness: Slowness
    prefill_s: float
    link_bytes_per_s: float
    num_layer_groups: int
    median_s: dict[str, dict[str, float]]  # [moment][series]
    ratios: dict[str, dict[str, Ratio]]  # [moment][series], to the round's cached runs
    control: Ratio  # first token, cached over cached
    best_split: float  # first token over cached that bytes, arithmetic and link allow, computed
    waits: tuple[GroupWait, ...]  # of the assisted runs
    decided: dict[str, int] = field(default_factory=dict)  # number of the planner's choices

    @property
    def regret(self) -> float:
        """Of the planner's median first token against the best strategy's, as a share."""
        medians = self.median_s["first_token"]
        return medians[PLANNER] / min(medians[name] for name in STRATEGIES) - 1

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "cell": asdict(self.cell),
            "worker_slowdown": round(self.slowness.worker_slowdown, 2),
            "delta_over_base": round(self.slowness.ratio, 3),
            "prefill_ms": round(self.prefill_s * 1e3, 2),
            "link_mib_per_s": round(self.link_bytes_per_s / 2**20, 2),
            "layer_groups": self.num_layer_groups,
            "median_ms": {
                moment: {name: round(value * 1e3, 2) for name, value in by_name.items()}
                for moment, by_name in self.median_s.items()
            },
            "ratio_to_cached": {
                moment: {name: ratio.to_json() for name, ratio in by_name.items()}
                for moment, by_name in self.ratios.items()
            },
            "control": self.control.to_json(),
            "control_spread": round(self.control.spread, 4),
            "best_split": round(self.best_split, 3),
            "planner_regret": round(self.regret, 4) if self.decided else None,
            "planner_chose": self.decided,
            "waits": describe_waits(self.waits),
        }


def measure_cell(
    rig: Rig,
    cell: Cell,
    num_rounds: int,
    peak: Floors,
    series: Sequence[str] = SERIES,
    num_output_tokens: int = NUM_OUTPUT_TOKENS,
) -> CellResult:
    """All ``series`` of ``cell`` in turn, in reverse order in every other round.

    The first round is a warm-up, also for the planner's corrections, and does not count.
    ``peak``: limits of one core.
    """
    rig.set_up_free()
    rig.use(CACHED)
    prefill_s = cached_first_s(rig, cell.adapter, cell.prompt_tokens)
    slowness = slowness_of(rig, cell)
    link_bytes_per_s = rig.adapter_bytes(cell.adapter) / (cell.load_ratio * prefill_s)
    rig.set_up(link_bytes_per_s, slowness.worker_slowdown)
    rounds: list[dict[str, Timing]] = []
    for number in range(num_rounds + 1):
        order = series if number % 2 == 0 else series[::-1]
        timings = {name: _run(rig, cell, name, num_output_tokens) for name in order}
        if number:
            rounds.append(timings)
    return CellResult(
        cell=cell,
        slowness=slowness,
        prefill_s=prefill_s,
        link_bytes_per_s=link_bytes_per_s,
        num_layer_groups=rig.num_layer_groups(cell.adapter),
        median_s={moment: _medians(rounds, of) for moment, of in MOMENTS.items()},
        ratios={moment: _ratios(rounds, of) for moment, of in MOMENTS.items()},
        control=ratio_of([r[AGAIN].first_s / r[CACHED].first_s for r in rounds]),
        waits=tuple(itertools.chain.from_iterable(r["assisted"].waits for r in rounds)),
        best_split=_best_split(rig, cell, link_bytes_per_s, slowness, peak),
        decided=dict(Counter(r[PLANNER].decided for r in rounds if PLANNER in r)),
    )


def _best_split(rig: Rig, cell: Cell, link_bytes_per_s: float, slowness: Slowness, peak: Floors) -> float:
    """Of the first token over cached, if each delta takes as long as its bytes or its arithmetic."""
    model, tokens = rig.profile.model, cell.prompt_tokens
    groups = zip(rig.profile.subject.shape.groups, rig.rank_sums(cell.adapter), strict=True)
    floors_s = []
    for (_, in_features, columns), rank_sum in groups:
        shrink, expand = in_features * rank_sum, columns * cell.rank * (rank_sum > 0)
        multiply_s = 2e-9 * tokens * (shrink / peak.gflop_per_s + expand / peak.float32_gflop_per_s)
        read_s = 2e-9 * (shrink + expand) / peak.memory_gb_per_s
        floors_s.append(slowness.worker_slowdown * max(multiply_s, read_s))
    num_bytes = rig.adapter_bytes(cell.adapter)
    chunk = Chunk.of(model, num_bytes, range(tokens), floors_s)
    link = replace(model.link, bytes_per_s=link_bytes_per_s)
    arrival_s = arrivals_s(link, num_bytes, model.num_layers)
    return min(chunk.end_s(0.0, arrival_s), arrival_s[-1] + chunk.loaded_s) / chunk.loaded_s


def cached_first_s(rig: Rig, adapter: str, prompt_tokens: int) -> float:
    """Median time to the first token with the adapter on the device."""
    times = []
    for _ in range(_NUM_PREFILLS + 1):
        rig.prepare(adapter, is_cold=False)
        times.append(rig.serve(rig.prompt(prompt_tokens), adapter, 1).first_s)
    return statistics.median(times[1:])


def describe_waits(waits: Sequence[GroupWait]) -> dict[str, float | int]:
    """Microseconds per input group."""
    if not waits:
        return {"groups": 0}
    beyond = [wait.beyond_us for wait in waits]
    return {
        "groups": len(waits),
        "beyond_us_median": round(statistics.median(beyond), 1),
        "beyond_us_p95": round(percentile(beyond, 0.95), 1),
        "exposed_us_median": round(statistics.median(w.exposed_us for w in waits), 1),
        "worker_us_median": round(statistics.median(w.duration_us for w in waits), 1),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _run(rig: Rig, cell: Cell, name: str, num_output_tokens: int) -> Timing:
    """One request; its adapter is brought to where it has to be before."""
    rig.prepare(cell.adapter, is_cold=name in COLD)
    rig.use(name if name in COLD else CACHED)
    return rig.serve(rig.prompt(cell.prompt_tokens), cell.adapter, num_output_tokens)


def _medians(rounds: Sequence[Mapping[str, Timing]], of: Callable[[Timing], float]) -> dict[str, float]:
    return {name: statistics.median(of(r[name]) for r in rounds) for name in rounds[0]}


def _ratios(rounds: Sequence[Mapping[str, Timing]], of: Callable[[Timing], float]) -> dict[str, Ratio]:
    """Over the mean of both cached runs, which come first and last in a round."""
    return {
        name: ratio_of([of(r[name]) * 2 / (of(r[CACHED]) + of(r[AGAIN])) for r in rounds])
        for name in COLD
        if name in rounds[0]
    }


class Clock:
    """How long the cells that are left will take, judged by those that are done."""

    def __init__(self, cells: Sequence[Cell], rounds_of: Callable[[Cell], int] = lambda _: 1) -> None:
        self._left = [_weight(cell) * (1 + rounds_of(cell)) for cell in cells]
        self._done = 0.0
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the start of the first cell."""
        return time.monotonic() - self._start_s

    def left_s(self) -> float:
        """Of all cells that are left; 0 before the first is done."""
        return self.elapsed_s * sum(self._left) / self._done if self._done else 0.0

    def next_s(self) -> float:
        """Of the next cell; 0 before the first is done."""
        return self.elapsed_s * self._left[0] / self._done if self._done else 0.0

    def cell_done(self, text: str) -> None:
        """Print one line."""
        self._done += self._left.pop(0)
        print(f"{text} [{self.elapsed_s:.0f} s, about {self.left_s():.0f} s left]", flush=True)


def _weight(cell: Cell) -> float:
    """Prefills and loads of a round, in tokens; decoding counts as some, too."""
    loads = cell.load_ratio * 2 + max(0.0, cell.delta_ratio - 1)
    return cell.prompt_tokens * (len(SERIES) + loads) + 60 * len(SERIES)
