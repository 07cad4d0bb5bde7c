"""A server under attack: how long its streams stand still, and the table of all attacks."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.serving import Served
from support.stream_probe import Gaps, StreamProbe

WORST_GAP_S = 0.25
MIB = 1 << 20
_AFTER_S = WORST_GAP_S + 0.05  # what an attack has left behind counts, too
_NUM_STREAMS = 8
_NUM_FIRST = 20 * _NUM_STREAMS  # events before the first attack
_START_S = 60.0
_MAX_API_BYTES = 300 << 20
_NUM_TRIES = 3  # another process of the machine may hold up one


class Rows:
    """The table of a run, which is printed at its end."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = [
            ("attack", "result", "stream s", "health s", "noise s", "API MiB")
        ]

    def add(self, name: str, result: object, gaps: Gaps | None = None, peak_bytes: int | None = None) -> None:
        """Add an attack. ``gaps``, ``peak_bytes``: None = not measured."""
        times: tuple[str, ...] = ("-",) * 3
        if gaps is not None:
            times = tuple(f"{one:.3f}" for one in (gaps.stream_s, gaps.health_s, gaps.noise_s))
        peak = "-" if peak_bytes is None else f"{peak_bytes / MIB:.0f}"
        self.rows.append((name, str(result), *times, peak))

    def lines(self) -> Iterator[str]:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        for row in self.rows:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))


class Attacked:
    """A server with streams on it."""

    def __init__(self, served: Served, probe: StreamProbe, rows: Rows, group: Path | None = None) -> None:
        """``group``: its control group of memory, if it has one."""
        self.served = served
        self.group = group
        self._probe = probe
        self._rows = rows
        self._api = psutil.Process(served.process.pid)

    def check(self, name: str, attack: Callable[[], object]) -> None:
        """Run ``attack``, which returns its result, and judge its effect on the server."""
        for number in range(_NUM_TRIES):
            self._reset_peak()
            self._probe.read()
            result = attack()
            time.sleep(_AFTER_S)
            gaps, peak_bytes = self._probe.read(), self._peak_bytes()
            if max(gaps.stream_s, gaps.health_s) <= WORST_GAP_S or number == _NUM_TRIES - 1:
                break
        self._rows.add(name, result, gaps, peak_bytes)
        assert self.served.process.poll() is None, "the server has ended"
        assert not gaps.num_failed, gaps
        assert gaps.num_events, "no stream has run"
        assert gaps.stream_s <= WORST_GAP_S, gaps
        assert gaps.health_s <= WORST_GAP_S, gaps
        assert peak_bytes <= _MAX_API_BYTES, f"{peak_bytes / MIB:.0f} MiB"

    def _reset_peak(self) -> None:
        Path(f"/proc/{self._api.pid}/clear_refs").write_text("5")

    def _peak_bytes(self) -> int:
        status = Path(f"/proc/{self._api.pid}/status").read_text()
        (line,) = (one for one in status.splitlines() if one.startswith("VmHWM:"))
        return int(line.split()[1]) << 10

    def num_killed(self) -> int:
        """Processes of the group that the kernel has killed."""
        assert self.group is not None
        for name in ("memory.events", "memory.oom_control"):
            path = self.group / name
            if path.exists():
                counts = dict(line.split() for line in path.read_text().splitlines())
                return int(counts["oom_kill"])
        pytest.skip("this kernel does not count killed processes of a group")


@contextlib.contextmanager
def streams_on(served: Served, rows: Rows, group: Path | None = None) -> Iterator[Attacked]:
    """Start streams on a server, and wait until they run."""
    with StreamProbe(served.url, _NUM_STREAMS) as probe:
        num_events, deadline_s = 0, time.monotonic() + _START_S
        while num_events < _NUM_FIRST:
            assert time.monotonic() < deadline_s, "the streams do not run"
            time.sleep(0.05)
            num_events += probe.read().num_events
        yield Attacked(served, probe, rows, group)
