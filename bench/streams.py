"""What do many streams over HTTP cost the engine's steps? ``serve.py --streams 200`` runs it.

The same requests decode together on two engines of the same configuration: behind ``corun serve``
with a client per request, and in an engine process that discards its messages after decoding. The
measure is the time between the tokens of consecutive steps, while all requests decode. The engine,
the server and the clients share the machine's cores. To measure the server, clients sleep and
receive their data once per second. One of them records when its tokens arrive. The costs of server
and clients per token are reported too.
"""

import asyncio
import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from corun.runtime.engine.client import ProcessClient
from corun.runtime.engine.messages import AddRequest, AddRequests, FromEngine, StepOutputs
from corun.runtime.sampling import SamplingParams
from paired import MAX_CONTROL_SPREAD, compare

MAX_SLOWDOWN = 1.10
PROMPT_TOKENS = 4
OUTPUT_TOKENS = 36
# Tokens of the noting request that count: all requests decode between them. It is sent last, so
# the others began up to some steps before it and end so much earlier.
FIRST_TOKEN, LAST_TOKEN = 6, 24
_DRAIN_INTERVAL_S = 1.0
_RECEIVE_BYTES = 1 << 18
_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Costs:
    """Microseconds of processor time per token, one entry per run."""

    server_us: list[float] = field(default_factory=list)
    clients_us: list[float] = field(default_factory=list)


def _step_s(times: Sequence[float]) -> float:
    if len(times) <= LAST_TOKEN:
        raise RuntimeError(f"only {len(times)} tokens were seen on their own, {LAST_TOKEN} count")
    return (times[LAST_TOKEN] - times[FIRST_TOKEN]) / (LAST_TOKEN - FIRST_TOKEN)


def _prompt(number: int) -> list[int]:
    return [3 + (number * PROMPT_TOKENS + i) % 7000 for i in range(PROMPT_TOKENS)]


class HttpStreams:
    """Streams from a server with the front process ``pid``."""

    def __init__(self, address: tuple[str, int], pid: int, models: Sequence[str]) -> None:
        self._address = address
        self._server = psutil.Process(pid)
        self.models = models
        self.costs = Costs()

    def step_s(self) -> float:
        """Run one request per model and return the seconds per step while all decode."""
        server_s, clients_s = sum(self._server.cpu_times()[:2]), time.process_time()
        with contextlib.ExitStack() as stack:
            *quiet, noting = [
                stack.enter_context(self._sent(number, model)) for number, model in enumerate(self.models)
            ]
            times: list[float] = []
            reader = threading.Thread(target=_note, args=(noting, times))
            reader.start()
            _drain(quiet)
            reader.join(_TIMEOUT_S)
        num_tokens = len(self.models) * OUTPUT_TOKENS
        server_s = sum(self._server.cpu_times()[:2]) - server_s
        self.costs.server_us.append(server_s / num_tokens * 1e6)
        self.costs.clients_us.append((time.process_time() - clients_s) / num_tokens * 1e6)
        return _step_s(times)

    @contextlib.contextmanager
    def _sent(self, number: int, model: str) -> Iterator[socket.socket]:
        body = json.dumps(
            {
                "model": model,
                "prompt": _prompt(number),
                "max_tokens": OUTPUT_TOKENS,
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
        with socket.create_connection(self._address, timeout=_TIMEOUT_S) as sock:
            sock.sendall(head.encode() + body)
            yield sock


def _note(sock: socket.socket, times: list[float]) -> None:
    """Add the arrival of every token; the server sends each in a write of its own."""
    first = sock.recv(_RECEIVE_BYTES)
    if b" 200 " not in first[:16]:
        raise RuntimeError(first.decode())
    rest = first.count(b"data: {")
    times.extend([time.perf_counter()] * rest)
    while data := sock.recv(_RECEIVE_BYTES):
        times.extend([time.perf_counter()] * data.count(b"data: {"))


def _drain(socks: Sequence[socket.socket]) -> None:
    """Throw away what has come, now and then, until every stream has ended."""
    remaining = list(socks)
    for sock in remaining:
        sock.setblocking(False)
    while remaining:
        time.sleep(_DRAIN_INTERVAL_S)
        remaining = [sock for sock in remaining if _is_open(sock)]


def _is_open(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(_RECEIVE_BYTES))
    except BlockingIOError:
        return True


class NullStreams:
    """The same requests on an engine process that discards its messages."""

    def __init__(self, client: ProcessClient, loop: asyncio.AbstractEventLoop, models: Sequence[str]) -> None:
        self._client = client
        self._loop = loop
        self._models = models
        self._next_id = 1
        self._noting_id = 0
        self._times: list[float] = []
        self._open: set[int] = set()
        self._done = threading.Event()

    def receive(self, message: FromEngine) -> None:
        """Take a message from the engine."""
        if not isinstance(message, StepOutputs):
            return
        for update in message.updates:
            if update.request_id == self._noting_id and update.token_ids:
                self._times.append(time.perf_counter())
            if update.finish_reason is not None:
                self._open.discard(update.request_id)
        if not self._open:
            self._done.set()

    def step_s(self) -> float:
        """Run one request per model and return the seconds per step while all decode."""
        self._done.clear()
        self._loop.call_soon_threadsafe(self._send)
        if not self._done.wait(_TIMEOUT_S):
            raise RuntimeError(f"{len(self._open)} requests did not end in {_TIMEOUT_S} s")
        return _step_s(self._times)

    def _send(self) -> None:
        first_id = self._next_id
        self._next_id += len(self._models)
        self._noting_id = self._next_id - 1
        self._times = []
        self._open = set(range(first_id, self._next_id))
        for number, model in enumerate(self._models):
            params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=number)
            prompt = tuple(_prompt(number))
            request = AddRequest(first_id + number, prompt, params, model or None)
            self._client.send(AddRequests((request,)))


def measure(http: HttpStreams, null: NullStreams, num_pairs: int) -> dict[str, Any]:
    """Compare seconds per step behind HTTP with those of the engine alone, ABBA."""
    for run in (http.step_s, null.step_s):  # the first is slower
        run()
    http.costs = Costs()
    control, _, _ = compare(null.step_s, null.step_s, num_pairs, progress="streams, control")
    ratio, http_s, null_s = compare(http.step_s, null.step_s, num_pairs, progress="streams, HTTP / engine")
    return {
        "streams": len(http.models),
        "http_step_ms": round(statistics.median(http_s) * 1e3, 2),
        "engine_step_ms": round(statistics.median(null_s) * 1e3, 2),
        "http_over_engine": ratio.to_json(),
        "control_spread": round(control.spread, 4),
        "server_us_per_token": round(statistics.median(http.costs.server_us), 1),
        "clients_us_per_token": round(statistics.median(http.costs.clients_us), 1),
    }


def bounds(figures: dict[str, Any]) -> dict[str, bool | None]:
    """Hold the figures of ``measure`` to what is required."""
    is_clear = figures["control_spread"] <= MAX_CONTROL_SPREAD
    slowdown = figures["http_over_engine"]["high"]
    name = f"{figures['streams']} streams: a step takes <= {MAX_SLOWDOWN} of the engine's alone"
    return {name: slowdown <= MAX_SLOWDOWN if is_clear else None}
