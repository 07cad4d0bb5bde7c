"""A load generator for OpenAI-compatible servers: closed loop or Poisson arrivals.

It uses HTTP/1.1 on plain sockets and reads only the "data:" lines, because it shares the machine
with the measured server.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_EVENT_MARK = b"data: {"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent. Adapter k of n is drawn with probability proportional to (k + 1) ** -alpha."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    adapters: tuple[str, ...]  # "" = the base model
    alpha: float = 0.0
    vocab_size: int = 8000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: list[int]
    model: str
    output_tokens: int


@dataclass(slots=True)
class Sample:
    """What one request experienced, in seconds."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    num_tokens: int = 0


# Sends one job and tells the arrival of tokens: called with how many have come.
Send = Callable[[Job, Callable[[int], None]], Awaitable[None]]


def make_jobs(workload: Workload) -> list[Job]:
    """Draw prompts and adapters."""
    rng = random.Random(workload.seed)
    weights = [(k + 1) ** -workload.alpha for k in range(len(workload.adapters))]
    return [
        Job(
            [rng.randrange(3, workload.vocab_size) for _ in range(workload.prompt_tokens)],
            rng.choices(workload.adapters, weights)[0],
            workload.output_tokens,
        )
        for _ in range(workload.num_requests)
    ]


async def closed_loop(send: Send, jobs: Sequence[Job], num_clients: int) -> list[Sample]:
    """Keep ``num_clients`` requests in flight until all jobs are done."""
    queue = list(reversed(jobs))
    samples: list[Sample] = []

    async def client() -> None:
        while queue:
            samples.append(await _timed(send, queue.pop()))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return samples


async def window_loop(
    send: Send, jobs: Iterator[Job], num_clients: int, window_s: float, settle_s: float = 0.0
) -> list[Sample]:
    """Keep ``num_clients`` requests in flight for so many seconds; then those that run are left.

    Each sample has the tokens that came within the window, also of requests that have not ended.
    The window begins after ``settle_s``, when the first prompts are no longer computed at once.
    """
    samples: list[Sample] = []

    async def client() -> None:
        for job in jobs:
            samples.append(Sample())
            await _time(send, job, samples[-1])

    clients = [asyncio.create_task(client()) for _ in range(num_clients)]
    if settle_s:
        await asyncio.wait(clients, timeout=settle_s, return_when=asyncio.FIRST_EXCEPTION)
        for sample in samples:
            sample.num_tokens = 0
            sample.gaps_s.clear()
    ended, running = await asyncio.wait(clients, timeout=window_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in ended:
        task.result()  # raises what a request has failed with
    return samples


async def open_loop(send: Send, jobs: Sequence[Job], rate_per_s: float, seed: int) -> list[Sample]:
    """Send at Poisson arrivals, whether or not earlier requests have ended."""
    rng = random.Random(seed)
    gaps_s = (rng.expovariate(rate_per_s) for _ in jobs[1:])
    return await timed_loop(send, jobs, list(itertools.accumulate(gaps_s, initial=0.0)))


async def timed_loop(send: Send, jobs: Sequence[Job], arrivals_s: Sequence[float]) -> list[Sample]:
    """Send each job when it is due, in seconds from now, whether or not earlier ones have ended."""
    start = time.perf_counter()
    tasks: list[asyncio.Task[Sample]] = []
    for job, arrival_s in zip(jobs, arrivals_s, strict=True):
        await asyncio.sleep(max(0.0, start + arrival_s - time.perf_counter()))
        tasks.append(asyncio.create_task(_timed(send, job)))
    return list(await asyncio.gather(*tasks))


async def _timed(send: Send, job: Job) -> Sample:
    sample = Sample()
    await _time(send, job, sample)
    return sample


async def _time(send: Send, job: Job, sample: Sample) -> None:
    start = last = time.perf_counter()

    def on_tokens(count: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if last == start:
            sample.ttft_s = now - start
        else:
            sample.gaps_s.append(now - last)
        sample.num_tokens += count
        last = now

    await send(job, on_tokens)
    sample.e2e_s = time.perf_counter() - start


class _Receiver(asyncio.Protocol):
    """Sends one request and counts the events of its answer, without looking at lines.

    What it costs itself would be counted as the server's: a line at a time is a task switch each.
    """

    def __init__(self, request: bytes, on_tokens: Callable[[int], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_tokens = on_tokens
        self._head = b""  # what has come until the status is known
        self._is_ok = False
        self._rest = b""  # may be the beginning of an event's mark

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._is_ok:
            self._head += data
            self._is_ok = b" 200 " in self._head.partition(b"\r\n")[0]
            data = self._head if self._is_ok else b""
        data = self._rest + data
        self._rest = data[1 - len(_EVENT_MARK) :]
        num_events = data.count(_EVENT_MARK)
        if num_events:
            self._on_tokens(num_events)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and not self._is_ok:
            exc = RuntimeError(_refusal(self._head))
        if self.ended.done():  # the waiting task was cancelled
            return
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)


def _refusal(answer: bytes) -> str:
    """One line: the status of an answer, and its body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    said = b" ".join((head.partition(b"\r\n")[0], *body.split()))
    return said.decode(errors="replace").strip() or "the connection was closed without an answer"


def http_sender(
    host: str, port: int, *, api_key: str = "", more_fields: Callable[[Job], dict[str, Any]] = lambda _: {}
) -> Send:
    """Send jobs as streaming /v1/completions requests, one connection each.

    ``more_fields``: of a request's body, for servers that want others.
    """

    async def send(job: Job, on_tokens: Callable[[int], None]) -> None:
        body = json.dumps(
            {
                "model": job.model,
                "prompt": job.prompt,
                "max_tokens": job.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                **more_fields(job),
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {api_key}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        receiver = _Receiver(head.encode() + body, on_tokens)
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: receiver, host, port)
            try:
                await receiver.ended
            finally:
                transport.close()
        finally:
            receiver.ended.cancel()  # where the job was cancelled before it was connected

    return send


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def describe(samples: Sequence[Sample], wall_s: float) -> dict[str, float]:
    """Rates and latencies of a run, times in milliseconds."""
    gaps = [gap for sample in samples for gap in sample.gaps_s]
    figures = {"tokens_per_s": sum(s.num_tokens for s in samples) / wall_s}
    for name, values in (
        ("ttft_ms", [s.ttft_s for s in samples]),
        ("gap_ms", gaps),
        ("e2e_ms", [s.e2e_s for s in samples]),
    ):
        for share in (0.5, 0.95, 0.99):
            figures[f"{name}_p{int(share * 100)}"] = percentile(values, share) * 1e3
    return {name: round(value, 2) for name, value in figures.items()}
