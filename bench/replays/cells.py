"""One recipe at one rate under one policy, on virtual time, and its results."""

import itertools
import random
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from corun.runtime.coldstart.planner import BY_PRICE, PlannerConfig
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import ConfigError
from corun.runtime.memory.make import MakeMemoryPolicy
from corun.runtime.memory.papers.libra import PARTS
from corun.runtime.memory.policies.corun import CorunMemoryPolicy
from corun.runtime.memory.policies.registry import MEMORY_POLICIES
from corun.runtime.plan import RequestId
from corun.runtime.request import Request
from corun.runtime.scheduler.predictor import HistoryPredictor, OutputPredictor
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES
from corun.runtime.sim import configure
from corun.runtime.sim.engine import SimulationOptions, simulate
from corun.runtime.sim.figures import Figures, figures_of
from corun.runtime.sim.machines import AS_MODELLED, Factors, SimulatedMachine
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.papers.recipes import RECIPES
from corun.runtime.sim.workloads import Workload, make_workload

BASELINE = "slora"  # fcfs without headroom, which drops idle adapters, as S-LoRA does
POLICIES = (BASELINE, *SCHEDULER_POLICIES)
# ``corun``, but KV leaves the device together with its adapter.
TIED = "corun-tied"
# FastLibra-WOM, -WOS, -WOL; and without watermarks.
LIBRA_VARIANTS = tuple(f"libra:{part}=0" for part in PARTS)
SWAPPING = "corun:swapper=1"
MEMORY = (*MEMORY_POLICIES, TIED, SWAPPING, *LIBRA_VARIANTS)
SPLIT = "static-split"
_SPLIT_SHARE = 0.2  # of memory, for adapters
PAGES = "-pages"  # ends the name of a machine that is to have pages as on CUDA
ACCURACY = 0.8  # of the oracle
_NUM_BUCKETS = 5  # of the oracle


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run. The same seed gives all policies the same requests at the same times."""

    recipe: str
    rate_rps: float
    policy: str  # of POLICIES
    accuracy: float | None  # of the oracle; None = the predictor is ``history``
    seed: int
    num_requests: int
    # Of MEMORY: keeps prefixes, too. None = adapters alone are kept, as each policy did in the
    # days of the bounds it is held to.
    memory_policy: str | None = None
    # A name or a profile's file; None = the one that the recipe is meant for.
    machine: str | None = None
    host_kv_gib: int = 0
    load_strategy: LoadStrategy | None = None  # None = the planner's choice
    cold_priority: float = BY_PRICE.priority
    max_stall_share: float | None = None
    link_share: float = 1.0  # of the machine's link

    @property
    def name(self) -> str:
        """For people and files."""
        parts = (
            self.recipe,
            f"{self.rate_rps:g}rps",
            self.policy,
            predictor_name(self.accuracy),
            f"seed{self.seed}",
            f"{self.num_requests}",
            self.memory_policy,
            self._machine_name,
            f"host{self.host_kv_gib}" if self.host_kv_gib else None,
            self.load_strategy,
            None if self.cold_priority == BY_PRICE.priority else f"priority{self.cold_priority:g}",
            None if self.max_stall_share is None else f"stall{self.max_stall_share:g}",
            None if self.link_share == 1.0 else f"link{self.link_share:g}",
        )
        return "-".join(part for part in parts if part is not None)

    @property
    def _machine_name(self) -> str | None:
        if self.machine is None or not (profile := Path(self.machine)).is_file():
            return self.machine
        return f"{profile.stem}{zlib.crc32(profile.read_bytes()):08x}"


def predictor_name(accuracy: float | None) -> str:
    """``history``, or the oracle with its accuracy in percent."""
    return "history" if accuracy is None else f"oracle{accuracy * 100:g}"


def machine_of(recipe: str) -> SimulatedMachine:
    """The one that the recipe is meant for."""
    return MACHINES[RECIPES[recipe].machine]


def _machine(cell: Cell) -> SimulatedMachine:
    if cell.machine is None:
        return machine_of(cell.recipe)
    name = cell.machine.removesuffix(PAGES)
    machine = configure.machine_of(name, cell.recipe, EngineConfig(model=name), frozenset())
    return machine if name == cell.machine else replace(machine, has_pages=True)


def run_cell(cell: Cell, traces: Path | None) -> Figures:
    """Simulate. Raises ``ConfigError`` if there is no such recipe, policy or trace."""
    machine = _machine(cell)
    if cell.link_share != 1.0:
        link = replace(machine.model.link, bytes_per_s=cell.link_share * machine.model.link.bytes_per_s)
        machine = replace(machine, model=replace(machine.model, link=link))
    return simulate_cell(cell, machine, workload_of(cell, traces))


def workload_of(cell: Cell, traces: Path | None) -> Workload:
    """Its requests. Raises ``ConfigError`` if there is no such recipe or trace."""
    return make_workload(
        cell.recipe, rate_rps=cell.rate_rps, num_requests=cell.num_requests, seed=cell.seed, traces=traces
    )


def simulate_cell(
    cell: Cell, machine: SimulatedMachine, workload: Workload, factors: Factors = AS_MODELLED
) -> Figures:
    """Let ``machine`` serve the cell's requests. Raises ``ConfigError`` for unknown policies."""
    options = replace(options_of(cell), factors=factors)
    return figures_of(simulate(machine, workload, options), workload, machine)


def options_of(cell: Cell) -> SimulationOptions:
    """What the cell's engine has that others have not."""
    options = SimulationOptions(
        scheduling_policy=cell.policy,
        make_predictor=partial(predictor_of, cell),
        cold_starts=PlannerConfig(
            forced=cell.load_strategy, priority=cell.cold_priority, max_stall_share=cell.max_stall_share
        ),
    )
    if cell.policy == BASELINE:
        options = replace(options, scheduling_policy="fcfs", growth_headroom=0.0, memory_policy="slora")
    if cell.memory_policy is not None:
        options = replace(
            options,
            memory_policy=_memory_policy(cell.memory_policy),
            prefix_cache=True,
            adapter_memory_fraction=_SPLIT_SHARE if cell.memory_policy == SPLIT else None,
            host_bytes=cell.host_kv_gib * 2**30 or None,
        )
    return options


def _memory_policy(name: str) -> str | MakeMemoryPolicy:
    return partial(CorunMemoryPolicy, ties_kv_to_adapter=True) if name == TIED else name


def predictor_of(cell: Cell, output_tokens: Mapping[RequestId, int]) -> OutputPredictor:
    """Of what requests generate; ``output_tokens``: the truth, for an oracle."""
    if cell.accuracy is None:
        return HistoryPredictor()
    return OraclePredictor(output_tokens, cell.accuracy, random.Random(cell.seed))


class OraclePredictor:
    """Predicts from the true lengths, with a given accuracy.

    Lengths are divided into five buckets of equally many requests. ``accuracy`` is the probability
    of the right bucket; a wrong one is a neighbour. The prediction is the mean of the bucket.

    Source: the buckets are those of uServe's proxy model (Chameleon, section 4.2), where accuracy
    is not defined.
    """

    def __init__(self, output_tokens: Mapping[RequestId, int], accuracy: float, rng: random.Random) -> None:
        """``output_tokens``: of all requests to come. Raises ``ConfigError``."""
        if not 0.0 <= accuracy <= 1.0:
            raise ConfigError(f"the accuracy of the oracle is {accuracy}, must be from 0 to 1")
        self._output_tokens = output_tokens
        self._accuracy = accuracy
        self._rng = rng
        self._buckets = _buckets(sorted(output_tokens.values()))
        self._uppers = [bucket[-1] for bucket in self._buckets[:-1]]

    def predict(self, request: Request) -> int:
        return self.predicted(request.request_id)

    def predicted(self, request_id: RequestId) -> int:
        """Return a prediction, drawn independently on each call."""
        length = self._output_tokens[request_id]
        index = bisect_left(self._uppers, length)
        if self._rng.random() >= self._accuracy:
            neighbours = [one for one in (index - 1, index + 1) if 0 <= one < len(self._buckets)]
            index = self._rng.choice(neighbours or [index])
        bucket = self._buckets[index]
        return round(sum(bucket) / len(bucket))

    def ended(self, request: Request) -> None:
        """Do nothing."""


def _buckets(lengths: Sequence[int]) -> list[Sequence[int]]:
    """Divide sorted lengths into buckets of equal size; fewer buckets if there are few lengths."""
    edges = sorted({len(lengths) * index // _NUM_BUCKETS for index in range(_NUM_BUCKETS + 1)})
    return [lengths[start:end] for start, end in itertools.pairwise(edges)]
