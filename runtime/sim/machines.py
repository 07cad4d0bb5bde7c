"""Machines to simulate, as data."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ...cpu_workers.teams import padded
from ...profiles.curve import Curve
from ...profiles.derive import min_group_bytes
from ...profiles.models import LinkModel, LoraModel, MachineModel
from ..adapter import AdapterFacts, AdapterLayers
from ..coldstart.link import group_of_layers
from ..errors import ConfigError
from ..memory.pages import pack_runs

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """An accelerator with a base model, and the path of adapters to it."""

    name: str
    model: MachineModel
    memory_bytes: int  # for KV and adapters together
    kv_bytes_per_token: int
    adapter_bytes_per_rank: int  # over all layers
    group_targets: tuple[int, ...]  # targets of an adapter that share an input
    file_bytes_per_s: float  # of reading adapters that are not in the host's memory
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    mix_decode_with_prefill: bool = True  # False: each has a pass of its own
    separate_assisted_rows: bool = False  # they have a pass of their own
    loads_between_steps: bool = False
    max_rank: int | None = None  # largest measured rank; None = times are set by hand
    # KV and adapters have pages of one block, as on CUDA; False: only bytes count, as on the CPU.
    has_pages: bool = True

    @property
    def num_blocks(self) -> int:
        """KV blocks, if there are no adapters."""
        return self.memory_bytes // self.block_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def budget_bytes(self) -> int:
        """Of the memory, what KV and adapters can use: whole pages, if it has pages."""
        return self.num_blocks * self.block_bytes if self.has_pages else self.memory_bytes

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Raise ``ConfigError`` if one is above the largest measured rank."""
        if self.max_rank is not None and max(ranks) > self.max_rank:
            raise ConfigError(
                f"--workload has adapters of rank {max(ranks)}, the profile of {self.name} goes "
                f"up to rank {self.max_rank}: run corun profile, which measures larger ranks than "
                "a start does"
            )

    def adapter_facts(self, name: str, rank: int) -> AdapterFacts:
        num_layers = self.model.num_layers
        num_bytes = rank * self.adapter_bytes_per_rank
        ends = [num_bytes * layer // num_layers for layer in range(num_layers + 1)]
        layer_bytes = [end - start for start, end in itertools.pairwise(ends)]
        group_of_layer = group_of_layers(layer_bytes, min_group_bytes(self.model.link))
        group_bytes = [0] * (group_of_layer[-1] + 1)
        for group, size in zip(group_of_layer, layer_bytes, strict=True):
            group_bytes[group] += size
        rank_sums = tuple(number * padded(rank) for number in self.group_targets)
        run_pages: tuple[int, ...] = ()
        if self.has_pages:
            num_matrices = 2 * num_layers * sum(self.group_targets)  # as if all had one size
            run_pages, _ = pack_runs((-(-num_bytes // num_matrices),) * num_matrices, self.block_bytes)
        return AdapterFacts(
            digest=name,
            rank=rank,
            num_bytes=sum(run_pages) * self.block_bytes or num_bytes,
            host_bytes=tuple(-(-size // _PAGE_BYTES) * _PAGE_BYTES for size in layer_bytes),
            layers=AdapterLayers((rank_sums,) * num_layers, tuple(group_bytes), group_of_layer),
            run_pages=run_pages,
        )


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors by which a machine is slower than its model; > 1 = slower."""

    step: float = 1.0  # the device and the engine's core
    link: float = 1.0
    workers: float = 1.0


AS_MODELLED = Factors()


def slowed(model: MachineModel, factors: Factors) -> MachineModel:
    """``model`` with times multiplied by ``factors``."""
    step = factors.step
    return replace(
        model,
        step_s=_scaled(model.step_s, step),
        decode_step_s=_scaled(model.decode_step_s, step) if model.decode_step_s else None,
        groups=tuple(replace(group, base_s=_scaled(group.base_s, step)) for group in model.groups),
        job=model.job.slowed(factors.workers),
        invocation_s=model.invocation_s * factors.workers,
        invocation_s_per_token=model.invocation_s_per_token * factors.workers,
        lora=_slowed_lora(model.lora, step),
        link=LinkModel(model.link.bytes_per_s / factors.link, model.link.latency_s * factors.link),
        host_step_s=model.host_step_s * step,
        host_row_s=model.host_row_s * step,
        prefill_s_per_token_key=model.prefill_s_per_token_key * step,
        decode_s_per_key=model.decode_s_per_key * step,
        read_s=model.read_s * step,
        turn_s=model.turn_s * step,
        turn_row_s=model.turn_row_s * step,
        request_s=model.request_s * step,
        load_s=model.load_s * step,
    )


def _slowed_lora(lora: LoraModel, factor: float) -> LoraModel:
    times = [field.name for field in fields(lora) if field.name != "is_padded"]
    return replace(lora, **{name: getattr(lora, name) * factor for name in times})


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(curve.x, tuple(y * factor for y in curve.y))
