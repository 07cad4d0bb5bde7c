"""Collects the facts of machine, model and adapters that an engine's sizes depend on."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.sources import stored_bytes
from ...config.engine import EngineConfig
from ...config.notations import LoraModule
from ...machine.facts import MachineFacts
from .resources import (
    ArenaPlan,
    DeviceFacts,
    HostFacts,
    LargestStep,
    MemoryPlan,
    needed_adapter_bytes,
    plan_copied_arena,
    plan_max_model_len,
    plan_memory,
    plan_shared_arena,
)

if TYPE_CHECKING:
    from ....gpu.execution.assemble import LoadedModel

_LOG = logging.getLogger(__name__)
_GIB = 2**30


def plan_engine_memory(
    config: EngineConfig, loaded: "LoadedModel", facts: MachineFacts, adapters: Sequence[LoraModule]
) -> tuple[MemoryPlan, ArenaPlan]:
    """Divide free memory between the budget and, with a link, the host's arena and host KV.

    ``facts``: with the model loaded; ``adapters``: those of the options.

    Raises ``ConfigError`` or ``ResourceError``, see ``resources``.
    """
    from ....gpu.execution import assemble

    device = loaded.model.device
    arena: ArenaPlan | None = None
    host_bytes, block_bytes = facts.memory_available_bytes, loaded.layout.block_bytes
    if copies_adapters(config, loaded):
        arena = plan_copied_arena(config, device.type, block_bytes, host_bytes)
        host_bytes -= arena.memory_bytes
    max_model_len = max_model_len_of(config, loaded.config, loaded.max_exact_len)
    free_bytes = assemble.free_bytes(device, host_bytes)
    if device.type == "cuda":
        free_bytes = max(0, free_bytes - assemble.load_buffer_bytes(loaded, config.max_lora_rank))
    device_facts = DeviceFacts(
        type=device.type,
        free_bytes=free_bytes,
        step_bytes=step_bytes(config, loaded),
        block_bytes=block_bytes,
        host=_host_facts(config, loaded, facts, adapters) if device.type == "cpu" else None,
    )
    memory = plan_memory(config, device_facts, max_model_len)
    _LOG.info("memory: %.3g GiB for KV and adapters: %s", memory.capacity_bytes / _GIB, memory.reason)
    if arena is None:
        return memory, plan_shared_arena(config, memory.capacity_bytes)
    return replace(memory, host_sections=arena.sections), arena


def step_bytes(config: EngineConfig, loaded: "LoadedModel") -> int:
    """Return the memory on CUDA that the largest step takes; on the CPU, where steps are small, 0."""
    if loaded.model.device.type != "cuda":
        return 0
    return LargestStep(
        num_tokens=loaded.max_step_tokens,
        num_rows=min(config.max_num_seqs, loaded.max_step_tokens),
        layer_width=loaded.layer_width,
        hidden_size=loaded.config.hidden_size,
        vocab_size=loaded.config.vocab_size,
        itemsize=loaded.dtype.itemsize,
    ).num_bytes


def copies_adapters(config: EngineConfig, loaded: "LoadedModel") -> bool:
    """Whether adapters are copied over a link from the host to the device's kernels."""
    is_paced = config.link_gib_per_s is not None or config.link_latency_us > 0
    return loaded.model.device.type == "cuda" or is_paced


def max_model_len_of(config: EngineConfig, hf_config: Any, exact_limit: int | None) -> int:
    """Choose the context; ``hf_config`` is the text model's configuration."""
    model_limit = getattr(hf_config, "max_position_embeddings", None)
    return plan_max_model_len(config.max_model_len, model_limit, exact_limit)


def _host_facts(
    config: EngineConfig, loaded: "LoadedModel", facts: MachineFacts, adapters: Sequence[LoraModule]
) -> HostFacts:
    targets = loaded.target_map.inside
    num_features = sum(target.in_features + target.out_features for target in targets)
    adapter_bytes = needed_adapter_bytes(
        [stored_bytes(adapter) for adapter in adapters],
        num_features * loaded.dtype.itemsize,
        config.max_lora_rank,
    )
    return HostFacts(facts.memory_total_bytes, facts.memory_limit_bytes, adapter_bytes)
