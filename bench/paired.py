"""Paired measurements and the JSON line that every benchmark prints last."""

import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

MAX_CONTROL_SPREAD = 0.05


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two things measured in turn: median over pairs, with a 90 % interval."""

    median: float
    low: float
    high: float
    num_pairs: int

    @property
    def spread(self) -> float:
        """Width of the interval, relative to the median."""
        return (self.high - self.low) / self.median

    def to_json(self) -> dict[str, float]:
        """For the report."""
        values = {"median": self.median, "low": self.low, "high": self.high}
        return {name: round(value, 4) for name, value in values.items()} | {"pairs": self.num_pairs}


def ratio_of(values: Sequence[float]) -> Ratio:
    """Median with a distribution-free interval that covers the true median with 90 %."""
    low, high = median_interval(values, 0.9)
    return Ratio(statistics.median(values), low, high, len(values))


def median_interval(values: Sequence[float], coverage: float) -> tuple[float, float]:
    """Interval of the median from order statistics, interpolated to the coverage asked for.

    Order statistics alone cover in steps (seven values: 98 % or 88 %); between two steps the
    ends are interpolated. Source: Hettmansperger and Sheather, Statistics & Probability Letters
    1986. With too few values it is the whole range.
    """
    ordered = sorted(values)
    n = len(ordered)
    depth = 1  # from which value on, counted from either end
    while depth < n // 2 and _coverage(n, depth + 1) >= coverage:
        depth += 1
    wide, narrow = _coverage(n, depth), _coverage(n, depth + 1)
    if wide <= coverage or n < 3:
        return ordered[depth - 1], ordered[n - depth]
    excess = (wide - coverage) / (wide - narrow)
    weight = (n - depth) * excess / (depth + (n - 2 * depth) * excess)
    low = (1 - weight) * ordered[depth - 1] + weight * ordered[depth]
    high = (1 - weight) * ordered[n - depth] + weight * ordered[n - depth - 1]
    return low, high


def _coverage(n: int, depth: int) -> float:
    """P(the median lies between the ``depth``-th smallest and largest of n values)."""
    tail = sum(math.comb(n, i) for i in range(depth)) / float(2**n)
    return max(0.0, 1 - 2 * tail)


def compare(
    a: Callable[[], float], b: Callable[[], float], num_pairs: int, *, progress: str = ""
) -> tuple[Ratio, list[float], list[float]]:
    """Measure A and B in turn, A B B A A B ..., and return the ratio A / B with both lists."""
    values: tuple[list[float], list[float]] = ([], [])
    for pair in range(num_pairs):
        for index in (0, 1) if pair % 2 == 0 else (1, 0):
            values[index].append((a, b)[index]())
        if progress:
            ratio = values[0][-1] / values[1][-1]
            print(f"{progress}: pair {pair + 1} of {num_pairs}, ratio {ratio:.3f}", flush=True)
    ratios = [x / y for x, y in zip(*values, strict=True)]
    return ratio_of(ratios), values[0], values[1]


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def setup(root: Path | None = None) -> dict[str, Any]:
    """Machine, versions and the commit of a checkout; None = this one."""
    root = root or Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "commit": commit or "unknown",
        "cpu": cpu,
        "cores": psutil.cpu_count(),
        "device": device,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def report(
    name: str, workload: dict[str, Any], figures: dict[str, Any], bounds: dict[str, bool | None]
) -> None:
    """Print the JSON line; a bound that could not be judged is None (inconclusive)."""
    line = {"benchmark": name, "setup": setup(), "workload": workload, "figures": figures, "pass": bounds}
    print(json.dumps(line), flush=True)
