"""Where adapters' files are planned to be in a simulated cluster, step by step."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from ..cluster.policy.placement.forecast import DemandForecast
from ..cluster.policy.placement.operating_points import OperatingPoints
from ..cluster.policy.placement.plan import AdapterDemand, PlacementPolicy, StoreServer
from ..cluster.policy.placement.registry import PlacementFacts, make_placement
from ..cluster.policy.reports import ServerId, Shares
from .cluster_spec import ClusterSpec
from .engine import adapter_name
from .machines import SimulatedMachine
from .workloads import Workload


class ClusterPlacement:
    """A placement, what it has seen of demand, and its last plan."""

    def __init__(
        self, policy: PlacementPolicy, adapters: Sequence[AdapterDemand], store_bytes: int,
        every_s: float,
    ) -> None:  # fmt: skip
        """``adapters``: with what is known of their demand before anything has come."""
        self.every_s = every_s
        self._policy = policy
        self._adapters = adapters
        self._store_bytes = store_bytes
        self._forecast = DemandForecast()
        self._forecast.add({one.name: (one.tokens_per_s, 0.0) for one in adapters})
        self._prompt_tokens, self._output_tokens = Counter[str](), Counter[str]()
        self._shares: Shares = {}
        self._has_begun = False

    def note(self, adapter: str, prompt_tokens: int, output_tokens: int) -> None:
        """So many of its tokens have come, or been generated."""
        self._prompt_tokens[adapter] += prompt_tokens
        self._output_tokens[adapter] += output_tokens

    def step(self, server_ids: Sequence[ServerId]) -> Shares:
        """Plan the next step for these servers, by what came in the last.

        Raises ``ConfigError`` if there is no room for all adapters.
        """
        if self._has_begun:
            self._forecast.add(
                {
                    name: (self._prompt_tokens[name] / self.every_s,
                           self._output_tokens[name] / self.every_s)
                    for name in self._prompt_tokens | self._output_tokens
                }
            )  # fmt: skip
        self._has_begun = True
        self._prompt_tokens.clear()
        self._output_tokens.clear()
        demand = [
            AdapterDemand(
                name=one.name, rank=one.rank, num_bytes=one.num_bytes,
                tokens_per_s=self._forecast.tokens_per_s(one.name),
            )
            for one in self._adapters
        ]  # fmt: skip
        servers = [StoreServer(server_id, self._store_bytes) for server_id in server_ids]
        self._shares = self._policy.plan(demand, servers, self._shares).shares
        return self._shares

    def names_at(self) -> dict[ServerId, set[str]]:
        """Adapters by server, as planned last."""
        found = defaultdict[ServerId, set[str]](set)
        for name, row in self._shares.items():
            for server_id in row:
                found[server_id].add(name)
        return found


def placement_of(
    machine: SimulatedMachine, workload: Workload, spec: ClusterSpec
) -> ClusterPlacement | None:
    """The cluster's, which expects of each adapter what it has in the mean of ``workload``.

    None if there is none. Raises ``ConfigError`` if there is none of that name.
    """
    if spec.placement is None:
        return None
    tokens = Counter[int]()
    for one in workload.requests:
        tokens[one.adapter] += one.prompt_tokens + one.output_tokens
    duration_s = max(workload.requests[-1].arrival_s, spec.placement_every_s)
    adapters = [
        AdapterDemand(
            name=adapter_name(adapter), rank=rank, num_bytes=rank * machine.adapter_bytes_per_rank,
            tokens_per_s=tokens[adapter] / duration_s,
        )
        for adapter, rank in enumerate(workload.ranks)
    ]  # fmt: skip
    points = OperatingPoints(dict(spec.points)) if spec.points else None
    facts = PlacementFacts(points=points, seed=spec.seed)
    total_bytes = sum(one.num_bytes for one in adapters)
    return ClusterPlacement(
        make_placement(spec.placement, facts), adapters, spec.store_bytes or total_bytes,
        spec.placement_every_s,
    )  # fmt: skip
