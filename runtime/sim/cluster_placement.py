"""Plans the placement of adapters' files in a simulated cluster, step by step."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ..cluster.demand import PlacementSteps
from ..cluster.policy.placement.capacity_table import CapacityTable
from ..cluster.policy.placement.plan import PlacementPolicy, StoreServer
from ..cluster.policy.placement.registry import PlacementFacts, make_placement
from ..cluster.policy.reports import ServerId, Shares
from .cluster_spec import ClusterSpec
from .engine import adapter_name
from .machines import SimulatedMachine
from .workloads import Workload


class SimulatedPlacement:
    """Placement steps over a fixed set of adapters."""

    def __init__(
        self, policy: PlacementPolicy, ranks: Mapping[str, int], bytes_per_rank: int,
        tokens_per_s: Mapping[str, float], *, store_bytes: int, every_s: float,
    ) -> None:  # fmt: skip
        """``tokens_per_s``: expected demand before the first request."""
        self.every_s = every_s
        self._ranks = ranks
        self._bytes_per_rank = bytes_per_rank
        self._store_bytes = store_bytes
        self._steps = PlacementSteps(policy)
        self._steps.expect({name: (tokens_per_s[name], 0.0) for name in ranks})
        self.record = self._steps.record
        self._has_begun = False

    def step(self, server_ids: Sequence[ServerId]) -> Shares:
        """Plan the next step for these servers, from the demand of the last step.

        Raises ``ConfigError`` if there is no room for all adapters.
        """
        if self._has_begun:
            self._steps.end_step(self.every_s)
        self._has_begun = True
        demand = [
            self._steps.demand_of(name, rank, rank * self._bytes_per_rank)
            for name, rank in self._ranks.items()
        ]
        servers = [StoreServer(server_id, self._store_bytes) for server_id in server_ids]
        return self._steps.plan(demand, servers)


def placement_of(
    machine: SimulatedMachine, workload: Workload, spec: ClusterSpec
) -> SimulatedPlacement | None:
    """The cluster's placement, which expects each adapter's mean demand in ``workload``.

    None if the cluster has none. Raises ``ConfigError`` if there is none of that name.
    """
    if spec.placement is None:
        return None
    tokens = Counter[int]()
    for one in workload.requests:
        tokens[one.adapter] += one.prompt_tokens + one.output_tokens
    duration_s = max(workload.requests[-1].arrival_s, spec.placement_every_s)
    capacity = CapacityTable(dict(spec.capacity)) if spec.capacity else None
    facts = PlacementFacts(capacity=capacity, seed=spec.seed)
    return SimulatedPlacement(
        make_placement(spec.placement, facts),
        {adapter_name(adapter): rank for adapter, rank in enumerate(workload.ranks)},
        machine.adapter_bytes_per_rank,
        {
            adapter_name(adapter): tokens[adapter] / duration_s
            for adapter in range(len(workload.ranks))
        },
        store_bytes=spec.store_bytes or sum(workload.ranks) * machine.adapter_bytes_per_rank,
        every_s=spec.placement_every_s,
    )
