"""How long does it take to simulate many servers?

60 servers, 1,000 adapters of LoRAServe's production workload, 300 s of arrivals at 250 requests/s,
which is more than the capacity of 60 such servers, in one process. Bound: at most 10 minutes of a
core's time. The last line is JSON.

    python bench/cluster_speed.py [--servers 60] [--adapters 1000] [--seconds 300] [--rps 250]
"""

import argparse
import json
import resource
import sys
from dataclasses import replace
from time import process_time

from corun.runtime.cluster.policy.registry import ROUTERS
from corun.runtime.sim.cluster import replay_cluster
from corun.runtime.sim.cluster_spec import ClusterSpec, ServerLife
from corun.runtime.sim.engine import SimulationOptions
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.papers.recipes import RECIPES
from corun.runtime.sim.workloads import Workload, draw_workload

MAX_S = 600.0


def workload_of(num_adapters: int, seconds: float, rate_rps: float) -> Workload:
    """Of ``prod100``, but for these."""
    spec = RECIPES["prod100"].spec
    adapters = replace(spec.adapters, number=num_adapters)
    return draw_workload(
        replace(spec, adapters=adapters, rps=rate_rps, requests=None, duration_s=seconds), None
    )


def main() -> None:
    """Simulate, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", type=int, default=60)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rps", type=float, default=250.0)
    parser.add_argument("--router", choices=ROUTERS, default="predicted")
    parser.add_argument("--machine", choices=MACHINES, default="tp4-llama7b-light")
    args = parser.parse_args()
    workload = workload_of(args.adapters, args.seconds, args.rps)
    spec = ClusterSpec(servers=(ServerLife(),) * args.servers, router=args.router)
    options = SimulationOptions(scheduling_policy="corun", prefix_cache=True)
    begin_s = process_time()
    replayed = replay_cluster(MACHINES[args.machine], workload, options, spec)
    took_s = process_time() - begin_s
    first_s = sorted((one.first_token_s or 0.0) - one.arrival_s for one in replayed.records)
    figures = {
        "requests": len(replayed.records),
        "steps": sum(one.steps.num_steps for one in replayed.servers),
        "simulated_s": round(replayed.duration_s, 1),
        "ttft_p95_s": round(first_s[int(0.95 * len(first_s))], 3),
        "cpu_s": round(took_s, 1),
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "is_met": took_s <= MAX_S,
    }
    print(json.dumps(figures))
    if not figures["is_met"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
