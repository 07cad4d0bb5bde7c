"""What do clients notice when parts of Ray, which starts a cluster's engines, fail?

A head and three nodes of Ray run on this machine, with a cluster of corun over them, under 30
streams per second; engines are fakes that compute nothing. Each run is a cluster of its own with a
file of its own; stored runs are not repeated. The last line is JSON, of all stored runs.

    python bench/ray_faults.py --out DIR [--faults raylet-kill,...] [--repeats 5]
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from clusters import ray_faults
from clusters.engine_faults import Figures, as_text, exceeded
from clusters.live import LiveCluster, live_cluster
from clusters.ray_faults import NUM_ENGINES
from paired import report, setup
from support.latency_engine import LatencySettings, save_tiny_adapter
from support.ray_cluster import OUTER_HOST, RayCluster, redis

_NUM_ADAPTERS = 8
_NUM_NODES = 3

_NO_FAILURE = {"lost before first byte": 0.0, "silent ends": 0.0, "others cut": 0.0}
CONTROL = "nothing"
# Largest value of each figure; other figures are only reported.
BOUNDS: Mapping[str, Figures] = {
    CONTROL: _NO_FAILURE,
    "control-store-kill": _NO_FAILURE | {"p99 ratio": 1.1, "whole again s": 60.0},
    "raylet-kill": _NO_FAILURE | {"replaced s": 60.0},
    "node-kill": _NO_FAILURE | {"avoided s": 0.5, "replaced s": 60.0},
    "head-kill-redis": _NO_FAILURE | {"whole again s": 60.0},
    "head-kill": _NO_FAILURE | {"whole again s": 60.0},
    "partition": _NO_FAILURE
    | {"ejected s": 3.0, "open ended or retried s": 3.0, "last error s": 3.0, "back s": 5.0},
    "rolling-restart": _NO_FAILURE,
}
# Without it a run shows nothing.
LEAST: Mapping[str, Figures] = {
    "control-store-kill": {"start refused": 1.0},
    "node-kill": {"streams cut": 1.0},
    "partition": {"streams cut": 1.0},
    "rolling-restart": {"restarts": _NUM_NODES},
}

_FAULTS: Mapping[str, Callable[[RayCluster, LiveCluster, list[str]], Awaitable[Figures]]] = {
    CONTROL: ray_faults.nothing,
    "control-store-kill": ray_faults.control_store_kill,
    "raylet-kill": ray_faults.raylet_kill,
    "node-kill": ray_faults.node_kill,
    "head-kill-redis": ray_faults.head_kill,
    "head-kill": ray_faults.head_kill,
    "partition": ray_faults.partition,
    "rolling-restart": ray_faults.rolling_restart,
}
_WITH_REDIS = ("control-store-kill", "head-kill-redis")


def run_of(fault: str) -> Figures:
    """Run one fault on a Ray cluster of its own."""
    is_cut = fault == "partition"
    os.environ.update(LatencySettings().environment())  # Ray's processes have it, and so engines
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corun-ray-")))
        port = stack.enter_context(redis()) if fault in _WITH_REDIS else None
        ray = stack.enter_context(
            RayCluster(1 if is_cut else _NUM_NODES, redis_port=port, has_separate=is_cut)
        )
        host = OUTER_HOST if is_cut else "127.0.0.1"
        return asyncio.run(_run(fault, ray, directory, host))


async def _run(fault: str, ray: RayCluster, directory: Path, host: str) -> Figures:
    names = [f"adapter-{number}" for number in range(_NUM_ADAPTERS)]
    async with live_cluster(
        directory / "state", NUM_ENGINES, LatencySettings(), ray_address=ray.address, host=host
    ) as cluster:
        for number, name in enumerate(names):
            await cluster.load(name, save_tiny_adapter(directory / name, seed=number))
        return await _FAULTS[fault](ray, cluster, names)


def exceeded_by(fault: str, figures: Figures) -> list[str]:
    """Which bounds a run exceeds."""
    return exceeded(fault, figures, BOUNDS, LEAST)


def kept_runs(directory: Path, fault: str) -> list[Figures]:
    """Figures of all runs of a fault that are kept."""
    paths = sorted(directory.glob(f"{fault}.*.json"))
    return [json.loads(path.read_text(encoding="utf-8"))["figures"] for path in paths]


def main() -> int:
    """Run what is missing; the exit code is 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--faults", default=",".join(BOUNDS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    faults = options.faults.split(",")
    for fault in faults:
        for number in range(options.repeats):
            path = options.out / f"{fault}.{number}.json"
            if path.exists():
                continue
            began_s = time.monotonic()
            figures = {name: round(value, 4) for name, value in run_of(fault).items()}
            path.write_text(json.dumps({"figures": figures, "setup": setup()}), encoding="utf-8")
            took_s = time.monotonic() - began_s
            print(f"{fault} {number} in {took_s:.0f} s: {as_text(figures)}", flush=True)
            for text in exceeded_by(fault, figures):
                print(f"EXCEEDED {text}", flush=True)
    runs = {fault: kept_runs(options.out, fault) for fault in faults}
    worst = {
        fault: {name: max(run[name] for run in found) for name in found[0]} for fault, found in runs.items()
    }
    passed = {fault: not any(exceeded_by(fault, run) for run in found) for fault, found in runs.items()}
    num_runs = {fault: len(found) for fault, found in runs.items()}
    report("ray_faults", {"runs": num_runs}, worst, dict(passed))
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
