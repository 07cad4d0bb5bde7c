"""Servers to measure in turn: of this checkout, of another one, and of other projects."""

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from load import Job, Sample, Send, Workload, closed_loop, http_sender, make_jobs, window_loop
from load import percentile as percentile_of
from serve import corun_server, free_port, running_server

# By requests in flight: tokens of a prompt and of an answer.
LOADS: Mapping[int, tuple[int, int]] = {1: (128, 32), 8: (128, 32), 16: (64, 64)}
_JOBS_AT_ONCE = 64
_MAX_IDLE_WAIT_S = 60.0
_IDLE_LOOK_S = 0.2
_MAX_IDLE_USE = 0.1  # of a CPU; clocks of processes tick 100 times a second
_seeds = itertools.count(1)  # no prompt comes twice: a prefix cache would find it


@dataclass(frozen=True, slots=True)
class Variant:
    """A server to be started."""

    options: tuple[str, ...] = ()
    tree: Path | None = None  # a folder that has another corun; None = what this script imports
    state: Path | None = None  # where it keeps what the next start reads; None = as always
    peer_command: str | None = None  # of another project's server, with {port}
    peer_fields: str = "{}"  # of requests to it, as JSON; ADAPTER = the adapter's number


@dataclass(frozen=True, slots=True)
class Window:
    """What came in a while."""

    tokens_per_s: float
    gap_p50_ms: float
    gap_p95_ms: float

    @staticmethod
    def of(samples: Sequence[Sample], wall_s: float) -> "Window":
        """Of what requests experienced; the gaps are infinite where there were none."""
        gaps_ms = [1e3 * gap_s for sample in samples for gap_s in sample.gaps_s] or [float("inf")]
        return Window(
            sum(sample.num_tokens for sample in samples) / wall_s,
            percentile_of(gaps_ms, 0.5),
            percentile_of(gaps_ms, 0.95),
        )


@dataclass(frozen=True, slots=True)
class Server:
    """One that is ready."""

    send: Send
    adapters: tuple[str, ...]
    vocab_size: int
    url: str
    pid: int

    def window(self, num_clients: int, window_s: float, settle_s: float = 0.0) -> Window:
        """Measure ``window_s`` after ``settle_s`` with so many requests, and wait until it is idle."""
        loop = window_loop(self.send, self._jobs(num_clients), num_clients, window_s, settle_s)
        window = Window.of(asyncio.run(loop), window_s)
        self._wait_until_idle()
        return window

    def answers(self, num_clients: int, shape: tuple[int, int], num_requests: int) -> Window:
        """Measure so many requests of ``shape`` until all have been answered."""
        start_s = time.perf_counter()
        jobs = self._make_jobs(shape, num_requests)
        samples = asyncio.run(closed_loop(self.send, jobs, num_clients))
        return Window.of(samples, time.perf_counter() - start_s)

    def read_adapters(self) -> None:
        """Have every adapter read, while nothing else runs."""
        jobs = [Job([5, 6, 7], name, 4) for name in self.adapters]
        asyncio.run(closed_loop(self.send, jobs, 1))

    def _wait_until_idle(self) -> None:
        """A server may compute on for requests that are no longer wanted."""
        deadline_s = time.monotonic() + _MAX_IDLE_WAIT_S
        before_s = cpu_s(self.pid)
        while time.monotonic() < deadline_s:
            time.sleep(_IDLE_LOOK_S)
            now_s = cpu_s(self.pid)
            if now_s - before_s <= _MAX_IDLE_USE * _IDLE_LOOK_S:
                return
            before_s = now_s
        print(f"{self.url} is still not idle after {_MAX_IDLE_WAIT_S:g} s", flush=True)

    def _jobs(self, num_clients: int) -> Iterator[Job]:
        """Without end. The first answers have different lengths, so that clients do not run in step."""
        for index, job in enumerate(self._make_jobs(LOADS[num_clients], num_clients)):
            yield replace(job, output_tokens=max(1, job.output_tokens * (index + 1) // num_clients))
        while True:
            yield from self._make_jobs(LOADS[num_clients], _JOBS_AT_ONCE)

    def _make_jobs(self, shape: tuple[int, int], number: int) -> list[Job]:
        prompt_tokens, output_tokens = shape
        seed = next(_seeds)
        return make_jobs(
            Workload(number, prompt_tokens, output_tokens, self.adapters, 0.0, self.vocab_size, seed)
        )


@dataclass
class Servers:
    """Starts a variant when it is asked for first, and ends all at last."""

    model: Path
    lora_dir: Path
    vocab_size: int
    variants: Mapping[str, Variant]
    prefix: Sequence[str] = ()  # a command that runs another one
    _running: dict[str, Server] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End all; one that is asked for again is started again."""
        self._running.clear()
        self._stack.close()

    def __getitem__(self, name: str) -> Server:
        if name not in self._running:
            print(f"starting: {name}", flush=True)
            self._running[name] = self._stack.enter_context(self.start(self.variants[name]))
        return self._running[name]

    @contextlib.contextmanager
    def start(self, variant: Variant) -> Iterator[Server]:
        """Run one server alone, after all its adapters have been read."""
        adapters = tuple(sorted(path.name for path in self.lora_dir.iterdir()))
        with contextlib.ExitStack() as stack:
            if variant.peer_command is not None:
                send, url, pid = stack.enter_context(_peer(variant, adapters, self.prefix))
            else:
                host, port, pid = stack.enter_context(
                    corun_server(
                        self.model,
                        self.lora_dir,
                        "--device",
                        "cpu",
                        *variant.options,
                        preloaded=(),
                        prefix=self.prefix,
                        environment=_environment(variant),
                    )
                )
                send, url = http_sender(host, port), f"http://{host}:{port}"
            server = Server(send, adapters, self.vocab_size, url, pid)
            server.read_adapters()
            yield server


def _environment(variant: Variant) -> dict[str, str]:
    changed = {"PYTHONPATH": variant.tree, "XDG_STATE_HOME": variant.state}
    return os.environ | {name: str(path) for name, path in changed.items() if path is not None}


@contextlib.contextmanager
def _peer(
    variant: Variant, adapters: Sequence[str], prefix: Sequence[str]
) -> Iterator[tuple[Send, str, int]]:
    port = free_port()
    command = shlex.split((variant.peer_command or "").replace("{port}", str(port)))
    with running_server([*prefix, *command], port, ready_path="/health") as pid:
        send = http_sender("127.0.0.1", port, more_fields=peer_fields(variant.peer_fields, adapters))
        yield send, f"http://127.0.0.1:{port}", pid


def peer_fields(text: str, adapters: Sequence[str]) -> Callable[[Job], dict[str, Any]]:
    """What a peer's requests have beside the usual fields, by their adapter."""
    fields = {name: json.loads(text.replace("ADAPTER", str(i))) for i, name in enumerate(adapters)}
    return lambda job: fields[job.model]


def cpu_s(pid: int) -> float:
    """CPU time of a process and those that it has started, in seconds."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)
