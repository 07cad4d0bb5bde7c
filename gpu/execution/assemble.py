"""Assembles the device half: model, kernels, KV pool, executor."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ...cpu_workers.kernels.simd import arithmetic, isa
from ...runtime.adapters.target_map import Target, TargetMap
from ...runtime.config.engine import EngineConfig
from ...runtime.errors import ConfigError, ResourceError
from ...shm.errors import ShmError
from ..adapters.copier import DevicePages, staging_bytes
from ..adapters.host import ArenaSize, GroupLayers, HostAdapters, one_group
from ..adapters.store import OpenSource
from ..attention.base import AttentionBackend
from ..attention.select import select_attention_backend
from ..coexec.assistant import Assistant
from ..device.host_memory import TorchDevice
from ..device.select import DeviceOptions, make_device
from ..forward.batch import StepContext
from ..forward.lower import FEW_TOKENS, BlockTables, PackedRows, lower
from ..fused.install import select_fused_kernels
from ..kv.host import HostKv
from ..linear.base import MakeLinear
from ..linear.numba_backend import NumbaLinear
from ..linear.plain import PlainLinear
from ..linear.select import BaseReader, select_linear_backend
from ..linear.wrapper import CorunLinear, adapt_embedding, detach_from_weight_files, wrap_linears
from ..lora.adapter_layout import AdapterLayout
from ..lora.base import LoraBackend, PackedLora
from ..lora.matrix_layout import PACKED
from ..lora.select import select_lora_backend
from ..lora.table import DeviceAdapter, LoraTable
from ..model.attention_hook import AttentionRecord, PagedAttentionHook
from ..model.kv_pool import KvLayout, KvPool
from ..model.load import load_model, resolve_device, resolve_dtype
from ..model.probe import layer_shapes, record_attention
from ..model.quantization import QuantizedLinears, Weights
from ..model.quantization_plan import check_dtype, plan_quantization
from ..model.quantized_modules import QuantizedModules
from ..model.rope import guard_longrope, rope_max_length, rope_recompute_length
from ..model.source import ModelSource, load_config
from ..model.targets import build_target_map, record_calls, with_calls
from ..replay.capture import CpuGraphs
from ..replay.cuda_graphs import CudaGraphs, StreamRecorder
from ..replay.decode_graphs import OFF, GraphDevice, select_decode_graphs
from .adaptive_threads import AdaptiveThreads
from .draws import warm_up_draws
from .executor import AdapterFetch, DeviceExecutor
from .logit_inputs import warm_up_inputs
from .runner import ModelRunner
from .sampler import Sampler

_MAX_RESIDENT_ADAPTERS = 2048  # rows of the kernels' table, a few dozen bytes per target each


_PREFILL_TOKENS = 64  # of one row


# A kernel that is compiled, or even loaded, while serving delays all requests. A variant depends
# on the model and on the shape of a pass: whether every row decodes, whether it has many tokens,
# and how long the longest context is. So a few passes of the model itself use all variants, with
# the strides and addresses of serving.
def warm_up(
    runner: ModelRunner,
    table: LoraTable,
    backend: LoraBackend,
    targets: Sequence[Target],
    max_model_len: int,
    on_progress: Callable[[str], None],
) -> int:
    """Run the passes, with adapters of zeros on all ``targets``; return how many.

    Writes to the pool's first block, so it must not be in use. Raises the error of a kernel that
    this device does not support.
    """
    # A graph of adapters of zeros could not be verified.
    graphs, runner.graphs = runner.graphs, None
    row = table.add(_zeros(targets, backend))
    scaled = table.add(_zeros(targets, backend, device=table.device))
    try:
        passes = tuple(_passes(max_model_len, runner, row))
        # Kernels with factors (DoRA) depend on the number of tokens, too.
        passes += tuple(replace(one, table_rows=(scaled,) * len(one.table_rows)) for one in passes[:2])
        on_progress(f"warming up: {len(passes)} passes, so that serving compiles no kernel")
        for rows in passes:
            inputs = lower(rows, runner.block_size, runner.device, table.mirror)
            logits = runner.forward(inputs)
        warm_up_inputs(logits)
        warm_up_draws(logits)
        if runner.device.type == "cuda":  # a failed kernel must fail the start
            torch.cuda.synchronize(runner.device)
    finally:
        runner.graphs = graphs
        table.remove(row)
        table.remove(scaled)
    return len(passes)


def _passes(max_model_len: int, runner: ModelRunner, table_row: int) -> Iterator[PackedRows]:
    """Prefill, then one token behind contexts of all lengths by powers of two.

    The parts that a context is divided into double likewise, so all counts of them occur; a single
    row has the most.
    """
    num_tokens = min(_PREFILL_TOKENS, max_model_len)
    num_rows = FEW_TOKENS // num_tokens + 1
    yield _rows(num_rows, num_tokens, num_tokens, runner, table_row)
    context_len = 1
    while context_len < max_model_len:
        yield _rows(1, 1, context_len, runner, table_row)
        context_len *= 2
    yield _rows(1, 1, max_model_len, runner, table_row)


def _rows(
    num_rows: int, num_tokens: int, context_len: int, runner: ModelRunner, table_row: int
) -> PackedRows:
    """Rows of one shape with contexts that repeat the pool's first block."""
    num_columns = -(-context_len // runner.block_size)
    tables = np.zeros((num_rows, num_columns), dtype=np.int32)
    return PackedRows(
        token_ids=np.zeros(num_rows * num_tokens, dtype=np.int64),
        starts=np.full(num_rows, context_len - num_tokens, dtype=np.int64),
        num_tokens=np.full(num_rows, num_tokens, dtype=np.int64),
        block_tables=BlockTables(tables, runner.device),
        slots=np.arange(num_rows),
        known_lens=(context_len,) * num_rows,
        table_rows=(table_row,) * num_rows,
        ranks=(1,) * num_rows,
    )


def _zeros(
    targets: Sequence[Target], backend: LoraBackend, *, device: torch.device | None = None
) -> DeviceAdapter:
    """An adapter of rank 1 on all targets; those of one shape share its matrices.

    ``device``: it has factors there; None = it has none.
    """
    by_shape: dict[tuple[int, int], PackedLora] = {}
    for target in targets:
        shape = target.in_features, target.out_features
        if shape not in by_shape:
            a, b = torch.zeros(1, target.in_features), torch.zeros(target.out_features, 1)
            by_shape[shape] = backend.pack(a, b, 1.0)
            if device is not None:
                factors = torch.zeros(2, target.out_features, device=device)
                by_shape[shape] = replace(by_shape[shape], factors=factors)
    return DeviceAdapter(
        {target.index: by_shape[target.in_features, target.out_features] for target in targets}
    )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with corun's modules in place, before its memory is planned."""

    config: Any  # transformers' configuration of the text model
    model: PreTrainedModel
    context: StepContext
    hook: PagedAttentionHook
    device: TorchDevice  # provides streams and copies
    layout: KvLayout
    target_map: TargetMap
    lora_table: LoraTable
    lora_backend: LoraBackend
    attention_backend: AttentionBackend
    linear_backend_name: str
    fused_kernels_name: str
    decode_graphs: str  # a choice of ``replay.decode_graphs``
    weights: Weights
    # Tokens of a request up to which packed rows are exact; None = up to the context length.
    max_exact_len: int | None
    max_step_tokens: int  # --max-num-batched-tokens, as far as packed rows are exact
    recompute_at_tokens: int | None
    layer_width: int  # values per token that the matrices of one layer read and write
    threads: AdaptiveThreads | None = None  # of a CPU, once ``probe`` has chosen them

    @property
    def backend_names(self) -> dict[str, str]:
        """The back end of each part."""
        names = {
            "linear": self.linear_backend_name,
            "attention": self.attention_backend.name,
            "LoRA": self.lora_backend.name,
            "fused kernels": self.fused_kernels_name,
            "decode graphs": self.decode_graphs,
            "CPU instructions": arithmetic.describe(),
        }
        return names | ({"weights": self.weights.kind} if self.weights.kind else {})

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def close(self) -> None:
        """Release what is not memory: the attention function and the device. Idempotent."""
        if self.weights.late is not None:
            self.weights.late.close()
        if self.threads is not None:
            self.threads.close()
        self.hook.close()
        self.device.close()


def load(
    source: ModelSource,
    config: EngineConfig,
    on_progress: Callable[[str], None],
    stream_cpus: tuple[int, ...] = (),
    kept: Path | None = None,
) -> LoadedModel:
    """Load the model and replace its attention and its linears.

    ``stream_cpus``: cores of a CPU device's threads; () = those of the caller.
    ``kept``: the folder with artifacts and measurements of earlier starts; None = there is none.

    Raises ``ModelError`` or ``ConfigError`` with the reason, ``DeviceError`` if the device cannot
    be used.
    """
    reason = isa.why_not(config.cpu_isa)
    if reason is not None:
        raise ConfigError(f"--cpu-isa {config.cpu_isa} cannot be used: {reason}")
    where = resolve_device(config.device)
    hf_config = load_config(source)
    quantization = plan_quantization(config, hf_config, where)
    dtype = resolve_dtype(config.dtype, hf_config)
    linears: QuantizedLinears | QuantizedModules | None = None
    if quantization is not None:
        dtype = check_dtype(dtype, quantization, is_chosen=config.dtype != "auto")
        kept_weights = None if kept is None else kept / "weights"
        linears = (
            QuantizedModules(source, hf_config, quantization)
            if quantization.has_modules
            else QuantizedLinears(source, hf_config, quantization, kept_weights)
        )
    context = StepContext()
    with contextlib.ExitStack() as undo:
        device = make_device(where, DeviceOptions.of(config, stream_cpus))
        undo.callback(device.close)
        hook = PagedAttentionHook(context)
        undo.callback(hook.close)
        on_progress(f"loading {source.path} as {str(dtype).removeprefix('torch.')} on {where}")
        if linears is None:
            model = load_model(source, hf_config, dtype, where, hook.name)
        else:
            model = linears.load_rest(dtype, where, hook.name)
        loaded = equip(model, context, hook, device, config, on_progress, linears, kept)
        undo.pop_all()
        return loaded


def equip(
    model: PreTrainedModel,
    context: StepContext,
    hook: PagedAttentionHook,
    device: TorchDevice,
    config: EngineConfig,
    on_progress: Callable[[str], None],
    linears: QuantizedLinears | QuantizedModules | None,
    kept: Path | None,
) -> LoadedModel:
    """Replace parts of a model with corun's, in place; ``device`` owns its tensors.

    ``linears``: makes quantised ones; None = none. ``kept``: see ``load``.
    """
    guard_longrope(model, context)
    where, dtype = model.device, model.dtype
    on_progress("choosing and compiling kernels")
    skeleton = model if linears is None else linears.skeleton
    target_map, record = _record(model, hook, skeleton)
    table, layer_width = _make_table(target_map.targets, where), _layer_width(skeleton)
    max_tokens = config.step_tokens(where.type)
    lora_backend = select_lora_backend(
        config.lora_backend,
        table=table,
        device=where,
        dtype=dtype,
        most_values=max_tokens * _most_together(target_map.targets) * config.max_lora_rank,
    )
    make_linear: MakeLinear = NumbaLinear  # its kernels also serve quantised weights
    if linears is None or dtype != torch.bfloat16 or not linears.quantizes_all(model):
        make_linear = select_linear_backend(config.linear_backend, device=where, dtype=dtype, kept=kept)
    weights = _replace_linears(model, context, make_linear, target_map, linears, on_progress)
    fused_kernels_name = select_fused_kernels(
        config.fused_kernels, model, lambda: _record_attention(model, hook, target_map)
    )
    attention_backend = select_attention_backend(config.attention_backend, device=where, dtype=dtype)
    names = {"attention": attention_backend.name, "LoRA": lora_backend.name}
    return LoadedModel(
        config=model.config.get_text_config(),
        model=model,
        context=context,
        hook=hook,
        device=device,
        layout=KvLayout(layer_shapes(record), config.block_size, dtype),
        target_map=target_map,
        lora_table=table,
        lora_backend=lora_backend,
        attention_backend=attention_backend,
        linear_backend_name=make_linear.name,
        fused_kernels_name=fused_kernels_name,
        decode_graphs=select_decode_graphs(config.decode_graphs, names, where.type),
        weights=weights,
        max_exact_len=least(rope_max_length(model), record.max_chunk_len),
        max_step_tokens=max_tokens,
        layer_width=layer_width,
        recompute_at_tokens=rope_recompute_length(model),
    )


def _record(
    model: PreTrainedModel, hook: PagedAttentionHook, skeleton: PreTrainedModel
) -> tuple[TargetMap, AttentionRecord]:
    """The targets as the model calls them; ``skeleton`` has plain linears for them all."""
    target_map = build_target_map(skeleton)
    record = None

    def pass_through() -> None:
        nonlocal record
        record = _record_attention(model, hook, target_map)

    calls = record_calls(model, [target.path for target in target_map.targets], pass_through)
    assert record is not None
    return with_calls(target_map, calls), record


def _record_attention(
    model: PreTrainedModel, hook: PagedAttentionHook, target_map: TargetMap
) -> AttentionRecord:
    """``record_attention``, on the CPU without the products that take its time."""
    if model.device.type != "cpu":
        return record_attention(model, hook)
    paths = {one.physical_path for one in target_map.targets if one.is_inside or one.is_head}
    found = [model.get_submodule(path) for path in paths]
    # Not modules in the place of a linear, nor routers, which choose what is called.
    linears = [one for one in found if type(one) in (nn.Linear, CorunLinear)]
    for linear in linears:
        linear.forward = partial(_no_product, linear.out_features)
    try:
        return record_attention(model, hook)
    finally:
        for linear in linears:
            del linear.forward


def _no_product(out_features: int, x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros((*x.shape[:-1], out_features))


def _make_table(targets: Sequence[Target], where: torch.device) -> LoraTable:
    return LoraTable(
        len(targets),
        _MAX_RESIDENT_ADAPTERS,
        where,
        embeddings=[target.index for target in targets if target.is_embedding],
        heads={target.index: target.num_tokens for target in targets if target.is_head},
    )


def _most_together(targets: Sequence[Target]) -> int:
    """The number of targets in the largest input group."""
    return max(Counter((target.layer, target.input_group) for target in targets).values(), default=0)


def _layer_width(model: PreTrainedModel) -> int:
    """Values per token that the matrices of the widest layer read and write.

    Experts are in matrices of three dimensions, of which a token takes some.
    """
    num_experts = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    widths = Counter[str]()
    for name, parameter in model.named_parameters():
        layer = next((part for part in name.split(".") if part.isdigit()), None)
        if layer is not None and parameter.dim() >= 2:
            copies = num_experts or parameter.shape[0] if parameter.dim() == 3 else 1
            widths[layer] += copies * sum(parameter.shape[-2:])
    return max(widths.values())


def _replace_linears(
    model: PreTrainedModel,
    context: StepContext,
    make_linear: MakeLinear,
    target_map: TargetMap,
    linears: QuantizedLinears | QuantizedModules | None,
    on_progress: Callable[[str], None],
) -> Weights:
    full_bytes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    linear_targets = [target for target in target_map.targets if not target.is_embedding]
    target_of = {target.physical_path: target.index for target in linear_targets}
    group_of = {t.physical_path: (t.layer, t.input_group) for t in linear_targets}
    heads = frozenset(t.physical_path for t in target_map.targets if t.is_head)
    if linears is None:
        wrap_linears(model, context, make_linear, target_of, group_of, heads=heads)
        weights = Weights(sum(full_bytes.values()))
    else:
        if linears.task:
            on_progress(linears.task)
        wrap_linears(model, context, make_linear, target_of, group_of, linears.make, heads=heads)
        weights = linears.finish(full_bytes)
    for one in target_map.targets:
        if one.is_embedding:
            adapt_embedding(model, context, one, (one.layer, one.input_group))
    is_packed = make_linear.name != PlainLinear.name or weights.quantized_bytes > 0
    if model.device.type == "cpu" and is_packed:
        detach_from_weight_files(model)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # originals of fused weights: what is free is counted next
    return weights


def least(*limits: int | None) -> int | None:
    """The smallest of the limits that are set."""
    return min((limit for limit in limits if limit is not None), default=None)


def make_runner(loaded: LoadedModel, num_blocks: int) -> ModelRunner:
    """Allocate the KV pool and connect the model to it."""
    pool = KvPool(loaded.layout, num_blocks, loaded.model.device)
    loaded.hook.attach(loaded.attention_backend, pool)
    graph_device = None if loaded.decode_graphs == OFF else _graph_device(loaded)
    return ModelRunner(loaded.model, loaded.context, pool, loaded.lora_backend, graph_device=graph_device)


def _graph_device(loaded: LoadedModel) -> GraphDevice:
    device = loaded.model.device
    if device.type == "cpu":
        return CpuGraphs()
    return CudaGraphs(loaded.lora_backend, StreamRecorder(device))


def device_pages(runner: ModelRunner, max_rank: int) -> DevicePages:
    """The runner's KV blocks, lent to adapters up to this rank."""
    pool = runner.pool
    return DevicePages(pool.bytes_of(0, pool.num_blocks), pool.block_bytes, max_rank)


def load_buffer_bytes(loaded: LoadedModel, max_rank: int) -> int:
    """Device memory that loads take beside the pages, for adapters up to this rank."""
    layout = AdapterLayout(loaded.target_map, PACKED, loaded.dtype)
    return staging_bytes(layout, loaded.lora_backend.layout, max_rank)


def warm_up_kernels(
    loaded: LoadedModel, runner: ModelRunner, max_model_len: int, on_progress: Callable[[str], None]
) -> None:
    """Compile all kernels now; on the CPU they are already compiled (``numba`` has no variants).

    Called by the thread that will run the steps, before the pool is used.
    """
    if loaded.model.device.type == "cuda":
        warm_up(
            runner,
            loaded.lora_table,
            loaded.lora_backend,
            loaded.target_map.targets,
            max_model_len,
            on_progress,
        )


def make_executor(
    loaded: LoadedModel,
    runner: ModelRunner,
    fetch: AdapterFetch,
    sampler: Sampler,
    *,
    max_model_len: int,
    assistant: Assistant | None = None,
    host_kv: HostKv | None = None,
) -> DeviceExecutor:
    """Make an executor; it takes ownership of runner, sampler and ``host_kv``, not of the model.

    ``host_kv``: copies KV blocks to and from the host; None = no copies.
    """
    return DeviceExecutor(
        runner,
        sampler,
        loaded.lora_table,
        fetch,
        max_model_len=max_model_len,
        assistant=assistant,
        host_kv=host_kv,
        after_step=None if loaded.threads is None else loaded.threads.after_step,
    )


def make_host_adapters(
    loaded: LoadedModel, size: ArenaSize, open_source: OpenSource, group_layers: GroupLayers = one_group
) -> HostAdapters:
    """Make the arena of packed adapters; before the device's first operation.

    Raises ``ResourceError`` if there is too little memory for it.
    """
    try:
        host = HostAdapters(
            loaded.device,
            loaded.lora_backend,
            loaded.dtype,
            loaded.model.device,
            loaded.target_map,
            size,
            open_source,
            group_layers,
        )
    except ShmError as error:
        raise ResourceError(f"{error} (--host-bytes)") from error
    host.set_base(BaseReader(loaded.model))
    return host


def free_bytes(device: torch.device, cpu_available_bytes: int) -> int:
    """Free memory of the device; on the CPU the number that the caller has read."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what passes of the start have left
        return int(torch.cuda.mem_get_info(device)[0])
    return cpu_available_bytes
