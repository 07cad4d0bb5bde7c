"""Computes an engine's sizes from options and facts. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...config.engine import EngineConfig
from ...config.notations import parse_num_bytes
from ...errors import ConfigError, ResourceError
from ...memory.host_budget import HostSections
from ...memory.make import adapter_share
from ...memory.policies.registry import forgets_history, splits_memory
from ...scheduler.step_draft import MAX_SCORED_TOKENS

_GIB = 2**30

# Default size of the memory that adapters and KV are copied from: share of free memory. CUDA pins it
# at start, which takes a second for a few GiB.
_HOST_SHARE = 1 / 4
_MAX_HOST_BYTES = 24 * _GIB
# Addresses are free where memory is taken page by page. Twice the budget leaves gaps that fit an
# adapter's layers even if adapters of all sizes are loaded and evicted.
_ADDRESSES_PER_BYTE = 2
# Share of the machine's free memory for history, if no option sets the budget.
_HISTORY_SHARE = 1 / 4
_MACHINE_SHARE = 1 / 2  # of a machine's memory, by default
_GROUP_SHARE = 0.85  # of a control group's limit, which applies to this program alone
# Of a step on CUDA. Beside the matrices: the residual, its norm, and copies of both.
_HIDDEN_STATES = 4
# For each logit beside itself: its log-probability, its probability, and sums in float64.
_SAMPLER_BYTES = 16
_CANDIDATES_BYTES = 2**16  # for the most likely tokens of a row
# Adapters that are not listed: added to --lora-dir later, by resolvers, or over HTTP.
_MIN_UNLISTED_ADAPTERS = 8
_UNLISTED_RANK = 64


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about the device."""

    type: str  # "cpu" or "cuda"
    free_bytes: int  # after the model has been loaded
    block_bytes: int  # one KV block over all layers
    host: "HostFacts | None" = None  # if its memory is the host's
    step_bytes: int = 0  # of the largest step on CUDA: see ``LargestStep``

    @property
    def room_bytes(self) -> int:
        """What KV and adapters may have; raises ``ResourceError`` if a step leaves nothing."""
        if self.step_bytes < self.free_bytes or not self.step_bytes:
            return self.free_bytes - self.step_bytes
        raise ResourceError(
            f"the largest step may need {self.step_bytes / _GIB:.3g} GiB, but only "
            f"{self.free_bytes / _GIB:.3g} GiB are free on {self.type} with the model loaded; lower "
            "--max-num-batched-tokens or --max-num-seqs"
        )


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step, and what the sizes of its tensors depend on."""

    num_tokens: int
    num_rows: int  # each with logits of one token
    layer_width: int  # values per token that the matrices of the widest layer read and write
    hidden_size: int
    vocab_size: int
    itemsize: int  # bytes of one value of the model

    @property
    def num_bytes(self) -> int:
        """Memory that the step takes, as if all tensors of a layer lived at once.

        Tests hold it to what steps of models of real size take.
        """
        token_values = self.layer_width + _HIDDEN_STATES * self.hidden_size
        num_logits = (self.num_rows + MAX_SCORED_TOKENS) * self.vocab_size
        computing = num_logits * max(self.itemsize + 4, 3 * self.itemsize)
        sampling = num_logits * 4 + self.num_rows * (self.vocab_size * _SAMPLER_BYTES + _CANDIDATES_BYTES)
        return self.num_tokens * token_values * self.itemsize + max(computing, sampling)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that limit the default on a CPU."""

    total_bytes: int  # of the machine
    limit_bytes: int | None  # of the control group; None = no limit
    adapter_bytes: int  # see ``needed_adapter_bytes``


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The budget, and the physical KV blocks."""

    capacity_bytes: int  # KV blocks and adapters together
    num_blocks: int
    max_model_len: int  # the model's, limited to what fits
    adapter_limit_bytes: int | None = None  # of these for adapters alone; None = shared with blocks
    num_pages: int | None = None  # for blocks and adapters; None = adapters are elsewhere
    max_history_blocks: int | None = None  # limit of blocks without requests; None = no limit
    host_sections: HostSections | None = None  # of KV and adapters on the host; None = no KV is there
    reason: str = ""  # of the capacity, for the log


def plan_max_model_len(requested: int | None, model_limit: int | None, exact_limit: int | None) -> int:
    """Choose the longest context in tokens.

    Args:
        requested: ``--max-model-len``, or None.
        model_limit: The limit in the model's configuration, or None.
        exact_limit: Length up to which corun computes the model correctly; None = any.

    Raises:
        ConfigError: The requested context is longer than the model can answer correctly.
    """
    limits = [limit for limit in (model_limit, exact_limit) if limit is not None]
    if not limits and requested is None:
        raise ConfigError("the model's configuration states no context length; give --max-model-len")
    limit = min(limits, default=requested)
    assert limit is not None
    if requested is not None and requested > limit:
        reason = (
            f"corun serves this model correctly only up to {limit} tokens"
            if limit == exact_limit
            else f"the model was made for at most {limit} tokens"
        )
        raise ConfigError(f"--max-model-len is {requested}, but {reason}")
    return requested or limit


def plan_memory(config: EngineConfig, facts: DeviceFacts, max_model_len: int) -> MemoryPlan:
    """Size the budget and the KV pool.

    CUDA memory is allocated at start, as pages that blocks and adapters share. On the CPU blocks
    take memory only when they are written, and adapters have their own. Without an explicit budget,
    history is limited to a quarter of it there, because the process keeps that memory.

    Raises:
        ResourceError: There is less memory than requested, or too little for one request of the
            requested context length.
    """
    capacity_bytes, reason = _capacity_bytes(config, facts, max_model_len)
    num_pages = adapter_limit_bytes = None
    if facts.type == "cuda":
        num_pages = capacity_bytes // facts.block_bytes
        capacity_bytes = num_pages * facts.block_bytes
    if splits_memory(config.memory_policy):
        adapter_limit_bytes = int(capacity_bytes * adapter_share(config.adapter_memory_fraction))
    num_blocks = (capacity_bytes - (adapter_limit_bytes or 0)) // facts.block_bytes
    if config.prefix_cache == "off":
        num_blocks = min(num_blocks, config.max_num_seqs * -(-max_model_len // config.block_size))
    max_history_blocks = None
    if facts.type == "cpu" and config.memory_gib is None:
        max_history_blocks = int(facts.free_bytes * _HISTORY_SHARE) // facts.block_bytes
    num_tokens = num_blocks * config.block_size
    plan = MemoryPlan(
        capacity_bytes,
        num_blocks,
        min(num_tokens, max_model_len),
        adapter_limit_bytes,
        num_pages,
        max_history_blocks,
        reason=reason,
    )
    if num_tokens >= max_model_len:
        return plan
    if config.max_model_len is not None or num_tokens < 2:
        raise ResourceError(
            f"{(capacity_bytes - (adapter_limit_bytes or 0)) / _GIB:.3g} GiB hold the KV of {num_tokens} "
            f"tokens, but one request may need {max_model_len} (--max-model-len); lower it or "
            "raise --memory-gib"
        )
    return plan


def _capacity_bytes(config: EngineConfig, facts: DeviceFacts, max_model_len: int) -> tuple[int, str]:
    """Return the bytes for KV and adapters, and the reason."""
    if config.memory_gib is None:
        return min(_default_bounds(config, facts, max_model_len))
    asked_bytes = int(config.memory_gib * _GIB)
    if asked_bytes > facts.room_bytes:
        raise ResourceError(
            f"--memory-gib is {config.memory_gib:g}, but only {facts.room_bytes / _GIB:.3g} GiB "
            f"are free on {facts.type} with the model loaded{_beside_step(facts)}"
        )
    return asked_bytes, "--memory-gib"


def _default_bounds(
    config: EngineConfig, facts: DeviceFacts, max_model_len: int
) -> Iterator[tuple[int, str]]:
    """Yield the limits of memory without ``--memory-gib``, each with its reason."""
    share = config.memory_share(facts.type)
    yield (
        int(facts.room_bytes * share),
        f"{share:.0%} of the free memory (--memory-fraction){_beside_step(facts)}",
    )
    host = facts.host
    if host is None:
        return
    num_blocks = config.max_num_seqs * -(-max_model_len // config.block_size)
    kv_bytes = num_blocks * facts.block_bytes
    needed_bytes = kv_bytes + host.adapter_bytes
    if splits_memory(config.memory_policy):
        part = adapter_share(config.adapter_memory_fraction)
        needed_bytes = int(max(kv_bytes / (1 - part), host.adapter_bytes / part)) + 1
    yield (
        needed_bytes,
        (
            f"the most that {config.max_num_seqs} requests (--max-num-seqs) of {max_model_len} "
            "tokens (--max-model-len) and the adapters can need"
        ),
    )
    if host.limit_bytes is not None and host.limit_bytes < host.total_bytes:
        group = f"{_GROUP_SHARE:.0%} of the control group's limit"
        yield int(host.limit_bytes * _GROUP_SHARE), group
    else:
        yield int(host.total_bytes * _MACHINE_SHARE), "half of the machine's memory"


def _beside_step(facts: DeviceFacts) -> str:
    if not facts.step_bytes:
        return ""
    return (
        f", beside {facts.step_bytes / _GIB:.3g} GiB for the largest step "
        "(--max-num-batched-tokens, --max-num-seqs)"
    )


def needed_adapter_bytes(listed_bytes: Sequence[int], bytes_per_rank: int, max_rank: int) -> int:
    """Return the memory for adapters: those listed, and as many more, at least eight.

    Each of the additional ones counts as the largest listed one, and at least as one of rank 64 (or
    ``max_rank``, if lower) for all targets.

    Args:
        listed_bytes: Of each adapter in the options.
        bytes_per_rank: Of an adapter for all targets.
        max_rank: The engine's limit.
    """
    one_bytes = min(_UNLISTED_RANK, max_rank) * bytes_per_rank
    num_others = max(_MIN_UNLISTED_ADAPTERS, len(listed_bytes))
    return sum(listed_bytes) + num_others * max([one_bytes, *listed_bytes])


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The arena of packed adapters on the host, and what KV shares with it."""

    num_bytes: int  # of memory, or of addresses if it is elastic or has sections
    is_elastic: bool
    memory_bytes: int  # taken off the budget, with KV on the host; 0 = part of the budget
    # If it is part of the budget: limit of adapters while requests do not use all of them.
    idle_bytes: int | None = None
    sections: HostSections | None = None  # shared with KV; None = the host keeps no KV


def plan_copied_arena(
    config: EngineConfig, device_type: str, block_bytes: int, host_available_bytes: int
) -> ArenaPlan:
    """Size the host's memory that adapters and KV are copied from. CUDA registers it.

    ``block_bytes``: of a KV block over all layers.

    Raises:
        ConfigError: Too little memory is requested.
        ResourceError: There is less memory than requested.
    """
    num_bytes = _asked_host_bytes(config)
    if num_bytes is None:
        num_bytes = min(int(host_available_bytes * _HOST_SHARE), _MAX_HOST_BYTES)
    elif not 0 < num_bytes <= host_available_bytes:
        raise ResourceError(
            f"--host-bytes is {config.host_bytes}; it must be above 0, as adapters are copied from "
            f"there, and at most the {host_available_bytes / _GIB:.3g} GiB of free host memory"
        )
    sections = None
    if config.prefix_cache == "on" and not forgets_history(config.memory_policy):
        sections = HostSections.of(num_bytes, block_bytes)
        num_bytes = sections.num_bytes
    return ArenaPlan(num_bytes, device_type == "cpu", memory_bytes=num_bytes, sections=sections)


def plan_shared_arena(config: EngineConfig, capacity_bytes: int) -> ArenaPlan:
    """Size the arena in the device's memory; it shares ``capacity_bytes`` with KV."""
    asked_bytes = _asked_host_bytes(config)
    return ArenaPlan(
        num_bytes=_ADDRESSES_PER_BYTE * capacity_bytes,
        is_elastic=True,
        memory_bytes=0,
        idle_bytes=capacity_bytes if asked_bytes is None else min(asked_bytes, capacity_bytes),
    )


def _asked_host_bytes(config: EngineConfig) -> int | None:
    return None if config.host_bytes is None else parse_num_bytes(config.host_bytes, "--host-bytes")
