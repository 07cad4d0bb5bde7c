"""The routers of a simulated cluster, and the costs of a simulated machine as they know them."""

import random

from ..cluster.policy.registry import RouterFacts, default_slo_tpot_s, make_router
from ..cluster.policy.reports import ServerCosts
from ..cluster.router_state import RouterState
from .cluster_spec import ClusterSpec
from .machines import SimulatedMachine


def router_states_of(machine: SimulatedMachine, spec: ClusterSpec) -> list[RouterState]:
    """The routers of ``spec``. Raises ``ConfigError`` if there is no such router."""
    slo_tpot_s = spec.slo_tpot_s or default_slo_tpot_s(
        machine.model, machine.max_num_seqs, machine.num_blocks * machine.block_size
    )
    facts = RouterFacts(num_routers=spec.num_routers, slo_tpot_s=slo_tpot_s)
    router = spec.router
    return [
        RouterState(
            make_router(router, facts) if isinstance(router, str) else router(facts),
            random.Random(f"{spec.seed} {number}"),  # noqa: S311 - a simulation
        )
        for number in range(spec.num_routers)
    ]


def costs_of(machine: SimulatedMachine, peer_bytes_per_s: float) -> ServerCosts:
    """Costs of a server that simulates ``machine``, as routers know them."""
    return ServerCosts(
        model=machine.model,
        max_num_batched_tokens=machine.max_num_batched_tokens,
        block_size=machine.block_size,
        max_num_seqs=machine.max_num_seqs,
        adapter_bytes_per_rank=machine.adapter_bytes_per_rank,
        file_bytes_per_s=machine.file_bytes_per_s,
        peer_bytes_per_s=peer_bytes_per_s,
        mix_decode_with_prefill=machine.mix_decode_with_prefill,
    )
