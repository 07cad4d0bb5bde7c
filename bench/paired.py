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
    """Median and the narrowest symmetric order-statistic interval that covers it with 90 %."""
    ordered = sorted(values)
    n = len(ordered)
    cut = 0
    while cut + 1 < n / 2 and 1 - 2 * _binomial_tail(n, cut + 1) >= 0.9:
        cut += 1
    return Ratio(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut], n)


def _binomial_tail(n: int, k: int) -> float:
    """P(at most k of n fair coins)."""
    return sum(math.comb(n, i) for i in range(k + 1)) / float(2**n)


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


def setup() -> dict[str, Any]:
    """Machine, versions and commit."""
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.processor(),
    )  # fmt: skip
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
    line = {"benchmark": name, "setup": setup(), "workload": workload, "figures": figures,
            "pass": bounds}  # fmt: skip
    print(json.dumps(line), flush=True)
