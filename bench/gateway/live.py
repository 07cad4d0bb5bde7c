"""Engines on the real clock behind a gateway: against the simulator, and router by router."""

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from corun.runtime.sim.cluster import replay_cluster
from corun.runtime.sim.cluster_spec import ClusterSpec, ServerLife
from corun.runtime.sim.engine import SimulationOptions, adapter_name, request_of
from corun.runtime.sim.machines import Factors, slowed
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.workload_spec import AdapterSpec, LengthSpec, WorkloadSpec
from corun.runtime.sim.workloads import Workload, draw_workload
from paired import ratio_of
from support.latency_engine import LatencyServer, LatencySettings, save_tiny_adapter

from .rig import KEY, Cluster, get

MAX_MEAN_OFF, MAX_SHARE_OFF = 0.15, 0.03
MAX_P95_OVER_P2C, MAX_P95_OVER_NONE_SLOW = 1.0, 1.3
_NUM_ENGINES = 12
# All times are four times those of the modelled machine, so that the time of the real server and
# core, and the sharing of two cores, is small against them.
_TIME_SCALE = 4.0
_RATE_RPS, _SIM_S, _SLOW_S, _WARM_SHARE = 16.0, 150.0, 45.0, 0.2
_NUM_SLOW, _SLOWNESS = 4, 1.5  # of sim
_SEEDS = (1, 2)
_MACHINE = replace(
    MACHINES["a40-llama7b"],
    name="a40-llama7b, slowed",
    model=slowed(MACHINES["a40-llama7b"].model, Factors(_TIME_SCALE, _TIME_SCALE, _TIME_SCALE)),
)


def sim_figures() -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Hold live ones to ``replay_cluster``: the same requests, routers and engines."""
    slowness = [_SLOWNESS] * _NUM_SLOW + [1.0] * (_NUM_ENGINES - _NUM_SLOW)
    workload = _workload(_SIM_S, seed=1)
    first = round(_WARM_SHARE * len(workload.requests))
    replayed = replay_cluster(
        _MACHINE,
        workload,
        SimulationOptions(host_bytes=1 << 40),
        ClusterSpec(servers=tuple(ServerLife(factors=Factors(step=one)) for one in slowness)),
    )
    simulated_s = statistics.mean(
        one.first_token_s - one.arrival_s for one in replayed.records[first:] if one.first_token_s is not None
    )
    shares = [number / len(workload.requests) for number in replayed.num_routed]
    with _engines(slowness) as engines, _cluster(engines, workload) as cluster:
        seen = _serve(cluster, workload)
        live_shares = _live_shares(cluster, engines)
    live_s = statistics.mean(seen[first:])
    share_off = max(abs(a - b) for a, b in zip(shares, live_shares, strict=True))
    figures = {
        "sim: mean first token, live, s": round(live_s, 4),
        "sim: mean first token, simulated, s": round(simulated_s, 4),
        "sim: live over simulated": round(live_s / simulated_s, 4),
        "sim: shares, simulated": [round(one, 4) for one in shares],
        "sim: shares, live": [round(one, 4) for one in live_shares],
        "sim: largest difference of shares": round(share_off, 4),
    }
    for name, value in figures.items():
        print(f"{name}: {value}", flush=True)
    return figures, {
        f"mean first token within {MAX_MEAN_OFF:.0%} of simulated": abs(live_s / simulated_s - 1)
        <= MAX_MEAN_OFF,
        f"shares within {MAX_SHARE_OFF:.0%} of simulated": share_off <= MAX_SHARE_OFF,
    }


def slow_figures() -> tuple[dict[str, Any], dict[str, bool | None]]:
    """One of twelve four times slower: P95 by router, and where none is slow."""
    p95_s: dict[str, list[float]] = {"predicted": [], "p2c": [], "none slow": []}
    for seed in _SEEDS:
        workload = _workload(_SLOW_S, seed=seed)
        for name in list(p95_s) if seed % 2 else list(p95_s)[::-1]:
            slowness = [1.0 if name == "none slow" else 4.0] + [1.0] * (_NUM_ENGINES - 1)
            router = "p2c" if name == "p2c" else "predicted"
            with _engines(slowness) as engines, _cluster(engines, workload, "--router", router) as cluster:
                seen = _serve(cluster, workload)[round(_WARM_SHARE * len(workload.requests)) :]
            p95_s[name].append(float(np.percentile(seen, 95)))
            print(f"slow: {name}: P95 {p95_s[name][-1]:.3f} s", flush=True)
    over_p2c = ratio_of([a / b for a, b in zip(p95_s["predicted"], p95_s["p2c"], strict=True)])
    over_none = ratio_of([a / b for a, b in zip(p95_s["predicted"], p95_s["none slow"], strict=True)])
    figures = {
        "slow: P95 first token, predicted over p2c": over_p2c.to_json(),
        "slow: P95 first token, predicted over none slow": over_none.to_json(),
    }
    return figures, {
        f"P95 over p2c <= {MAX_P95_OVER_P2C}": over_p2c.median <= MAX_P95_OVER_P2C,
        f"P95 over none slow <= {MAX_P95_OVER_NONE_SLOW}": over_none.median <= MAX_P95_OVER_NONE_SLOW,
    }


def _workload(duration_s: float, *, seed: int) -> Workload:
    spec = WorkloadSpec(
        lengths=LengthSpec(prompt_divisor=3, output_divisor=6),
        adapters=AdapterSpec(number=10),
        rps=_RATE_RPS,
        requests=None,
        duration_s=duration_s,
        seed=seed,
    )
    return draw_workload(spec, None)


@contextlib.contextmanager
def _engines(slowness: Sequence[float]) -> Iterator[list[LatencyServer]]:
    with contextlib.ExitStack() as stack:
        servers = []
        for one in slowness:
            settings = LatencySettings(machine=_MACHINE, slowness=one)
            keys = ("--api-key", KEY, "--admin-key", KEY)
            server = LatencyServer(settings, *keys, "--max-num-waiting", "4096")
            stack.callback(server.close)
            servers.append(server)
        for server in servers:
            server.wait_ready()
        yield servers


@contextlib.contextmanager
def _cluster(engines: Sequence[LatencyServer], workload: Workload, *options: str) -> Iterator[Cluster]:
    """With the adapters loaded."""
    with tempfile.TemporaryDirectory() as name, Cluster([one.url for one in engines], *options) as cluster:
        for adapter, rank in enumerate(workload.ranks):
            path = save_tiny_adapter(Path(name) / str(adapter), rank=rank, seed=adapter)
            cluster.load(adapter_name(adapter) or "", path)
        time.sleep(3.0)  # until all engines have the adapters
        yield cluster


def _serve(cluster: Cluster, workload: Workload) -> list[float]:
    """Send each request when it is due, however others fare; seconds from then to first tokens."""
    return uvloop.run(_send_all(cluster.address, workload))


async def _send_all(address: tuple[str, int], workload: Workload) -> list[float]:
    loop = asyncio.get_running_loop()
    start_s = loop.time() + 0.5
    tasks = []
    for index, one in enumerate(workload.requests, start=1):
        delay_s = start_s + one.arrival_s - loop.time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        due_s = start_s + one.arrival_s
        tasks.append(asyncio.ensure_future(_send(address, _body(workload, index), due_s)))
    return list(await asyncio.gather(*tasks))


def _body(workload: Workload, index: int) -> bytes:
    request = request_of(workload, index)
    return json.dumps(
        {
            "model": request.adapter_name,
            "prompt": request.prompt_token_ids,
            "stream": True,
            "max_tokens": workload.requests[index - 1].output_tokens,
            "ignore_eos": True,
        }
    ).encode()


async def _send(address: tuple[str, int], body: bytes, due_s: float) -> float:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(*address)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    first_s = None
    data = b""
    while piece := await reader.read(1 << 16):
        data += piece
        if first_s is None and b"data: {" in data:
            first_s = loop.time() - due_s
    writer.close()
    if first_s is None or not data.startswith(b"HTTP/1.1 200") or b"[DONE]" not in data:
        raise RuntimeError(f"a request failed: {data[:400]!r}")
    return first_s


def _live_shares(cluster: Cluster, engines: Sequence[LatencyServer]) -> list[float]:
    """By what the gateway says that it has sent."""
    sent = Counter[str]()
    for line in get(cluster.url, "/metrics").splitlines():
        if "gateway_engine_requests_total{" in line:
            engine = line.partition('engine="')[2].partition('"')[0]
            sent[engine] += int(float(line.rpartition(" ")[2]))
    total = sum(sent.values())
    return [sent[one.url] / total for one in engines]
