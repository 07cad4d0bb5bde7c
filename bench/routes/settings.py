"""The simulated settings: servers of a machine, routers, workloads and rates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corun.runtime.config.engine import EngineConfig
from corun.runtime.sim.cluster_spec import ClusterSpec, ServerLife
from corun.runtime.sim.machines import Factors
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.papers.recipes import RECIPES
from corun.runtime.sim.study import SimulatedRun
from corun.runtime.sim.workload_spec import AdapterSpec, LengthSpec, WorkloadSpec

HORIZON_S = 60.0  # after the last arrival; a request without a start counts with this time
_NO_RANK = 1024  # divides ranks so that all are 1, which is nearly without cost

_USUAL = {"state_age_s": 0.0, "num_routers": 1, "peer_bytes_per_s": 10e9, "slow_factor": 1.0}
PRODUCTION = RECIPES["prod100"].spec
# Toppings' prompts and outputs (LMSYS: 70 and 215 tokens on average), from Azure's: 72 and 211.
SHORT_PROMPTS = LengthSpec(prompt_divisor=16)
TOPPINGS_RANKS = (8, 16, 32, 64)  # four, as in its section 7.4; which, by hand


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One column of a table: a cluster under a load."""

    machine: str
    router: str
    num_servers: int
    rate_rps: float
    workload: WorkloadSpec = PRODUCTION
    placement: str | None = None
    state_age_s: float = 0.0
    num_routers: int = 1
    store_bytes: int | None = None
    peer_bytes_per_s: float = 10e9
    slow_factor: float = 1.0  # of one server
    has_adapters: bool = True

    @property
    def name(self) -> str:
        """For people."""
        other = [
            f"{key} {getattr(self, key):g}" for key, usual in _USUAL.items() if getattr(self, key) != usual
        ]
        exponent = self.workload.adapters.rank_exponent
        other += [f"ranks by power {exponent:.2g}"] if exponent != 1.0 else []
        return ", ".join(
            (
                self.router if self.placement is None else f"{self.router} with {self.placement}",
                *other,
                *(() if self.has_adapters else ("no adapters",)),
                f"{self.num_servers} servers at {self.rate_rps:g} requests/s, {self.machine}",
            )
        )

    def runs(
        self, num_seeds: int, seconds: float, capacity: Sequence[tuple[int, float]], traces: Path | None
    ) -> list[SimulatedRun]:
        """One for each seed; settings that differ in the cluster alone get the same requests.

        ``capacity``: see ``ClusterSpec``.
        """
        slow = ServerLife(factors=Factors(step=self.slow_factor))
        lives = (slow, *(ServerLife(),) * (self.num_servers - 1))
        cluster = ClusterSpec(
            servers=lives,
            router=self.router,
            num_routers=self.num_routers,
            state_age_s=self.state_age_s,
            store_bytes=self.store_bytes,
            peer_bytes_per_s=self.peer_bytes_per_s,
            placement=self.placement,
            capacity=tuple(capacity) if self.placement is not None else (),
        )
        timed = replace(self.workload, rps=self.rate_rps, requests=None, duration_s=seconds)
        return [
            SimulatedRun(
                name=f"{self.name}, seed {seed}",
                machine=MACHINES[self.machine],
                config=EngineConfig(),
                workload=replace(timed, seed=seed),
                traces=traces,
                horizon_s=HORIZON_S,
                rank_divisor=1 if self.has_adapters else _NO_RANK,
                cluster=cluster,
            )
            for seed in range(1, num_seeds + 1)
        ]


def production(num_adapters: int, rank_exponent: float = 1.0) -> WorkloadSpec:
    """LoRAServe's, section V-E, with so many adapters."""
    adapters = replace(PRODUCTION.adapters, number=num_adapters, rank_exponent=rank_exponent)
    return replace(PRODUCTION, adapters=adapters)


# Toppings', section 7.4: Azure's functions are the adapters.
FUNCTIONS = WorkloadSpec(lengths=SHORT_PROMPTS, adapters=AdapterSpec(popularity="maf", ranks=TOPPINGS_RANKS))
