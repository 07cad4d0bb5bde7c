"""Servers as routers see them, for tests and in a state of the test's choice."""

import random
from typing import Any

from corun.profiles.curve import Curve
from corun.profiles.models import LinkModel, LoraModel, MachineModel
from corun.runtime.cluster.policy.reports import RouteRequest, ServerCosts, ServerId, ServerReport
from corun.runtime.cluster.policy.views import ServerView

BYTES_PER_RANK = 1_000_000


def machine_model(*, is_padded: bool = False) -> MachineModel:
    """10 ms a step, 0.1 ms a prompt token, 1 us per rank of rows and per token and rank."""
    return MachineModel(
        num_layers=2,
        step_s=Curve((0.0, 1000.0), (0.0, 0.1)),
        groups=(),
        invocation_s=0.0,
        lora=LoraModel(
            decode_s_per_byte=1e-6 / BYTES_PER_RANK,
            decode_fixed_s=0.0,
            prefill_s_per_token_byte=1e-6 / BYTES_PER_RANK,
            prefill_fixed_s=0.0,
            is_padded=is_padded,
        ),
        link=LinkModel(bytes_per_s=1e9, latency_s=0.0),
        num_workers=0,
        host_step_s=10e-3,
        decode_token_share=0.0,
    )


def server_costs(*, is_padded: bool = False, **changes: Any) -> ServerCosts:
    """Chunks of 1,000 tokens, 32 rows; files at 0.5 GB/s, peers at 0.1 GB/s."""
    values: dict[str, Any] = {
        "model": machine_model(is_padded=is_padded),
        "max_num_batched_tokens": 1000,
        "block_size": 16,
        "max_num_seqs": 32,
        "adapter_bytes_per_rank": BYTES_PER_RANK,
        "file_bytes_per_s": 0.5e9,
        "peer_bytes_per_s": 0.1e9,
    }
    return ServerCosts(**(values | changes))


def server_report(**changes: Any) -> ServerReport:
    """An idle server that has just reported."""
    values: dict[str, Any] = {
        "reported_s": 0.0,
        "num_running_by_rank": {},
        "num_waiting_by_rank": {},
        "free_kv_tokens": 100_000,
        "total_kv_tokens": 100_000,
    }
    return ServerReport(**(values | changes))


def servers_of(*reports: ServerReport, costs: ServerCosts | None = None) -> list[ServerView]:
    """Servers s0, s1, ... of one kind."""
    costs = costs or server_costs()
    return [ServerView(ServerId(f"s{index}"), costs, report) for index, report in enumerate(reports)]


def request_of(rank: int = 0, **changes: Any) -> RouteRequest:
    """100 tokens of prompt, 50 of output; the adapter of a rank is named by it."""
    values: dict[str, Any] = {
        "adapter_name": f"r{rank}" if rank else None,
        "num_prompt_tokens": 100,
        "predicted_output_tokens": 50.0,
        "rank": rank,
        "num_bytes": rank * BYTES_PER_RANK,
    }
    return RouteRequest(**(values | changes))


def random_report(rng: random.Random) -> ServerReport:
    """Any load, from idle to full, and any adapters of ranks 8 to 128."""
    names = [f"r{rank}" for rank in (8, 16, 32, 64, 128)]
    return server_report(
        is_ready=rng.random() < 0.9,
        num_running_by_rank={rng.choice((0, 8, 16, 64)): rng.randrange(20) for _ in range(3)},
        num_waiting_by_rank={rng.choice((0, 8, 128)): rng.randrange(20) for _ in range(2)},
        queued_prefill_tokens=rng.choice((0, rng.randrange(50_000))),
        running_context_tokens=rng.randrange(50_000),
        free_kv_tokens=rng.choice((0, rng.randrange(100_000))),
        gpu_adapters=frozenset(rng.sample(names, rng.randrange(4))),
        host_adapters=frozenset(rng.sample(names, rng.randrange(4))),
        disk_adapters=frozenset(rng.sample(names, rng.randrange(4))),
        loading_adapters=frozenset(rng.sample(names, rng.randrange(2))),
        measured_over_predicted=rng.choice((0.0, 0.5, 1.0, 4.0, float("inf"))),
    )
