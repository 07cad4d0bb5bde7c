"""A gateway's latency to the first byte, and its throughput in requests and tokens.

The gateway has a core for itself; client, engines and controller share the others.
"""

import os
import statistics
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from paired import MAX_CONTROL_SPREAD, Ratio, ratio_of

from .plain_client import Asker, request_bytes, throughput
from .rig import Cluster, cpu_halves, plain_engines

MAX_ADDED_MS = 1.5
MIN_REQUESTS_PER_S, MIN_TOKENS_PER_S = 1000.0, 40_000.0
_NUM_ENGINES, _STEP_S = 2, 0.01
_NUM_ROUNDS, _ROUND_REQUESTS = 15, 60
_NUM_ASKING, _NUM_STREAMING, _STREAM_TOKENS = 64, 600, 400
_MEASURED_S, _NUM_MEASURED = 5.0, 7


def first_figures() -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Measure all three; figures and bounds."""
    gateway_cpus, other_cpus = cpu_halves()
    os.sched_setaffinity(0, other_cpus)
    with (
        plain_engines(_NUM_ENGINES, other_cpus, _STEP_S) as urls,
        Cluster(urls, gateway_cpus=gateway_cpus) as cluster,
    ):
        figures, bounds = _first_byte(_address(urls[0]), cluster.address)
        for name, low, measure in (
            ("requests/s", MIN_REQUESTS_PER_S, lambda: _requests_per_s(cluster.address)),
            ("tokens/s", MIN_TOKENS_PER_S, lambda: _tokens_per_s(cluster.address)),
        ):
            figures[name], bounds[f"{name} >= {low:,.0f}"] = rate_of(cluster, measure, low)
            print(f"{name}: {figures[name]}", flush=True)
    return figures, bounds


def _first_byte(
    direct: tuple[str, int], gateway: tuple[str, int]
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    """In turn, each by one connection; beside it direct against direct."""
    askers = {"direct": Asker(direct), "again": Asker(direct), "gateway": Asker(gateway)}
    median_ms: dict[str, list[float]] = {name: [] for name in askers}
    for number in range(_NUM_ROUNDS + 1):
        order = list(askers) if number % 2 else list(askers)[::-1]
        for name in order:
            times = [askers[name].first_byte_s() for _ in range(_ROUND_REQUESTS)]
            if number:  # the first one warms up
                median_ms[name].append(1e3 * statistics.median(times))
    for asker in askers.values():
        asker.close()
    added = ratio_of([a - b for a, b in zip(median_ms["gateway"], median_ms["direct"], strict=True)])
    control = ratio_of([a / b for a, b in zip(median_ms["again"], median_ms["direct"], strict=True)])
    figures = {
        "first byte, direct, ms": round(statistics.median(median_ms["direct"]), 3),
        "first byte, gateway adds, ms": added.to_json(),
        "first byte, direct over direct": control.to_json(),
    }
    for name, value in figures.items():
        print(f"{name}: {value}", flush=True)
    # Noise of the direct path matters as far as it is as large as what is added.
    direct_ms = statistics.median(median_ms["direct"])
    is_quiet = control.spread * direct_ms < max(MAX_CONTROL_SPREAD * direct_ms, 0.1 * MAX_ADDED_MS)
    verdict = added.high <= MAX_ADDED_MS if is_quiet else None
    return figures, {f"first byte p50 <= {MAX_ADDED_MS} ms more": verdict}


def rate_of(cluster: Cluster, measure: Callable[[], float], low: float) -> tuple[dict[str, float], bool]:
    """Several times; the lower end of the interval is what is judged.

    The gateway's share of its core is reported too, without influence on the verdict.
    """
    before_s, start_s = cluster.gateway_cpu_s, time.monotonic()
    values = [measure() for _ in range(_NUM_MEASURED)]
    busy = (cluster.gateway_cpu_s - before_s) / (time.monotonic() - start_s)
    found: Ratio = ratio_of(values)
    figures = found.to_json() | {
        "gateway busy": round(busy, 3),
        "a second of its processor": round(found.median / busy),
    }
    return figures, found.low >= low


def _requests_per_s(address: tuple[str, int]) -> float:
    request = request_bytes(stream=False, max_tokens=1)
    requests_per_s, _ = throughput(
        address, request, b"}", num_connections=_NUM_ASKING, measured_s=_MEASURED_S
    )
    return requests_per_s


def _tokens_per_s(address: tuple[str, int]) -> float:
    request = request_bytes(stream=True, max_tokens=_STREAM_TOKENS)
    return throughput(address, request, b"0\r\n\r\n", num_connections=_NUM_STREAMING, measured_s=_MEASURED_S)[
        1
    ]


def _address(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port
