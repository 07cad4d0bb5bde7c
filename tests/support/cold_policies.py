"""Cold requests from their registration to their rows, by the real policies and nothing else."""

from corun.cpu_workers.teams import JobModel
from corun.profiles.curve import Curve
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.runtime.adapter import AdapterFacts, AdapterLayers
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.registry import AdapterRegistry
from corun.runtime.coldstart.cold_start import PlannedColdStarts
from corun.runtime.coldstart.planner import Planner, PlannerConfig
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.memory.adapter_cache import AdapterCache
from corun.runtime.memory.block_pool import BlockPool, MemoryBudget
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import (
    AdapterId,
    RequestId,
    StepPlan,
    SubBatchKind,
    TransferProgress,
    TransferRead,
    TransferResult,
    WorkersChanged,
)
from corun.runtime.request import Request
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.limits import SchedulerConfig
from corun.runtime.scheduler.registry import make_policy
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.sim.engine import SimulationOptions, simulate
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.workloads import make_workload
from support.invariants import check_invariants
from support.scheduling import loads_of, policy_facts

_NUM_LAYERS = 4
_HOST_BYTES = (4096, 4096)  # of two layer groups
_CURVE = Curve((1.0, 101.0), (0.001, 0.101))
_MODEL = MachineModel(
    num_layers=_NUM_LAYERS,
    step_s=Curve((1.0, 101.0), (0.004, 0.404)),
    groups=(GroupModel("q_proj", _CURVE, 1 / 8),),
    invocation_s=0.00002,
    lora=LoraModel(0.0, 0.0, 0.0, 0.0),
    link=LinkModel(1000.0, 0.0),
    num_workers=1,
    job=JobModel(s_per_product=0.0002),
)
_CONFIG = SchedulerConfig(
    max_num_batched_tokens=64,
    max_num_seqs=8,
    max_model_len=64,
    block_size=4,
    max_assisted_tokens_per_step=64,
    max_assisted_rows_per_step=4,
)
ON_HOST, IN_FILES = "on the host", "in files"


class _Policies:
    """A scheduler with a planner, and a registry of two adapters."""

    def __init__(self) -> None:
        planner = Planner(_MODEL, PlannerConfig(forced=LoadStrategy.ASSISTED))
        budget = MemoryBudget(10_000)
        self.host = HostCache(2 * sum(_HOST_BYTES))
        self.memory = DeviceMemory(BlockPool(64, 100, budget), AdapterCache(budget), self.host)
        cold_starts = PlannedColdStarts(planner, (0, 512), self.memory.transfers)
        self.scheduler = Scheduler(_CONFIG, make_policy("fcfs", policy_facts()), self.memory, (), cold_starts)
        self.registry = AdapterRegistry(iter(map(AdapterId, range(1, 9))).__next__)
        layers = AdapterLayers(((8,),) * _NUM_LAYERS, (200, 200), (0, 0, 1, 1))
        for name in (ON_HOST, IN_FILES):
            facts = AdapterFacts(name, 8, 400, host_bytes=_HOST_BYTES, layers=layers)
            self.registry.ready(name, "/", self.registry.begin_loading(name, "/"), AdapterContent(facts))
        room = self.memory.registrations.begin(_HOST_BYTES)
        assert room.place is not None
        self.memory.registrations.end(room.place.place_id, ON_HOST)

    def add(self, request_id: int, name: str) -> None:
        version = self.registry.resolve(name)
        request = Request(
            request_id=RequestId(request_id),
            prompt_token_ids=(5,) * 16,
            arrival_s=0.0,
            sampling=SamplingParams(max_tokens=2),
            adapter_id=version.adapter_id,
            adapter=version.facts,
        )
        self.scheduler.add_request(request, 0.0)

    def schedule(self, now_s: float) -> StepPlan:
        plan = self.scheduler.schedule(now_s)
        assert plan is not None
        return plan


def start_cold_requests() -> None:
    """Start one request with its adapter in the host's memory, and one with it only on disk."""
    policies = _Policies()
    scheduler = policies.scheduler
    scheduler.update(WorkersChanged(1), 0.0)
    policies.add(1, ON_HOST)
    plan = policies.schedule(0.0)
    (load,), (batch,) = loads_of(plan), plan.sub_batches
    assert load.host is not None and load.host.is_filled
    assert batch.kind is SubBatchKind.ASSISTED and batch.split_layers == (_NUM_LAYERS,)

    policies.add(2, IN_FILES)
    (load,) = loads_of(policies.schedule(0.001))
    assert load.host is not None and not load.host.is_filled
    # When its first layers are there, it starts.
    scheduler.update(TransferRead(load.transfer_id, 2, 0.001), 0.002)
    scheduler.update(TransferProgress(load.transfer_id, 1), 0.002)
    plan = policies.schedule(0.002)
    assert [batch.kind for batch in plan.sub_batches] == [SubBatchKind.ASSISTED]
    scheduler.update(TransferResult(load.transfer_id), 0.003)
    assert policies.host.contains(IN_FILES)
    check_invariants(scheduler)


def simulate_requests() -> None:
    """A simulation is made of policies and of models alone."""
    workload = make_workload("S1", rate_rps=1.0, num_requests=5, seed=1, traces=None)
    replayed = simulate(MACHINES["a40-llama7b"], workload, SimulationOptions())
    assert len(replayed.records) == 5
