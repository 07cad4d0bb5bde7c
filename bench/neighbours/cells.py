"""Measurements of servers, stored on disk so that an interrupted run continues."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import httpx
from corun.profiles.busy import busy_reasons
from corun.profiles.measure.cpu_use import CpuUseSampler
from floors import FloorMeter

from neighbours.competitors import spinning
from neighbours.servers import Server, Servers, Variant, Window

_T = TypeVar("_T")
Figures = dict[str, Any]
_BOUND_METRIC = "corun:decode_gap_bound_seconds{"
_WATCH_EVERY_S = 0.5
_LONG = (1024, 64)  # tokens of a prompt and of an answer
_READS = 5


@dataclass(frozen=True)
class Pace:
    """How long everything is measured. Frozen: figures compare only if these agree."""

    rounds: int = 3
    pairs: int = 5  # of what is a ratio of two servers
    settle_s: float = 4.0  # under a load, before anything counts
    window_s: float = 6.0
    watch_s: float = 75.0  # for full speed after competitors have ended
    watch_window_s: float = 5.0
    recovery_s: float = 40.0  # after a start under load
    starts: int = 10
    start_rounds: int = 1
    long_requests: int = 16


class Kept:
    """Figures of cells in one file; those that other programs disturbed are measured again."""

    def __init__(self, path: Path, same: Figures) -> None:
        """``same``: what must be the same for figures to be taken from the file."""
        self._path = path
        self._all: Figures = {"of": same, "cells": {}}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["of"] != same:
                raise SystemExit(f"{path} is of {found['of']}, not {same}: name another --results")
            self._all = found

    @property
    def cells(self) -> Figures:
        """All that have been measured."""
        return dict(self._all["cells"])

    def cell(self, name: str, measure: Callable[[], Figures]) -> Figures:
        kept: Figures | None = self._all["cells"].get(name)
        if kept is not None and not kept["disturbed"]:
            return kept
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        sampler = CpuUseSampler(sorted(os.sched_getaffinity(0)))
        figures = measure()
        figures["disturbed"] = list(busy_reasons(sampler.use(), ()))
        print(f"{time.strftime('%H:%M:%S')} {name}: {json.dumps(figures)}", flush=True)
        self._all["cells"][name] = figures
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._all, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)
        return figures


def in_turn(works: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Everything once a round, in reverse order in every other round."""
    found: dict[str, list[_T]] = {name: [] for name in works}
    for number in range(rounds):
        for name in works if number % 2 == 0 else reversed([*works]):
            found[name].append(works[name]())
    return found


def rows_of(found: Mapping[str, list[Window]]) -> Figures:
    """By server: each figure, as a list by round."""
    return {
        name: {
            one.name: [round(getattr(window, one.name), 2) for window in windows] for one in fields(Window)
        }
        for name, windows in found.items()
    }


def loads(servers: Mapping[str, Server], num_clients: int, rounds: int, pace: Pace) -> Figures:
    """One load on several servers in turn."""

    def window(server: Server) -> Callable[[], Window]:
        return lambda: server.window(num_clients, pace.window_s, pace.settle_s)

    return rows_of(in_turn({name: window(one) for name, one in servers.items()}, rounds))


def quiet_again(server: Server, num_clients: int, pace: Pace) -> Figures:
    """Rates before two competitors per core, and after they have ended, by seconds since then."""

    def rate() -> float:
        return round(server.window(num_clients, pace.watch_window_s).tokens_per_s, 2)

    rate()
    before = [rate() for _ in range(pace.rounds)]
    with spinning(2):
        server.window(num_clients, 3 * pace.watch_window_s)
    start_s = time.monotonic()
    after = []
    while time.monotonic() - start_s < pace.watch_s:
        tokens_per_s = rate()
        after.append((round(time.monotonic() - start_s, 1), tokens_per_s))
    return {"before": before, "after": after}


def started_under_load(servers: Servers, variant: Variant, reference: Server, pace: Pace) -> Figures:
    """A server that starts beside two competitors per core, against one of a quiet start."""
    with contextlib.ExitStack() as stack:
        with spinning(2):
            server = stack.enter_context(servers.start(variant))
        server.window(8, pace.recovery_s)
        pair = {"quiet": reference, "started under load": server}
        return {str(clients): loads(pair, clients, pace.start_rounds, pace) for clients in (1, 8)}


def over_reading(server: Server, weight_bytes: int, pace: Pace) -> Figures:
    """The gap of one request, and how long a plain read of as many bytes takes, in turn."""
    meter = FloorMeter(len(os.sched_getaffinity(0)))

    def read_gb_per_s() -> float:
        meter.start_again()
        for _ in range(_READS):
            meter.measure()
        return meter.floors.memory_gb_per_s

    server.window(1, pace.settle_s)
    rows = []
    for _ in range(pace.pairs):
        before = read_gb_per_s()
        gap_ms = server.window(1, pace.window_s).gap_p50_ms
        rows.append((before, round(gap_ms, 3), read_gb_per_s()))
    return {"weight_bytes": weight_bytes, "read_gap_read": rows}


def long_prompts(servers: Mapping[str, Server], pace: Pace) -> Figures:
    """Eight clients with prompts of 1,024 tokens: rates, gaps, and the bounds of steps."""
    bounds_s: dict[str, list[float]] = {name: [] for name in servers}

    def answers(name: str) -> Callable[[], Window]:
        def measure() -> Window:
            with _watching(servers[name].url, bounds_s[name]):
                return servers[name].answers(8, _LONG, pace.long_requests)

        return measure

    for server in servers.values():
        server.answers(8, _LONG, 8)
    found = rows_of(in_turn({name: answers(name) for name in servers}, pace.rounds))
    for name, row in found.items():
        row["bound_ms"] = [round(1e3 * bound_s, 2) for bound_s in bounds_s[name]]
    return found


@contextlib.contextmanager
def _watching(url: str, bounds_s: list[float]) -> Iterator[None]:
    """Note the bound of a step's time, as metrics tell it, while the block runs."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_WATCH_EVERY_S):
            for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
                if line.startswith(_BOUND_METRIC) and float(line.split()[-1]) > 0:
                    bounds_s.append(float(line.split()[-1]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
