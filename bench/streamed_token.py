"""What does a streamed token cost the server process?

``corun serve``'s server process is real, with 200 streams over HTTP, but its engine is a fake that
computes nothing and sends a token of every request each 20 ms. The measure is the processor time of
the server process per token, the kernel's share in it, and the number of preemptions. Clients sleep
in between and receive their data now and then.

    python bench/streamed_token.py [--streams 200] [--tokens 200] [--runs 5] [--tokenizer DIR]
"""

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.engine.channel import Channel
from corun.runtime.engine.channel_client import ChannelClient
from corun.runtime.engine.messages import (
    AbortRequests,
    AddRequests,
    MachineReport,
    ModelInfo,
    Ready,
    RequestUpdate,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenizerSpec,
)
from corun.runtime.scheduler.step_times import LearnedTimes

STEP_S = 0.02
DRAIN_INTERVAL_S = 0.2
START_TIMEOUT_S = 60.0
VOCAB_SIZE = 8000
_RECEIVE_BYTES = 1 << 18


class StandIn(ChannelClient):
    """The client of the stand-in engine, which is this script in a process of its own."""

    def __init__(self, config: EngineConfig, num_streams: int) -> None:
        super().__init__(config)
        self._num_streams = num_streams
        self._process: subprocess.Popen[bytes] | None = None

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--engine", str(theirs.fileno())]
        command += ["--tokenizer", str(self.config.model), "--streams", str(self._num_streams)]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        return ours

    async def _end(self, grace_s: float) -> None:
        if self._process is None:
            return
        deadline_s = time.monotonic() + grace_s
        while self._process.poll() is None:
            if time.monotonic() > deadline_s:
                self._process.kill()
            await asyncio.sleep(0.01)

    def _describe_end(self) -> str:
        return "the stand-in has ended"


def tell_tokens(sock: socket.socket, model: str, num_streams: int) -> None:
    """Be the engine: once all streams are there, tell a token of each in every step."""
    channel: Channel[ToEngine] = Channel(sock, ToEngine)
    info = ModelInfo(
        name="stand-in",
        dtype="none",
        device="none",
        max_model_len=4096,
        max_num_batched_tokens=512,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        default_sampling={},
        kv_capacity_tokens=1 << 20,
        memory_bytes=1 << 30,
        max_num_waiting=1024,
        model_path=model,
        device_choices={"sync": "host"},
        backends={},
        summary=(),
    )
    machine = MachineReport(LearnedTimes(1).machine_model(), 1e8, 1, is_measured=False)
    tokenizer = TokenizerSpec(Path(model, "tokenizer.json").read_text(), {}, None)
    channel.send(Ready(info, (), machine, tokenizer))
    remaining: dict[int, int] = {}
    is_running = False
    number = 0
    next_s = time.monotonic()
    while not channel.at_end:
        wait_s = max(0.0, next_s - time.monotonic()) if is_running else None
        select.select([sock], [], [], wait_s)
        for message in channel.receive():
            match message:
                case AddRequests(requests):
                    for request in requests:
                        remaining[request.request_id] = request.sampling.max_tokens or 1
                case AbortRequests(request_ids):
                    for request_id in request_ids:
                        remaining.pop(request_id, None)
                case Shutdown():
                    return
        if not is_running and len(remaining) == num_streams:
            is_running, next_s = True, time.monotonic()
        if is_running and time.monotonic() >= next_s:
            next_s += STEP_S
            number += 1
            channel.send(_step(remaining, number))
            is_running = bool(remaining)


def _step(remaining: dict[int, int], number: int) -> StepOutputs:
    updates = []
    for request_id in list(remaining):
        remaining[request_id] -= 1
        token_id = 3 + (request_id * 977 + number * 331) % (VOCAB_SIZE - 3)
        has_ended = remaining[request_id] == 0
        updates.append(RequestUpdate(request_id, (token_id,), finish_reason="length" if has_ended else None))
        if has_ended:
            del remaining[request_id]
    return StepOutputs(tuple(updates))


def serve(port: int, tokenizer: str, num_streams: int) -> None:
    """Be the front process."""
    import uvloop
    from corun.runtime.server.run import serve as serve_engine

    serving = ServeConfig(port=port, log_level="warning")
    config = EngineConfig(model=tokenizer)
    uvloop.run(serve_engine(config, serving, make_client=lambda config: StandIn(config, num_streams)))


@contextmanager
def server(tokenizer: str, num_streams: int) -> Iterator[tuple[int, int]]:
    """Run the front process; gives port and process id once it accepts connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, __file__, "--serve", str(port), "--tokenizer", tokenizer]
    process = subprocess.Popen([*command, "--streams", str(num_streams)])
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError("the server did not start") from None
                time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def run_streams(port: int, num_streams: int, num_tokens: int) -> int:
    """Run all streams to their end, mostly asleep; how many bytes came."""
    num_bytes = 0
    with ExitStack() as stack:
        remaining = [stack.enter_context(_sent(port, number, num_tokens)) for number in range(num_streams)]
        while remaining:
            time.sleep(DRAIN_INTERVAL_S)
            still = []
            for sock in remaining:
                try:
                    data = sock.recv(_RECEIVE_BYTES)
                except BlockingIOError:
                    still.append(sock)
                    continue
                num_bytes += len(data)
                if data:
                    still.append(sock)
            remaining = still
    return num_bytes


@contextmanager
def _sent(port: int, number: int, num_tokens: int) -> Iterator[socket.socket]:
    body = json.dumps(
        {"prompt": [3 + number, 5, 7, 9], "max_tokens": num_tokens, "temperature": 0, "stream": True}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(head.encode() + body)
        sock.setblocking(False)
        yield sock


def _run_ns(pid: int) -> int:
    """Processor time of a process, from the scheduler's own count."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total


def measure(tokenizer: str, num_streams: int, num_tokens: int, num_runs: int) -> list[dict[str, float]]:
    """Measure several runs on one server, after one that is not counted."""
    figures = []
    with server(tokenizer, num_streams) as (port, pid):
        process = psutil.Process(pid)
        for run in range(num_runs + 1):
            switches = process.num_ctx_switches()
            start_ns, system_s = _run_ns(pid), process.cpu_times().system
            begin_s = time.monotonic()
            num_bytes = run_streams(port, num_streams, num_tokens)
            wall_s = time.monotonic() - begin_s
            total = num_streams * num_tokens
            after = process.num_ctx_switches()
            if run:
                figures.append(
                    {
                        "us_per_token": (_run_ns(pid) - start_ns) / total / 1e3,
                        "kernel_us": (process.cpu_times().system - system_s) / total * 1e6,
                        "bytes_per_token": num_bytes / total,
                        "switches_per_step": (sum(after) - sum(switches)) / num_tokens,
                        "wall_s": wall_s,
                    }
                )
    return figures


def medians_of(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the runs."""
    return {name: round(statistics.median(one[name] for one in figures), 2) for name in figures[0]} | {
        "runs": len(figures)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or be the process that an option names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokenizer", help="directory of a tokenizer; default: the benchmarks' words")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # The two processes that are measured, or should do nothing, import none of this.
    if options.engine is not None:
        sock = socket.socket(fileno=options.engine)
        tell_tokens(sock, options.tokenizer, options.streams)
        return
    if options.serve is not None:
        serve(options.serve, options.tokenizer, options.streams)
        return
    from models import save_tokenizer
    from paired import report

    with tempfile.TemporaryDirectory() as directory:
        if options.tokenizer is None:
            save_tokenizer(VOCAB_SIZE, Path(directory))
        figures = measure(options.tokenizer or directory, options.streams, options.tokens, options.runs)
    workload = {"streams": options.streams, "tokens": options.tokens, "step_s": STEP_S}
    report("streamed_token", workload, medians_of(figures), {})


if __name__ == "__main__":
    main()
