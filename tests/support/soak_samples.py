"""What a server's processes hold over hours, and whether it and the first tokens stay the same."""

import contextlib
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from .residue import named_segments

_MIB = 1 << 20
_ADAPTER_BYTES = re.compile(r'^corun:memory_bytes\{(?=[^}]*"host")[^}]*"adapters"[^}]*\} (\S+)', re.MULTILINE)
# A child process: it answers each line on stdin with the seconds of one plain read of 64 MiB, which
# is more than the caches of processors hold.
READ_PROBE = """
import sys, time
data = b"x" * (64 << 20)
for line in sys.stdin:
    began_s = time.perf_counter()
    data.count(b"y")
    print(time.perf_counter() - began_s, flush=True)
"""
# Highest growth of all processes together, between warm-up and the end. In an hour, that is 50
# minutes with 9,000 changes of adapters and 18,000 requests: a leak of 1 KiB for each change is 9
# MiB, and one of a descriptor for every thousand changes is 9 descriptors. Allocators move less.
# Descriptors include those of open connections. Which adapters are resident follows from requests,
# and their ranks differ, so shared memory counts without the bytes of adapters in the metrics.
MAX_GROWTH = {
    "private MiB": 8.0,
    "resident MiB": 12.0,
    "unaccounted shared MiB": 1.0,
    "segments": 0.5,
    "descriptors": 4.0,
    "threads": 0.5,
}
MAX_FIRST_TOKEN_RATIO = 1.1


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    private_mib: float  # of no file and not shared, also where it is swapped out
    resident_mib: float  # with the pages of files and all that it shares
    proportional_mib: float  # the same with its part of what it shares (PSS)
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """What all processes of a server hold at a time of the monotonic clock."""

    at_s: float
    processes: Mapping[str, Held]
    segments: int  # of shared memory: those that are open, and those with a name in /dev/shm
    shared_mib: float  # the memory that they have
    adapters_mib: float  # of it, by the server's metrics

    @property
    def unaccounted_shared_mib(self) -> float:
        """Shared memory that holds no adapter."""
        return self.shared_mib - self.adapters_mib

    def total(self, what: str) -> float:
        """The figure that ``MAX_GROWTH`` limits."""
        field = what.lower().replace(" ", "_")
        if hasattr(self, field):
            return float(getattr(self, field))
        return float(sum(getattr(one, field) for one in self.processes.values()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def take_sample(processes: Mapping[str, psutil.Process], metrics: str) -> Sample:
    """Sample these processes, by names for them. Raises ``OSError`` if one has ended.

    ``metrics``: the answer of ``/metrics``.
    """
    segments = _segments([process.pid for process in processes.values()])
    return Sample(
        at_s=time.monotonic(),
        processes={name: _held(process.pid) for name, process in processes.items()},
        segments=len(segments),
        shared_mib=sum(segments.values()) / _MIB,
        adapters_mib=sum(map(float, _ADAPTER_BYTES.findall(metrics))) / _MIB,
    )


def _held(pid: int) -> Held:
    root = Path(f"/proc/{pid}")
    status = _numbers(root / "status")
    return Held(
        private_mib=(status["RssAnon"] + status["VmSwap"]) / 1024,
        resident_mib=status["VmRSS"] / 1024,
        proportional_mib=_numbers(root / "smaps_rollup")["Pss"] / 1024,
        descriptors=len(list((root / "fd").iterdir())),
        threads=status["Threads"],
    )


def _numbers(path: Path) -> dict[str, int]:
    """Fields of a file of /proc whose value is a number, in KiB where it has a unit."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0][:-1]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _segments(pids: Sequence[int]) -> dict[tuple[int, int], int]:
    """Bytes of shared memory that these processes have open or have given a name, by inode."""
    found = {}
    paths = [Path("/dev/shm") / name for name in named_segments(*pids)]
    for pid in pids:
        paths += Path(f"/proc/{pid}/fd").iterdir()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            name = str(path.readlink()) if path.is_symlink() else str(path)
            if name.startswith(("/dev/shm/", "/memfd:corun")):
                status = path.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


@dataclass(frozen=True)
class Row:
    """A figure at the end of warm-up and at the end, and how much it may change."""

    what: str
    first: float
    last: float
    change: float
    limit: float

    @property
    def is_met(self) -> bool:
        """Whether it is within its limit."""
        return self.change <= self.limit


def growth_rows(samples: Sequence[Sample]) -> list[Row]:
    """The growth of each figure of ``MAX_GROWTH`` in samples after warm-up.

    It is the Theil-Sen slope times the duration: no single sample moves it, and what was taken once
    counts by its share of the time.
    """
    times_s = [sample.at_s for sample in samples]
    rows = []
    for what, limit in MAX_GROWTH.items():
        values = [sample.total(what) for sample in samples]
        tenth = max(1, len(values) // 10)
        first, last = (statistics.median(part) for part in (values[:tenth], values[-tenth:]))
        growth = theil_sen(times_s, values) * (times_s[-1] - times_s[0])
        rows.append(Row(what, first, last, growth, limit))
    return rows


def theil_sen(times_s: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between all pairs, in units of ``values`` a second."""
    earlier, later = np.triu_indices(len(values), k=1)
    times, heights = np.asarray(times_s), np.asarray(values)
    slopes = (heights[later] - heights[earlier]) / (times[later] - times[earlier])
    return float(np.median(slopes))


class Relative:
    """Times of first tokens by the plain read of the same minute."""

    def __init__(
        self, first_tokens: Sequence[tuple[float, float]], probes: Sequence[tuple[float, float]]
    ) -> None:
        """Both: when on the monotonic clock, and the seconds that it took."""
        by_minute: dict[int, list[float]] = defaultdict(list)
        for at_s, took_s in probes:
            by_minute[int(at_s // 60)].append(took_s)
        reads_s = {minute: statistics.median(took) for minute, took in by_minute.items()}
        self._values = [
            (at_s, took_s / reads_s[int(at_s // 60)])
            for at_s, took_s in first_tokens
            if int(at_s // 60) in reads_s
        ]

    def p95(self, from_s: float, to_s: float) -> float:
        """The 95th percentile of the first tokens between two times, in plain reads."""
        return p95([value for at_s, value in self._values if from_s <= at_s < to_s])

    def row(self, from_s: float, to_s: float, window_s: float) -> Row:
        """The last window against the first one."""
        first, last = self.p95(from_s, from_s + window_s), self.p95(to_s - window_s, to_s)
        return Row("P95 first token, reads", first, last, last / first, MAX_FIRST_TOKEN_RATIO)


def p95(values: Sequence[float]) -> float:
    """The 95th percentile; NaN of none."""
    return float(np.percentile(values, 95)) if values else float("nan")
