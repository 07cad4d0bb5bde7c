"""A simulated machine with round figures: a second per token, a thousand bytes a second."""

from dataclasses import replace

from corun.cpu_workers.teams import JobModel
from corun.profiles.curve import Curve
from corun.profiles.link import Direction
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.runtime.adapter import AdapterFacts, AdapterLayers
from corun.runtime.plan import (
    AdapterId,
    AdapterTransfer,
    BlockId,
    HostSlot,
    KvTransfer,
    NewRequest,
    RequestId,
    Result,
    StepId,
    StepPlan,
    SubBatch,
    SubBatchKind,
    Transfer,
    TransferId,
)
from corun.runtime.sampling import SamplingParams
from corun.runtime.sim.clock import VirtualClock
from corun.runtime.sim.executor import LatencyExecutor
from corun.runtime.sim.machines import SimulatedMachine

_PER_TOKEN_S = Curve((0.0, 10.0), (0.0, 10.0))
MODEL = MachineModel(
    num_layers=2,
    step_s=_PER_TOKEN_S,
    groups=(GroupModel("q_proj", Curve((0.0, 10.0), (0.0, 1.0)), 1 / 8),),
    invocation_s=0.25,
    lora=LoraModel(0.0, 0.0, 0.0, 0.0),
    link=LinkModel(1000.0, 0.5),
    num_workers=1,
    job=JobModel(s_per_product=1.0),
    host_step_s=0.5,
)
MACHINE = SimulatedMachine(
    name="round figures",
    model=MODEL,
    memory_bytes=64 * 1000,
    kv_bytes_per_token=100,
    adapter_bytes_per_rank=250,
    group_targets=(1,),
    file_bytes_per_s=500.0,
    block_size=4,
    max_num_batched_tokens=16,
    max_num_seqs=8,
    has_pages=False,
)
# Two layers, each copied by itself.
FACTS = AdapterFacts(
    "a", 8, 2000, host_bytes=(4096, 4096), layers=AdapterLayers(((8,), (8,)), (1000, 1000), (0, 1))
)


class DrivenExecutor:
    """A latency executor on virtual time, and plans for it. All adapters are ``FACTS``."""

    def __init__(self, model: MachineModel = MODEL, *, output_tokens: int = 3) -> None:
        self.clock = VirtualClock()
        self.executor = LatencyExecutor(
            replace(MACHINE, model=model),
            {RequestId(number): output_tokens for number in range(1, 9)},
            lambda adapter_id: FACTS,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self._next_step_id = 1

    def submit(
        self,
        *batches: SubBatch,
        new: tuple[NewRequest, ...] = (),
        transfers: tuple[Transfer, ...] = (),
        promoted: tuple[int, ...] = (),
        order: tuple[int, ...] = (),
        forget: tuple[int, ...] = (),
        evict: tuple[int, ...] = (),
    ) -> None:
        plan = StepPlan(
            StepId(self._next_step_id),
            batches,
            new,
            transfers=transfers,
            evict_adapters=tuple(AdapterId(number) for number in evict),
            ended_requests=tuple(RequestId(number) for number in forget),
            promoted_transfers=tuple(TransferId(number) for number in promoted),
            load_order=tuple(TransferId(number) for number in order),
        )
        self._next_step_id += 1
        self.executor.submit(plan)

    def results(self, until_s: float = 1000.0) -> list[tuple[float, Result]]:
        """All that happens up to ``until_s``, and when."""
        found: list[tuple[float, Result]] = []
        while self.clock() < until_s:
            results = self.executor.poll(until_s - self.clock())
            found += [(self.clock(), result) for result in results]
        return found


def request(number: int, num_prompt_tokens: int, adapter: int = 0) -> NewRequest:
    return NewRequest(RequestId(number), (5,) * num_prompt_tokens, SamplingParams(), AdapterId(adapter))


def row(
    number: int, start: int, num_tokens: int, *, samples: bool = True, split_layer: int | None = None
) -> SubBatch:
    """A sub-batch of one row; with ``split_layer`` an assisted one."""
    is_assisted = split_layer is not None
    return SubBatch(
        SubBatchKind.ASSISTED if is_assisted else SubBatchKind.MIXED,
        (RequestId(number),),
        (start,),
        (num_tokens,),
        (samples,),
        (split_layer,) if split_layer is not None else (),
    )


def load(number: int, *, is_demand: bool = True) -> AdapterTransfer:
    """Of adapter ``number``, from the host's memory."""
    return AdapterTransfer(TransferId(number), AdapterId(number), FACTS.num_bytes, is_demand)


def copy_kv(number: int, direction: Direction, num_blocks: int, *, is_demand: bool = True) -> KvTransfer:
    """Of blocks of 400 bytes."""
    return KvTransfer(
        TransferId(number),
        direction,
        tuple(map(BlockId, range(num_blocks))),
        tuple(map(HostSlot, range(num_blocks))),
        is_demand,
    )
