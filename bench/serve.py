"""What does serving over HTTP cost, and what are the latencies under load?

Without --url it makes the benchmark's model and adapters, starts ``corun serve`` and compares, in
turn (ABBA), closed loops over HTTP with the same loops on an engine in a process of its own; then
it runs an open loop with Poisson arrivals and power-law adapters.

    python bench/serve.py [--pairs 7] [--rate 2.0] [--alpha 1.0]
    python bench/serve.py --streams 200 [--pairs 7]     # what streams cost the engine's steps
    python bench/serve.py --url http://127.0.0.1:8000 --models a b c    # any compatible server
    python bench/serve.py --url http://127.0.0.1:8000 --models a b c --workload load.yaml
"""

import argparse
import asyncio
import contextlib
import itertools
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from corun import AsyncEngine, SamplingParams
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.client import ProcessClient
from corun.runtime.errors import ConfigError
from corun.runtime.sim.draw_inputs import DIRECTORY_VARIABLE, trace_directory
from corun.runtime.sim.workload_file import read_workload
from corun.runtime.sim.workloads import draw_workload
from load import Job, Send, Workload, closed_loop, describe, http_sender, make_jobs, open_loop
from models import make_adapters, make_model
from paired import MAX_CONTROL_SPREAD, compare, report
from streams import HttpStreams, NullStreams, bounds, measure
from workload_jobs import jobs_of, send_all

REQUIRED_HTTP_SHARE = 0.9
# (clients, prompt tokens, output tokens, requests)
CLOSED_LOOPS = ((8, 128, 32, 24), (16, 64, 64, 48))
START_TIMEOUT_S = 300.0


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def corun_server(
    model: Path,
    lora_dir: Path,
    *options: str,
    preloaded: Sequence[str] = ("all",),
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, int, int]]:
    """Run ``corun serve`` and wait until it is ready; gives host, port and process id.

    ``prefix``: a command that runs another one.
    """
    port = free_port()
    command = [
        *prefix,
        sys.executable,
        *"-m corun.runtime.cli serve".split(),
        str(model),
        *("--lora-dir", str(lora_dir)),
        *(["--preload", *preloaded] if preloaded else []),
        *("--port", str(port)),
        *("--log-level", "warning"),
        *options,
    ]
    with running_server(command, port, environment=environment) as pid:
        yield "127.0.0.1", port, pid


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    port: int,
    *,
    ready_path: str = "/ready",
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Run a server and wait until it is ready; gives its process id."""
    process = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(f"http://127.0.0.1:{port}{ready_path}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{shlex.join(command)} did not become ready")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def engine_sender(engine: AsyncEngine) -> Send:
    """Send jobs to an engine without HTTP."""

    async def send(job: Job, on_tokens: Callable[[int], None]) -> None:
        params = SamplingParams(temperature=0, max_tokens=job.output_tokens, ignore_eos=True)
        async for output in engine.generate(job.prompt, params, lora_request=job.model or None):
            on_tokens(len(output.outputs[0].new_token_ids))

    return send


async def compare_with_engine(
    loop: tuple[int, int, int, int],
    over_http: Send,
    engine: AsyncEngine,
    adapters: Sequence[str],
    num_pairs: int,
) -> dict[str, Any]:
    """Measure one closed loop both ways, with its A/A control."""
    num_clients, prompt_tokens, output_tokens, num_requests = loop
    jobs = make_jobs(Workload(num_requests, prompt_tokens, output_tokens, tuple(adapters)))
    running = asyncio.get_running_loop()

    def rate(send: Send) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            future = asyncio.run_coroutine_threadsafe(closed_loop(send, jobs, num_clients), running)
            samples = future.result()
            return sum(s.num_tokens for s in samples) / (time.perf_counter() - start)

        return run

    http, direct = rate(over_http), rate(engine_sender(engine))
    await asyncio.to_thread(http)
    await asyncio.to_thread(direct)
    label = f"{num_clients} clients"
    control, _, _ = await asyncio.to_thread(compare, direct, direct, num_pairs, progress=f"{label}, control")
    share, http_rates, direct_rates = await asyncio.to_thread(
        compare, http, direct, num_pairs, progress=f"{label}, HTTP / engine"
    )
    return {
        "clients": num_clients,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "http_tokens_per_s": round(sorted(http_rates)[num_pairs // 2], 1),
        "engine_tokens_per_s": round(sorted(direct_rates)[num_pairs // 2], 1),
        "http_over_engine": share.to_json(),
        "control_spread": round(control.spread, 4),
    }


async def run_open_loop(send: Send, models: Sequence[str], arguments: Any) -> dict[str, float]:
    """Poisson arrivals with adapters drawn by a power law."""
    workload = Workload(
        num_requests=arguments.requests,
        prompt_tokens=128,
        output_tokens=32,
        adapters=tuple(models),
        alpha=arguments.alpha,
        seed=1,
    )
    start = time.perf_counter()
    samples = await open_loop(send, make_jobs(workload), arguments.rate, seed=2)
    return describe(samples, time.perf_counter() - start)


async def measure_corun(arguments: Any) -> None:
    """Everything about our own server."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model")
        lora_dir = Path(directory) / "adapters"
        adapters = list(make_adapters(model, lora_dir))
        with corun_server(model, lora_dir) as (host, port, _):
            over_http = http_sender(host, port)
            async with AsyncEngine(
                own_process=True, model=str(model), lora_dir=str(lora_dir), preload=("all",)
            ) as engine:
                cells = [
                    await compare_with_engine(loop, over_http, engine, adapters, arguments.pairs)
                    for loop in CLOSED_LOOPS
                    if loop[0] in arguments.clients
                ]
            latencies = await run_open_loop(over_http, adapters, arguments)
    bounds = {
        f"{cell['clients']} clients: HTTP >= {REQUIRED_HTTP_SHARE} of the engine": (
            None
            if cell["control_spread"] > MAX_CONTROL_SPREAD
            else cell["http_over_engine"]["low"] >= REQUIRED_HTTP_SHARE
        )
        for cell in cells
    }
    workload = {"model": "llama-150m bf16", "rate_per_s": arguments.rate, "alpha": arguments.alpha}
    report("serve", workload, {"closed": cells, "open": latencies}, bounds)


async def measure_streams(arguments: Any) -> None:
    """What so many streams cost the engine's steps."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model")
        lora_dir = Path(directory) / "adapters"
        adapters = list(make_adapters(model, lora_dir))
        models = list(itertools.islice(itertools.cycle(adapters), arguments.streams))
        max_num_seqs = str(arguments.streams)
        with corun_server(model, lora_dir, "--max-num-seqs", max_num_seqs) as (host, port, pid):
            client = ProcessClient(
                EngineConfig(
                    model=str(model), lora_dir=str(lora_dir), preload=("all",), max_num_seqs=arguments.streams
                ),
                log_level="warning",
            )
            null = NullStreams(client, asyncio.get_running_loop(), models)
            try:
                await client.start(null.receive, lambda error: print(error, file=sys.stderr))
                http = HttpStreams((host, port), pid, models)
                figures = await asyncio.to_thread(measure, http, null, arguments.pairs)
            finally:
                await client.close()
    report("serve", {"model": "llama-150m bf16"}, {"streams": figures}, bounds(figures))


def url_sender(url: str) -> Send:
    """Send jobs to a server that runs already."""
    address = urllib.parse.urlsplit(url)
    return http_sender(address.hostname or "127.0.0.1", address.port or 80)


async def measure_workload(arguments: Any) -> bool:
    """Send the requests of a workload, as they are simulated; say whether all were answered.

    Raises ``ConfigError``.
    """
    spec = read_workload(arguments.workload)
    workload = draw_workload(spec, trace_directory(arguments.traces))
    if not (arguments.models or workload.names):
        raise ConfigError("--models must name the models of this workload's adapters")
    jobs = jobs_of(workload, arguments.models, arguments.vocab_size)
    arrivals_s = [request.arrival_s for request in workload.requests]
    start = time.perf_counter()
    samples, failures = await send_all(url_sender(arguments.url), jobs, arrivals_s)
    figures = describe(samples, time.perf_counter() - start)
    if failures:
        sys.stderr.write(f"serve.py: {len(failures)} of {len(jobs)} failed: {failures[0]}\n")
    asked = {
        "url": arguments.url,
        "workload": arguments.workload,
        "seed": spec.seed,
        "requests": len(jobs),
        "span_s": round(arrivals_s[-1], 3),
    }
    bounds = {"every request is answered": not failures}
    report("serve", asked, {"open": figures, "num_failed": len(failures)}, dict(bounds))
    return not failures


async def measure_url(arguments: Any) -> None:
    """The open and closed loops alone, against any server."""
    send, models = url_sender(arguments.url), arguments.models or [""]
    closed = []
    for num_clients, prompt_tokens, output_tokens, num_requests in CLOSED_LOOPS:
        jobs = make_jobs(
            Workload(
                num_requests, prompt_tokens, output_tokens, tuple(models), vocab_size=arguments.vocab_size
            )
        )
        start = time.perf_counter()
        samples = await closed_loop(send, jobs, num_clients)
        figures = describe(samples, time.perf_counter() - start)
        closed.append({"clients": num_clients, **figures})
    latencies = await run_open_loop(send, models, arguments)
    workload = {"url": arguments.url, "rate_per_s": arguments.rate, "alpha": arguments.alpha}
    report("serve", workload, {"closed": closed, "open": latencies}, {})


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=[loop[0] for loop in CLOSED_LOOPS],
        help="which closed loops; a noisy machine needs more pairs of fewer loops",
    )
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals per second (open loop)")
    parser.add_argument("--requests", type=int, default=60, help="requests of the open loop")
    parser.add_argument("--alpha", type=float, default=1.0, help="power law of the adapters")
    parser.add_argument(
        "--streams", type=int, default=0, help="only measure the cost of this number of streams per step"
    )
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument(
        "--models", nargs="+", default=[], help="model names for requests to --url; default: its base model"
    )
    parser.add_argument("--workload", help="workload for --url: a name or file, as for corun simulate")
    parser.add_argument("--traces", help=f"trace files; default: ${DIRECTORY_VARIABLE}")
    parser.add_argument("--vocab-size", type=int, default=250, help="token ids sent to --url")
    arguments = parser.parse_args()
    if arguments.workload and not arguments.url:
        parser.error("--workload needs --url")
    if arguments.streams:
        asyncio.run(measure_streams(arguments))
    elif arguments.workload:
        try:
            if not asyncio.run(measure_workload(arguments)):
                sys.exit(1)
        except ConfigError as error:
            parser.error(str(error))
    else:
        asyncio.run(measure_url(arguments) if arguments.url else measure_corun(arguments))


if __name__ == "__main__":
    main()
