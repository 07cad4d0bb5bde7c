"""How long does a router take to rank servers for a request?

60 servers of a simulated machine, each with about 40 requests and 200 of 1,000 adapters; after each
choice the server's view is told, as in service, and each server reports anew every 0.3 s at 200
requests a second. Judged: the median of ``rank``, of every router, at most 100 us. The last line is
JSON.

    python bench/routing_cost.py [--servers 60] [--requests 2000] [--machine tp4-llama7b-padded]
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from time import perf_counter

from corun.runtime.cluster.policy.registry import ROUTERS, RouterFacts, make_router
from corun.runtime.cluster.policy.reports import RouteRequest, ServerCosts, ServerId, ServerReport
from corun.runtime.cluster.policy.views import ServerView
from corun.runtime.sim.machines import MACHINES, SimulatedMachine

MAX_RANK_US = 100.0
_NUM_ADAPTERS, _NUM_ON_DISK, _NUM_ON_GPU = 1000, 200, 40
_RANKS = (8, 16, 32, 64, 128)
_REQUESTS_PER_S, _REPORT_S = 200, 0.3


def costs_of(machine: SimulatedMachine) -> ServerCosts:
    """Of a server that is such a machine, with peers at 1 GB/s."""
    return ServerCosts(
        model=machine.model,
        max_num_batched_tokens=machine.max_num_batched_tokens,
        block_size=machine.block_size,
        max_num_seqs=machine.max_num_seqs,
        adapter_bytes_per_rank=machine.adapter_bytes_per_rank,
        file_bytes_per_s=machine.file_bytes_per_s,
        peer_bytes_per_s=1e9,
        mix_decode_with_prefill=machine.mix_decode_with_prefill,
    )


def report_at(told_s: float, rng: random.Random) -> ServerReport:
    """A server that is busy."""
    on_disk = [f"adapter-{index}" for index in rng.sample(range(_NUM_ADAPTERS), _NUM_ON_DISK)]
    return ServerReport(
        told_s=told_s,
        num_running_by_rank={rank: rng.randrange(10) for rank in _RANKS},
        num_waiting_by_rank={rank: rng.randrange(3) for rank in _RANKS},
        queued_prefill_tokens=rng.randrange(5000),
        running_context_tokens=rng.randrange(20_000, 60_000),
        free_kv_tokens=rng.randrange(40_000),
        total_kv_tokens=100_000,
        gpu_adapters=frozenset(on_disk[:_NUM_ON_GPU]),
        host_adapters=frozenset(on_disk[: 2 * _NUM_ON_GPU]),
        disk_adapters=frozenset(on_disk),
    )


def request_for(machine: SimulatedMachine, rng: random.Random) -> RouteRequest:
    """Half of them belong to a session."""
    index = rng.randrange(_NUM_ADAPTERS)
    rank = _RANKS[index % len(_RANKS)]
    return RouteRequest(
        f"adapter-{index}", rng.randrange(50, 3000), rng.uniform(10.0, 500.0),
        f"session-{rng.randrange(500)}" if rng.random() < 0.5 else None,
        rank, rank * machine.adapter_bytes_per_rank,
    )  # fmt: skip


def measure(
    name: str, machine: SimulatedMachine, num_servers: int, number: int
) -> dict[str, float]:
    """Microseconds of ``rank``, and of telling the view and the router of the choice."""
    rng = random.Random(0)
    router = make_router(name, RouterFacts(slo_tpot_s=0.05))
    costs = costs_of(machine)
    ids = [ServerId(f"server-{index}") for index in range(num_servers)]
    views = {server_id: ServerView(server_id, costs, report_at(0.0, rng)) for server_id in ids}
    router.on_placed(
        {
            f"adapter-{index}": dict.fromkeys(rng.sample(ids, min(3, num_servers)), 1 / 3)
            for index in range(_NUM_ADAPTERS)
        }
    )
    servers = list(views.values())
    rank_s, assign_s = [], []
    for turn in range(number):
        now_s = turn / _REQUESTS_PER_S
        for _ in range(round(num_servers / _REPORT_S / _REQUESTS_PER_S)):
            rng.choice(servers).tell(report_at(now_s, rng))
        request = request_for(machine, rng)
        begin_s = perf_counter()
        order = router.rank(request, servers, now_s, rng)
        rank_s.append(perf_counter() - begin_s)
        begin_s = perf_counter()
        views[order[0]].assign(request, now_s)
        router.on_assigned(request, order[0])
        assign_s.append(perf_counter() - begin_s)
    return {
        "rank_us": _median_us(rank_s),
        "rank_p99_us": round(sorted(rank_s)[int(0.99 * len(rank_s))] * 1e6, 1),
        "assign_us": _median_us(assign_s),
    }


def _median_us(times_s: Sequence[float]) -> float:
    return round(statistics.median(times_s) * 1e6, 1)


def main() -> None:
    """Measure all routers, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", type=int, default=60)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--machine", choices=MACHINES, default="tp4-llama7b-padded")
    args = parser.parse_args()
    figures = {
        name: measure(name, MACHINES[args.machine], args.servers, args.requests) for name in ROUTERS
    }
    for name, row in figures.items():
        print(f"{name:16} " + "  ".join(f"{key} {value:7.1f}" for key, value in row.items()))
    holds = all(row["rank_us"] <= MAX_RANK_US for row in figures.values())
    print(json.dumps({"servers": args.servers, "routers": figures, "holds": holds}))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
