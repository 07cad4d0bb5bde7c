"""What do clients of a cluster notice when a part of it fails?

A gateway, a controller, agents and engines run as processes of this machine, under 30 streams per
second. Engines are fakes that compute nothing, except where contents are compared. Each fault
happens several times, and the worst of each figure is compared with its bound. The last line is
JSON.

    python bench/cluster_faults.py [--faults engine-kill,...] [--repeats 5]
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from clusters.engine_faults import (
    Figures,
    as_text,
    client_leaves,
    engine_kill,
    engine_stop,
    engines_come_and_go,
    exceeded,
    restarts_by_drain,
)
from clusters.live import LiveCluster, agent_settings, live_cluster, start_agent
from clusters.reloaded import reloads_of_demo
from clusters.state_faults import bad_peers, controller_kill
from corun.runtime.config.engine import EngineConfig
from corun.runtime.server.listening import bind
from paired import report
from support.latency_engine import LatencySettings, save_tiny_adapter

_NUM_ENGINES, _NUM_ADAPTERS = 3, 8
_SECOND_HOST = "127.0.0.3"

_NO_FAILURE = {"lost before first byte": 0.0, "silent ends": 0.0, "others cut": 0.0}
# Largest value of each figure; other figures are only reported.
BOUNDS: Mapping[str, Figures] = {
    "engine-kill": _NO_FAILURE | {"avoided s": 0.5, "replaced s": 60.0},
    "engine-stop": _NO_FAILURE
    | {"ejected s": 3.0, "open ended or retried s": 3.0, "last error s": 3.0, "back s": 5.0},
    "client-leaves": {"free before first s": 0.2, "free after first s": 0.2},
    "controller-kill": {"failed": 0.0, "back s": 2.0},
    "reloads": {"failed": 0.0, "older content": 0.0, "unknown content": 0.0},
    "restarts": _NO_FAILURE,
    "peers": {
        f"{kind}{figure}": most
        for kind in ("wrong byte", "hangs", "dies")
        for figure, most in ((" s", 5.0), (": without content", 0.0))
    },
    "come-and-go": _NO_FAILURE | {"without a copy": 0.0},
}
# Smallest value: a fault that affected no request proves nothing.
_LEAST: Mapping[str, Figures] = {"engine-kill": {"streams cut": 1.0}, "engine-stop": {"streams cut": 1.0}}

# Measures one fault under a load: the cluster, names of adapters, number of the repeat.
Fault = Callable[[LiveCluster, list[str], int], Awaitable[Figures]]

_STAND_INS: Mapping[str, Fault] = {
    "engine-kill": engine_kill,
    "engine-stop": engine_stop,
    "client-leaves": client_leaves,
    "controller-kill": controller_kill,
    "restarts": restarts_by_drain,
    "come-and-go": engines_come_and_go,
}


async def runs_of(fault: str, repeats: int) -> list[Figures]:
    """The figures of each repeat."""
    with tempfile.TemporaryDirectory(prefix="corun-faults-") as directory:
        if fault == "reloads":
            return await reloads_of_demo(Path(directory), repeats)
        async with _loaded_cluster(Path(directory), _num_engines(fault)) as (cluster, names):
            if fault == "peers":
                engine_id = await _second_agent(cluster, Path(directory))
                return [
                    await bad_peers(cluster, engine_id, Path(directory), number) for number in range(repeats)
                ]
            if fault == "come-and-go":
                await _second_agent(cluster, Path(directory), num_engines=0)
            found = []
            for number in range(repeats):
                found.append(await _STAND_INS[fault](cluster, names, number))
                print(f"{fault} {number + 1}: {as_text(found[-1])}", flush=True)
            return found


@asynccontextmanager
async def _loaded_cluster(directory: Path, num_engines: int) -> AsyncIterator[tuple[LiveCluster, list[str]]]:
    names = [f"adapter-{number}" for number in range(_NUM_ADAPTERS)]
    async with live_cluster(directory / "state", num_engines, LatencySettings()) as cluster:
        for number, name in enumerate(names):
            await cluster.load(name, save_tiny_adapter(directory / name, seed=number))
        yield cluster, names


def _num_engines(fault: str) -> int:
    return 1 if fault == "client-leaves" else _NUM_ENGINES


async def _second_agent(cluster: LiveCluster, directory: Path, num_engines: int = 1) -> str:
    """Start another agent, with a store of its own; return its first engine."""
    with bind(_SECOND_HOST, 0) as sock:
        settings = agent_settings(
            "b",
            cluster.plan.controller_url,
            directory / "b",
            sock.getsockname()[1],
            EngineConfig(model="latency"),
            max(1, num_engines),
            LatencySettings(),
            _SECOND_HOST,
        )
        start_agent(cluster, settings)
        await cluster.has_usable(_NUM_ENGINES + 1)
    if not num_engines:
        await cluster.change("remove", engine_id="b-0")
        await asyncio.sleep(2.0)
    return "b-0"


def failures_of(fault: str, figures: Figures) -> list[str]:
    """Which bounds a run exceeds."""
    return exceeded(fault, figures, BOUNDS, _LEAST)


def main() -> int:
    """Run the faults; the exit code is 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", default=",".join(BOUNDS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    figures: dict[str, Figures] = {}
    exceeded: dict[str, list[str]] = {}
    for fault in options.faults.split(","):
        began_s = time.monotonic()
        runs = asyncio.run(runs_of(fault, options.repeats))
        exceeded[fault] = [text for run in runs for text in failures_of(fault, run)]
        worst = {name: max(run[name] for run in runs) for name in runs[0]}
        figures[fault] = {name: round(value, 4) for name, value in worst.items()}
        took_s = time.monotonic() - began_s
        print(f"{fault}: worst of {len(runs)} in {took_s:.0f} s: {as_text(worst)}", flush=True)
        for text in exceeded[fault]:
            print(f"EXCEEDED {text}", flush=True)
    report(
        "cluster_faults",
        {"faults": list(figures), "repeats": options.repeats},
        figures,
        {fault: not texts for fault, texts in exceeded.items()},
    )
    return 1 if any(exceeded.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
