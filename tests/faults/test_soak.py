"""An hour of adapters that come and go and of clients that leave: nothing grows or slows down.

A machine changes its speed within an hour. So the server then takes turns, minute by minute, with
another that has just been started and warmed up.
"""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.processes import line_of, program
from support.residue import named_segments
from support.serving import ANSWER_TIMEOUT_S, Served
from support.soak_load import Load, SoakLoad
from support.soak_samples import (
    MAX_FIRST_TOKEN_RATIO,
    READ_PROBE,
    Relative,
    Row,
    Sample,
    growth_rows,
    p95,
    take_sample,
)

LOAD = Load()
WARM_UP_S = 600.0  # at most a sixth of the time; also that of the first and the last first tokens
SAMPLE_EVERY_S = 5.0
TURN_S = 60.0
EXIT_TIMEOUT_S = 60.0
# Less memory than the adapters need, so that they are loaded and evicted all the time.
OPTIONS = """
    --device cpu --memory-gib 0.0625 --host-bytes 32MiB --allow-runtime-lora-updating
""".split()


class Soak:
    """One server with its load, and what was seen of both."""

    def __init__(self, served: Served, load: SoakLoad, minutes: float) -> None:
        self.samples: list[Sample] = []
        self.probes: list[tuple[float, float]] = []  # when, seconds
        self.load = load
        self._processes = {_name(process): process for process in served.processes}
        self._url = served.url
        self._began_s = time.monotonic()
        self._end_s = self._began_s + 60 * minutes
        self.window_s = min(WARM_UP_S, 10 * minutes)

    async def run(self, say: Callable[[str], None], record: Path | None) -> None:
        """Load the server until the end, sample it, and report each minute."""
        with program(READ_PROBE) as probe:
            self._read(probe)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.load.run(self._url, self._end_s))
                group.create_task(self._every(SAMPLE_EVERY_S, lambda: self._sample(record)))
                group.create_task(self._every(1.0, lambda: self._read(probe)))
                group.create_task(self._every(60.0, lambda: say(self._progress())))

    async def _every(self, interval_s: float, work: Callable[[], None]) -> None:
        while time.monotonic() + interval_s < self._end_s:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(work)

    def _sample(self, record: Path | None) -> None:
        metrics = httpx.get(self._url + "/metrics", timeout=ANSWER_TIMEOUT_S).text
        self.samples.append(take_sample(self._processes, metrics))
        if record is not None:
            now_s = time.monotonic()
            more = {"p95_s": self._p95_s(now_s - 60, now_s), "read_s": self.probes[-1][1]}
            with record.open("a") as file:
                file.write(json.dumps(self.samples[-1].to_json() | more) + "\n")

    def _read(self, probe: Any) -> None:
        probe.stdin.write("\n")
        probe.stdin.flush()
        self.probes.append((time.monotonic(), float(line_of(probe))))

    def _p95_s(self, from_s: float, to_s: float) -> float:
        first_tokens = self.load.tally.first_tokens
        return p95([took_s for at_s, took_s in first_tokens if from_s <= at_s < to_s])

    def _progress(self) -> str:
        now_s, tally, last = time.monotonic(), self.load.tally, self.samples[-1]
        counts = tally.counts
        return (
            f"{(self._end_s - now_s) / 60:.0f} min left: {counts['request']} requests, "
            f"{counts['left']} left by their clients, {counts['reload']} reloads, "
            f"P95 first token {1e3 * self._p95_s(now_s - 60, now_s):.1f} ms, "
            f"read {1e3 * self.probes[-1][1]:.1f} ms, "
            f"private {last.total('private MiB'):.1f} MiB, "
            f"resident {last.total('resident MiB'):.1f} MiB, {len(tally.errors)} errors"
        )

    def rows(self) -> list[Row]:
        """What is judged, after warm-up."""
        from_s = self._began_s + self.window_s
        relative = Relative(self.load.tally.first_tokens, self.probes)
        rows = growth_rows([sample for sample in self.samples if sample.at_s >= from_s])
        return [*rows, relative.row(from_s, self._end_s, self.window_s)]

    def lines(self) -> Iterator[str]:
        yield f"{'after warm-up':<24} {'first':>9} {'last':>9} {'change':>9} {'at most':>9}"
        for row in self.rows():
            figures = (row.first, row.last, row.change, row.limit)
            numbers = " ".join(f"{figure:9.2f}" for figure in figures)
            yield f"{row.what:<24} {numbers}{'' if row.is_met else '  exceeded'}"
        first, last = self.samples[0].processes, self.samples[-1].processes
        for name, held in last.items():
            yield (
                f"{name}: private {first[name].private_mib:.1f} to {held.private_mib:.1f} MiB, "
                f"PSS {held.proportional_mib:.1f} MiB, {held.descriptors} descriptors, "
                f"{held.threads} threads"
            )
        yield ", ".join(f"{number} x {what}" for what, number in self.load.tally.counts.items())
        yield from self.load.tally.errors[:20]


async def _take_turns(
    aged: tuple[str, SoakLoad], fresh: tuple[str, SoakLoad], warm_up_s: float, say: Callable[[str], None]
) -> Row:
    """Compare first tokens of two servers (URL, load): turns of ABBA, as long as warm-up each."""
    await fresh[1].run(fresh[0], time.monotonic() + warm_up_s)
    starts = [len(load.tally.first_tokens) for _, load in (aged, fresh)]
    for turn in (aged, fresh, fresh, aged) * max(1, round(warm_up_s / (2 * TURN_S))):
        url, load = turn
        began = len(load.tally.first_tokens)
        await load.run(url, time.monotonic() + min(TURN_S, warm_up_s))
        took_s = p95([took for _, took in load.tally.first_tokens[began:]])
        say(f"{'aged' if turn is aged else 'fresh'}: P95 first token {1e3 * took_s:.1f} ms")
    last, first = (
        1e3 * p95([took for _, took in load.tally.first_tokens[start:]])
        for (_, load), start in zip((aged, fresh), starts, strict=True)
    )
    return Row("P95 first token, ms", first, last, last / first, MAX_FIRST_TOKEN_RATIO)


def _name(process: psutil.Process) -> str:
    """The last part of the module that it runs, and its id."""
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else "corun.server"
    return f"{'.'.join(module.split('.')[-2:])} {process.pid}"


def _serving(load: SoakLoad) -> Served:
    return Served(*OPTIONS, "--lora-dir", str(load.lora_dir), "--allowed-lora-dirs", str(load.loaded_dir))


def _end(served: Served) -> None:
    """End the server as an operator does; nothing may be left."""
    pids = [process.pid for process in served.processes]
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(EXIT_TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(served.processes, timeout=10)
    assert not alive
    assert not named_segments(*pids)


@pytest.mark.faults
@pytest.mark.soak
@pytest.mark.timeout(0)  # the run has an end of its own, and each request a deadline
@pytest.mark.usefixtures("one_torch_thread")
def test_soak(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = request.config.pluginmanager.getplugin("terminalreporter")

    def say(line: str) -> None:
        with capsys.disabled():
            reporter.write_line(line)
            reporter.flush()

    loads = [SoakLoad(LOAD, tmp_path / name) for name in ("aged", "fresh")]
    load = loads[0]
    with _serving(load) as served:
        soak = Soak(served, load, request.config.getoption("--soak"))
        asyncio.run(soak.run(say, request.config.getoption("--soak-record")))
        asyncio.run(load.check_served())
        for line in ("", *soak.lines()):
            say(line)
        assert set(served.processes[1:]) == set(served.processes[0].children(recursive=True))
        with _serving(loads[1]) as other:
            turns = ((served.url, load), (other.url, loads[1]))
            over_fresh = asyncio.run(_take_turns(*turns, soak.window_s, say))
            say(f"aged over fresh: {over_fresh.change:.3f}")
            _end(other)
        _end(served)
        logs = [*served.log_lines, *other.log_lines]
    assert [one.tally.errors[:5] for one in loads] == [[], []]
    assert not [line for line in logs if "ERROR" in line or "Traceback" in line]
    assert [row for row in (*soak.rows(), over_fresh) if not row.is_met] == []
