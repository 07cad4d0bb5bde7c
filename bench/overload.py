"""What does overload cost running requests, and how soon are other requests refused?

``corun serve`` with a full batch of streams: once without other requests, and once with ten times
as many arrivals as requests end, so that the queue is full and further requests are refused. The
same streams run both times, in turn: gaps between their tokens are compared, and the time to each
refusal is recorded. Then 500 clients send requests and disconnect, before or after their first
token: all their memory must be freed. The engine has one core; the server's own process and the
clients, which sleep until data arrives, share the other. The last line is JSON.

    python bench/overload.py [--pairs 7] [--clients 500]
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from cold.workload import SIZES
from corun.runtime.tasks import cancel_all
from load import percentile
from models import ALL_TARGETS, save_adapter, save_model
from paired import MAX_CONTROL_SPREAD, Ratio, ratio_of, report
from serve import corun_server

MAX_MEDIAN_GAP, MAX_P95_GAP = 1.1, 1.3
MAX_REFUSAL_S = 0.1  # P99
MAX_SCRAPE_S = 0.05  # P99
OVERLOAD = 10
_STREAMS, _WAITING = 16, 32
_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 256
_SKIPPED_TOKENS = 16  # of each stream: while the others begin
_RANKS = (8, 16, 32, 64)
_TIMEOUT_S = 120.0
_SCRAPE_EVERY_S = 0.05  # as routers do
_MAX_STAY_S = 2.0  # of a client that leaves
_LEAVING_PER_S = 100.0
_ROUNDS = 5  # of clients that leave
# Between the first of these rounds and the last. Allocators keep pages of what they gave back.
_MAX_GROWTH = {"memory": 0.01, "shared memory": 0.01, "descriptors": 0.0}
_SLACK = {"memory": 4 << 20, "shared memory": 1 << 20, "descriptors": 2}


class Client(asyncio.Protocol):
    """One request: its status, and when its tokens came."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.status: asyncio.Future[int] = loop.create_future()  # of the answer
        self.ended: asyncio.Future[None] = loop.create_future()
        self.num_tokens = 0
        self.token_times_s: list[float] = []  # of writes, of which each holds a token or more
        self.began_s = time.perf_counter()
        self._request = request
        self._head = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.status.done():
            self._head += data
            if b"\r\n" not in self._head:
                return
            self.status.set_result(int(self._head.split(b" ", 2)[1]))
        num_tokens = data.count(b"data: {")
        if num_tokens:
            self.num_tokens += num_tokens
            self.token_times_s.append(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.status, self.ended):
            if not future.done():
                future.cancel()

    def leave(self) -> None:
        """Close the connection at any time."""
        if self._transport is not None:
            self._transport.abort()


@dataclass
class Tally:
    """Of all runs."""

    median_gaps: list[float] = field(default_factory=list)  # overloaded over alone, by pair
    p95_gaps: list[float] = field(default_factory=list)
    control_gaps: list[float] = field(default_factory=list)  # alone over alone
    refusals_s: list[float] = field(default_factory=list)
    scrapes_s: list[float] = field(default_factory=list)  # of /metrics, under overload
    num_offered: int = 0
    other_statuses: list[int] = field(default_factory=list)


class Overload:
    """Streams and clients on one server."""

    def __init__(self, address: tuple[str, int], models: Sequence[str], pids: list[int]) -> None:
        self.tally = Tally()
        self._address = address
        self._models = models
        self._pids = pids
        self._rng = random.Random(0)
        self._batch_s = math.inf  # what a full batch takes alone

    async def gaps_s(self, *, is_overloaded: bool) -> list[float]:
        """Between tokens of a full batch while all of it decodes."""
        streams = [await self._ask(number, _OUTPUT_TOKENS) for number in range(_STREAMS)]
        await self._wait_for(streams, 1)  # they have all slots
        beside = [self._offer(), self._scrape()] if is_overloaded else []
        tasks = [asyncio.create_task(one) for one in beside]
        await self._wait_for(streams, _OUTPUT_TOKENS)
        await cancel_all(*tasks)
        for one in streams:
            one.leave()
        await self.settled()
        first_s = max(one.token_times_s[_SKIPPED_TOKENS] for one in streams)
        last_s = min(one.token_times_s[-1] for one in streams)
        return [
            late - early
            for one in streams
            for early, late in zip(one.token_times_s, one.token_times_s[1:], strict=False)
            if first_s <= early and late <= last_s
        ]

    async def _wait_for(self, streams: Sequence[Client], num_tokens: int) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            while any(one.num_tokens < num_tokens for one in streams):
                assert not any(one.status.done() and one.status.result() != 200 for one in streams)
                await asyncio.sleep(0.02)

    async def pair(self, number: int, *, is_control: bool) -> None:
        """Both ways, in turn; of a control alone and alone."""
        gaps: dict[bool, list[float]] = {}
        for is_first in (True, False) if number % 2 == 0 else (False, True):
            gaps[is_first] = await self.gaps_s(is_overloaded=is_first and not is_control)
        median = statistics.median(gaps[True]) / statistics.median(gaps[False])
        if is_control:
            self.tally.control_gaps.append(median)
            return
        self.tally.median_gaps.append(median)
        self.tally.p95_gaps.append(percentile(gaps[True], 0.95) / percentile(gaps[False], 0.95))

    async def _offer(self) -> None:
        """Ask ten times as often as streams end, until cancelled."""
        rate_rps = OVERLOAD * _STREAMS / self._batch_s
        asked: list[Client] = []
        refusals: list[asyncio.Task[None]] = []
        try:
            while True:
                asked.append(await self._ask(len(asked), _OUTPUT_TOKENS))
                refusals.append(asyncio.create_task(self._note(asked[-1])))
                self.tally.num_offered += 1
                await asyncio.sleep(self._rng.expovariate(rate_rps))
        finally:
            for one in asked:
                one.leave()
            await asyncio.gather(*refusals, return_exceptions=True)

    async def _scrape(self) -> None:
        """Ask for /metrics as routers do, until cancelled."""
        head = f"GET /metrics HTTP/1.1\r\nHost: {self._address[0]}\r\nConnection: close\r\n\r\n"
        while True:
            began_s = time.perf_counter()
            reader, writer = await asyncio.open_connection(*self._address)
            writer.write(head.encode())
            await reader.read()
            self.tally.scrapes_s.append(time.perf_counter() - began_s)
            writer.close()
            await asyncio.sleep(_SCRAPE_EVERY_S)

    async def measure_batch(self) -> None:
        """Run a full batch alone: how long it takes is what the load is ten times of."""
        began_s = time.perf_counter()
        await self.gaps_s(is_overloaded=False)
        self._batch_s = time.perf_counter() - began_s

    async def _note(self, client: Client) -> None:
        status = await client.status
        if status == 429:
            self.tally.refusals_s.append(time.perf_counter() - client.began_s)
        elif status != 200:
            self.tally.other_statuses.append(status)

    async def leave(self, number: int) -> None:
        """Let so many clients ask and leave, and wait until the engine rests."""
        tasks = []
        for index in range(number):
            tasks.append(asyncio.create_task(self._ask_and_leave(index)))
            await asyncio.sleep(self._rng.expovariate(_LEAVING_PER_S))
        await asyncio.gather(*tasks)
        await self.settled()

    async def _ask_and_leave(self, index: int) -> None:
        client = await self._ask(index, _OUTPUT_TOKENS)
        await asyncio.sleep(self._rng.uniform(0.0, _MAX_STAY_S))
        client.leave()
        await asyncio.gather(client.ended, return_exceptions=True)

    async def settled(self) -> None:
        """Wait until nothing waits or runs."""
        async with asyncio.timeout(_TIMEOUT_S), httpx.AsyncClient() as http:
            while True:
                text = (await http.get("http://{}:{}/metrics".format(*self._address))).text
                found = {
                    line.partition("{")[0]: float(line.rpartition(" ")[2])
                    for line in text.splitlines()
                    if line.startswith("corun:num_requests_")
                }
                if not any(found.values()):
                    return
                await asyncio.sleep(0.05)

    def held(self) -> dict[str, float]:
        """What the server's processes hold: bytes, their own and shared, and descriptors."""
        processes = [psutil.Process(pid) for pid in self._pids]
        return {
            "memory": sum(process.memory_full_info().uss for process in processes),
            "shared memory": sum(_shared_bytes(pid) for pid in self._pids),
            "descriptors": sum(process.num_fds() for process in processes),
        }

    async def _ask(self, index: int, num_tokens: int) -> Client:
        body = json.dumps(
            {
                "model": self._models[index % len(self._models)],
                "prompt": [3 + (index * 7 + i) % 7000 for i in range(_PROMPT_TOKENS)],
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address[0]}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: Client(head.encode() + body), *self._address
        )
        return client


async def measure(overload: Overload, num_pairs: int, num_clients: int) -> dict[str, list[float]]:
    """All of it; returns what the server's processes held after each round, by what."""
    await overload.measure_batch()  # the first is slower
    await overload.measure_batch()
    for number in range(num_pairs):
        await overload.pair(number, is_control=True)
        await overload.pair(number, is_control=False)
        print(
            f"pair {number + 1} of {num_pairs}: median gap "
            f"{overload.tally.median_gaps[-1]:.3f}, P95 {overload.tally.p95_gaps[-1]:.3f}, "
            f"control {overload.tally.control_gaps[-1]:.3f}",
            flush=True,
        )
    rounds = []
    for _ in range(_ROUNDS):
        await overload.leave(num_clients)
        rounds.append(overload.held())
    return {what: [one[what] for one in rounds] for what in _MAX_GROWTH}


def judge(tally: Tally, held_then: dict[str, list[float]]) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Figures and bounds."""
    median, p95 = ratio_of(tally.median_gaps), ratio_of(tally.p95_gaps)
    control = ratio_of(tally.control_gaps)
    is_clear = control.spread <= MAX_CONTROL_SPREAD
    p99_s = percentile(tally.refusals_s, 0.99)

    def within(found: Ratio, bound: float) -> bool | None:
        return found.high <= bound if is_clear else None

    bounds: dict[str, bool | None] = {
        f"median gap <= {MAX_MEDIAN_GAP} of an empty queue's": within(median, MAX_MEDIAN_GAP),
        f"P95 of gaps <= {MAX_P95_GAP} of an empty queue's": within(p95, MAX_P95_GAP),
        f"P99 of refusals <= {MAX_REFUSAL_S * 1e3:g} ms": p99_s <= MAX_REFUSAL_S,
        f"P99 of /metrics <= {MAX_SCRAPE_S * 1e3:g} ms": (percentile(tally.scrapes_s, 0.99) <= MAX_SCRAPE_S),
        "all other requests were refused with 429": not tally.other_statuses,
    }
    for what, growth in _MAX_GROWTH.items():
        first, *_, last = held_then[what]
        bounds[f"{what} comes back"] = last <= first * (1 + growth) + _SLACK[what]
    figures = {
        "median_gap": median.to_json(),
        "p95_gap": p95.to_json(),
        "control": control.to_json(),
        "offered": tally.num_offered,
        "refused": len(tally.refusals_s),
        "refusal_ms": _quantiles_ms(tally.refusals_s),
        "metrics_ms": _quantiles_ms(tally.scrapes_s),
    }
    return figures | held_then, bounds


def _shared_bytes(pid: int) -> int:
    """Shared memory that a process has touched, whether or not it still has a name."""
    (line,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssShmem:")
    )
    return int(line.split()[1]) * 1024


def _quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{share * 100:g}": round(1e3 * percentile(seconds, share), 1) for share in (0.5, 0.99)}


@contextmanager
def server() -> Iterator[tuple[tuple[str, int], list[str], list[int]]]:
    """A server with its engine on the first core, and this process on the last."""
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        files, config = Path(folder), SIZES["small"]
        save_model(config, files / "model")
        for rank in _RANKS:
            save_adapter(files / "adapters" / f"rank{rank}", config, rank, ALL_TARGETS, seed=rank)
        with corun_server(
            files / "model",
            files / "adapters",
            *("--engine-cores", str(cpus[0])),
            *"--cpu-cores none --cpu-threads 1".split(),
            *("--max-num-seqs", str(_STREAMS)),
            *("--max-num-waiting", str(_WAITING)),
            *("--prefix-cache", "off"),
        ) as (host, port, pid):
            os.sched_setaffinity(0, {cpus[-1]})
            pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
            yield (host, port), [f"rank{rank}" for rank in _RANKS], pids


def main() -> None:
    """Run once and print the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--clients", type=int, default=500, help="number of clients that disconnect")
    options = parser.parse_args()
    for name in ("pairs", "clients"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, must be at least 1")
    with server() as (address, models, pids):
        overload = Overload(address, models, pids)
        held_then = asyncio.run(measure(overload, options.pairs, options.clients))
    figures, bounds = judge(overload.tally, held_then)
    workload = vars(options) | {"streams": _STREAMS, "waiting": _WAITING, "overload": OVERLOAD}
    report("overload", workload, figures, bounds)


if __name__ == "__main__":
    main()
