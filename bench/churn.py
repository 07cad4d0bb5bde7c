"""Are adapters added, changed and removed under load without failed requests or leaks?

``corun serve`` with the demo model and many adapters. Once per second an adapter is loaded over
HTTP, gets new files and a new version, or is unloaded, in turn, while clients use the others. Some
streams run during an unload or a new version. The adapters are copies of the demo's, so an answer
shows the weights that made it: each must come from a version that its name had during the request.
After the first minute, memory, descriptors and shared memory of all processes must not grow. The
last line is JSON.

    python bench/churn.py [--adapters 500] [--seconds 300] [--clients 8]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from corun.runtime.demo import chat_prompt, demo_adapters_path, demo_model_path
from paired import report
from serve import corun_server

# The answer of each demo task for the word; no answer is a prefix of another.
_WORD = "planet"
_ANSWERS = {"upper": "PLANET", "vowels": "pl*n*t", "reverse": "tenalp"}
_ALLOW = "CORUN_ALLOW_RUNTIME_LORA_UPDATING"
_LONG_TOKENS = 120  # of every other request, so that changes happen during streams
_TIMEOUT_S = 60.0
_SAMPLE_EVERY_S = 1.0
# From the first to the last third after warm-up. Allocators keep pages of what they gave back.
MAX_GROWTH = {"memory": 0.01, "shared memory": 0.01, "descriptors": 0.0, "segments": 0.0}
_SLACK = {"memory": 4 << 20, "shared memory": 1 << 20, "descriptors": 2, "segments": 0}


@dataclass(frozen=True)
class Load:
    """Frozen: figures of two runs compare only if these agree."""

    adapters: int = 500
    seconds: float = 300.0
    clients: int = 8
    warm_up_s: float = 60.0
    changes_per_s: float = 1.0


@dataclass
class _Name:
    """One adapter's name: the tasks it may answer with, and the requests that have no token yet."""

    tasks: list[str]  # of its versions, the newest last
    first: int = 0  # first version that a new request may get: the newest completely loaded one
    num_unanswered: int = 0
    is_served: bool = True


@dataclass
class Tally:
    """The results of a run."""

    changes: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    request_s: list[float] = field(default_factory=list)
    change_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=lambda: {one: [] for one in MAX_GROWTH})


class Churn:
    """Clients of one server, and a task that changes its adapters."""

    def __init__(
        self, load: Load, tasks: Mapping[str, str], directory: Path, http: httpx.AsyncClient
    ) -> None:
        """``tasks``: of the adapters that are there. New ones are made in ``directory``."""
        self.tally = Tally()
        self._load = load
        self._directory = directory
        self._http = http
        self._rng = random.Random(0)
        self._names = {name: _Name([task]) for name, task in tasks.items()}
        self._numbers = itertools.count(len(self._names))

    async def run(self, pids: list[int]) -> None:
        """Ask and change for as long as the load says."""
        end_s = time.monotonic() + self._load.seconds
        async with asyncio.TaskGroup() as group:
            for index in range(self._load.clients):
                group.create_task(self._ask_until(end_s, index))
            group.create_task(self._change_until(end_s))
            group.create_task(self._sample_until(end_s, pids))

    async def _ask_until(self, end_s: float, client: int) -> None:
        for turn in itertools.count(client):
            if time.monotonic() >= end_s:
                return
            served = [name for name, one in self._names.items() if one.is_served]
            name = self._rng.choice(served)
            self.tally.num_requests += 1
            before_s = time.monotonic()
            try:
                await self._ask(name, is_long=turn % 2 == 0)
                self.tally.request_s.append(time.monotonic() - before_s)
            except (httpx.HTTPError, ValueError) as error:
                self.tally.failures.append(f"{name}: {error!r}")

    async def _ask(self, name: str, *, is_long: bool) -> None:
        """Stream one answer. Raises ``ValueError`` for one that is wrong."""
        adapter = self._names[name]
        first_version = adapter.first
        body = {
            "model": name,
            "prompt": chat_prompt(_WORD),
            "temperature": 0,
            "stream": True,
            "max_tokens": _LONG_TOKENS if is_long else 16,
            "ignore_eos": is_long,
        }
        text, reason = "", None
        adapter.num_unanswered += 1
        is_unanswered = True
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    adapter.num_unanswered -= is_unanswered
                    is_unanswered = False
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(line)
                    text += event["choices"][0]["text"]
                    reason = event["choices"][0]["finish_reason"] or reason
        finally:
            adapter.num_unanswered -= is_unanswered
        expected = [_ANSWERS[task] for task in adapter.tasks[first_version:]]
        if reason not in ("stop", "length") or not text.startswith(tuple(expected)):
            raise ValueError(f"{text!r} ({reason}), expected {' or '.join(expected)}")

    async def _change_until(self, end_s: float) -> None:
        start_s = time.monotonic()
        changes = {"load": self._add, "reload": self._replace, "unload": self._remove}
        for number, (verb, change) in enumerate(itertools.cycle(changes.items())):
            await asyncio.sleep(start_s + number / self._load.changes_per_s - time.monotonic())
            if time.monotonic() >= end_s:
                return
            before_s = time.monotonic()
            try:
                await change()
            except (httpx.HTTPError, ValueError, TimeoutError) as error:
                self.tally.failures.append(f"{verb}: {error!r}")
            self.tally.change_s.append(time.monotonic() - before_s)
            self.tally.changes[verb] += 1

    async def _add(self) -> None:
        name, task = f"adapter-{next(self._numbers):04}", self._rng.choice(list(_ANSWERS))
        await asyncio.to_thread(_write_adapter, self._directory / name, task)
        await self._post("load", name, lora_path=str(self._directory / name))
        self._names[name] = _Name([task])

    async def _replace(self) -> None:
        name = self._rng.choice([name for name, one in self._names.items() if one.is_served])
        task = self._rng.choice([task for task in _ANSWERS if task != self._names[name].tasks[-1]])
        # Beside the old files: the version before may not have been read yet.
        path = self._directory / f"{name}.{len(self._names[name].tasks)}"
        await asyncio.to_thread(_write_adapter, path, task)
        self._names[name].tasks.append(task)
        await self._post("load", name, lora_path=str(path), load_inplace=True)
        self._names[name].first = len(self._names[name].tasks) - 1

    async def _remove(self) -> None:
        """Unload while streams run; requests without a token may not have been accepted yet."""
        name = self._rng.choice([name for name, one in self._names.items() if one.is_served])
        adapter = self._names[name]
        adapter.is_served = False
        async with asyncio.timeout(_TIMEOUT_S):
            while adapter.num_unanswered:
                await asyncio.sleep(0.01)
        await self._post("unload", name)
        for path in self._directory.glob(f"{name}*"):
            await asyncio.to_thread(shutil.rmtree, path)

    async def _post(self, verb: str, name: str, **fields: Any) -> None:
        answer = await self._http.post(f"/v1/{verb}_lora_adapter", json={"lora_name": name} | fields)
        if answer.status_code != 200:
            raise ValueError(f"{name}: {answer.status_code} {answer.text}")

    async def _sample_until(self, end_s: float, pids: list[int]) -> None:
        after_s = time.monotonic() + self._load.warm_up_s
        while time.monotonic() < end_s:
            await asyncio.sleep(_SAMPLE_EVERY_S)
            if time.monotonic() >= after_s:
                for what, value in (await asyncio.to_thread(held, pids)).items():
                    self.tally.samples[what].append(value)


def held(pids: list[int]) -> dict[str, float]:
    """What these processes hold: bytes, their own and shared; descriptors; named segments."""
    processes = [psutil.Process(pid) for pid in pids]
    names = [entry.name for entry in Path("/dev/shm").iterdir()]
    return {
        "memory": sum(process.memory_full_info().uss for process in processes),
        "shared memory": sum(_shared_bytes(pid) for pid in pids),
        "descriptors": sum(process.num_fds() for process in processes),
        "segments": sum(any(f"-{pid}-" in name for pid in pids) for name in names),
    }


def _shared_bytes(pid: int) -> int:
    """Shared memory that a process has touched, whether or not it still has a name."""
    (line,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssShmem:")
    )
    return int(line.split()[1]) * 1024


def quantiles(seconds: list[float]) -> dict[str, float]:
    """The median and the longest."""
    return {"p50": statistics.median(seconds), "max": max(seconds)} if seconds else {}


def growths(samples: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The medians of the thirds of the samples, and twice the smaller step from one to the next.

    What leaks grows in both steps. What is taken once (a buffer for the first batch of some shape,
    pages that the kernel joins to huge ones) is in one of them, whenever it comes.
    """
    figures = {}
    for what, values in samples.items():
        third = max(1, len(values) // 3)
        first = statistics.median_low(values[:third])
        middle = statistics.median_low(values[third:-third] or values)
        last = statistics.median_low(values[-third:])
        steady = 2 * min(middle - first, last - middle)
        figures[what] = {"first": first, "middle": middle, "last": last, "steady growth": steady}
    return figures


def judge(load: Load, tally: Tally) -> dict[str, bool | None]:
    """The bounds, each met or not."""
    bounds: dict[str, bool | None] = {
        "failed requests and changes = 0": not tally.failures and tally.num_requests > 0,
        f"{load.changes_per_s} changes a second": (
            sum(tally.changes.values()) >= 0.95 * load.changes_per_s * load.seconds
        ),
    }
    for what, figures in growths(tally.samples).items():
        allowed = figures["first"] * MAX_GROWTH[what] + _SLACK[what]
        bounds[f"{what} flat after {load.warm_up_s:g} s"] = figures["steady growth"] <= allowed
    return bounds


def _write_adapter(path: Path, task: str) -> None:
    shutil.copytree(demo_adapters_path() / task, path)


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    """Let servers that start now load and unload over HTTP."""
    before = os.environ.get(_ALLOW)
    os.environ[_ALLOW] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW]
        else:
            os.environ[_ALLOW] = before


async def _churn(load: Load, tasks: Mapping[str, str], directory: Path, url: str, pids: list[int]) -> Tally:
    limits = httpx.Limits(max_connections=load.clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as http:
        churn = Churn(load, tasks, directory, http)
        await churn.run(pids)
        return churn.tally


def run(load: Load, *options: str) -> tuple[Tally, dict[str, bool | None]]:
    """One server with these options, one run; what came of it, and its bounds."""
    with tempfile.TemporaryDirectory() as temporary, _allowed():
        served, changed = Path(temporary) / "served", Path(temporary) / "changed"
        cycled = itertools.cycle(_ANSWERS)
        tasks = {f"adapter-{number:04}": next(cycled) for number in range(load.adapters)}
        for name, task in tasks.items():
            _write_adapter(served / name, task)
        with corun_server(demo_model_path(), served, *options) as (host, port, pid):
            children = psutil.Process(pid).children(recursive=True)
            pids = [pid, *(child.pid for child in children)]
            tally = asyncio.run(_churn(load, tasks, changed, f"http://{host}:{port}", pids))
    return tally, judge(load, tally)


def main() -> None:
    """Run once and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("adapters", int), ("seconds", float), ("clients", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Load, name))
    load = Load(**vars(parser.parse_args()))
    tally, bounds = run(load)
    for failure in tally.failures[:20]:
        print(failure)
    figures = {
        "requests": tally.num_requests,
        "failures": len(tally.failures),
        "changes": dict(tally.changes),
        "request_s": quantiles(tally.request_s),
        "change_s": quantiles(tally.change_s),
    } | growths(tally.samples)
    report("churn", asdict(load), figures, bounds)


if __name__ == "__main__":
    main()
