"""Turns options and facts into the sizes an engine is built with. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...config.engine import EngineConfig
from ...config.notations import parse_num_bytes
from ...errors import ConfigError, ResourceError
from ...memory.make import adapter_share
from ...memory.policies.registry import splits_memory

_GIB = 2**30

# The arena that adapters are copied from, where nothing else is asked for: of what is free.
_ARENA_SHARE = 1 / 8
_MAX_ARENA_BYTES = 8 * _GIB
# KV on the host, likewise. CUDA pins it at start, which takes a second for some GiB.
_HOST_KV_SHARE = 1 / 8
_MAX_HOST_KV_BYTES = 16 * _GIB
# Addresses cost nothing where memory is taken page by page; twice the budget leaves holes that an
# adapter's layers fit even where others of all sizes come and go.
_ADDRESSES_PER_BYTE = 2
# What history may hold of the free memory of a machine that nobody has shared out.
_HISTORY_SHARE = 1 / 4
_MACHINE_SHARE = 1 / 2  # of a machine's memory, by default
_GROUP_SHARE = 0.85  # of a control group's limit, which is for this program alone
# Of adapters that are not listed: those of --lora-dir that come later, of resolvers, over HTTP.
_MIN_UNLISTED_ADAPTERS = 8
_UNLISTED_RANK = 64


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the sizes depend on."""

    type: str  # "cpu" or "cuda"
    free_bytes: int  # after the model has been loaded
    block_bytes: int  # one KV block over all layers
    host: "HostFacts | None" = None  # where its memory is the host's


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What bounds the default on a CPU."""

    total_bytes: int  # of the machine
    limit_bytes: int | None  # of the control group; None = there is none
    adapter_bytes: int  # see ``needed_adapter_bytes``


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The one budget, and the KV blocks that exist physically."""

    capacity_bytes: int  # KV blocks and adapters together
    num_blocks: int
    max_model_len: int  # what the model allows, cut to what fits
    slab_bytes: int | None = None  # of it for adapters alone; None = they share it with blocks
    max_history_blocks: int | None = None  # that no request uses; None = all
    num_host_slots: int = 0  # KV blocks that the host has room for
    reason: str = ""  # where the capacity is from, for people


def plan_max_model_len(
    requested: int | None, model_limit: int | None, exact_limit: int | None
) -> int:
    """Choose the longest context in tokens.

    Args:
        requested: ``--max-model-len``, or None.
        model_limit: What the model's configuration states, or None.
        exact_limit: Length up to which corun computes the model rightly; None = any.

    Raises:
        ConfigError: A longer context is asked for than the model can answer rightly.
    """
    limits = [limit for limit in (model_limit, exact_limit) if limit is not None]
    if not limits and requested is None:
        raise ConfigError(
            "the model's configuration states no context length; give --max-model-len"
        )
    limit = min(limits, default=requested)
    assert limit is not None
    if requested is not None and requested > limit:
        reason = (
            f"corun serves this model rightly up to {limit} tokens at most"
            if limit == exact_limit
            else f"the model was made for {limit} tokens at most"
        )
        raise ConfigError(f"--max-model-len is {requested}, but {reason}")
    return requested or limit


def plan_memory(config: EngineConfig, facts: DeviceFacts, max_model_len: int) -> MemoryPlan:
    """Size the budget and the KV pool.

    CUDA memory is taken whole at start, so there adapters have a slab beside the blocks, as they
    have under policies that split the memory. On the CPU blocks take memory only when they are
    written, so both share all of it; what nobody has shared out, history holds no more than a
    quarter of, because it would stay.

    Raises:
        ResourceError: There is less memory than was asked for, or too little for one request of
            the context length that was asked for.
    """
    capacity_bytes, reason = _capacity_bytes(config, facts, max_model_len)
    slab_bytes = None
    if facts.type == "cuda" or splits_memory(config.memory_policy):
        slab_bytes = int(capacity_bytes * adapter_share(config.adapter_memory_fraction))
    num_blocks = (capacity_bytes - (slab_bytes or 0)) // facts.block_bytes
    if config.prefix_cache == "off":
        num_blocks = min(num_blocks, config.max_num_seqs * -(-max_model_len // config.block_size))
    max_history_blocks = None
    if facts.type == "cpu" and config.memory_gib is None:
        max_history_blocks = int(facts.free_bytes * _HISTORY_SHARE) // facts.block_bytes
    num_tokens = num_blocks * config.block_size
    plan = MemoryPlan(
        capacity_bytes, num_blocks, min(num_tokens, max_model_len), slab_bytes, max_history_blocks,
        reason=reason,
    )  # fmt: skip
    if num_tokens >= max_model_len:
        return plan
    if config.max_model_len is not None or num_tokens < 2:
        raise ResourceError(
            f"{(capacity_bytes - (slab_bytes or 0)) / _GIB:.3g} GiB hold the KV of {num_tokens} "
            f"tokens, but one request may take {max_model_len} (--max-model-len); lower it or "
            "raise --memory-gib"
        )
    return plan


def _capacity_bytes(
    config: EngineConfig, facts: DeviceFacts, max_model_len: int
) -> tuple[int, str]:
    """Bytes for KV and adapters, and what they follow from."""
    if config.memory_gib is None:
        return min(_default_bounds(config, facts, max_model_len))
    asked_bytes = int(config.memory_gib * _GIB)
    if asked_bytes > facts.free_bytes:
        raise ResourceError(
            f"--memory-gib is {config.memory_gib:g}, but only {facts.free_bytes / _GIB:.3g} GiB "
            f"are free on {facts.type} with the model loaded"
        )
    return asked_bytes, "--memory-gib"


def _default_bounds(
    config: EngineConfig, facts: DeviceFacts, max_model_len: int
) -> Iterator[tuple[int, str]]:
    """Yield what the memory may be at most without ``--memory-gib``, each with its reason."""
    share = config.memory_fraction
    yield int(facts.free_bytes * share), f"{share:.0%} of what is free (--memory-fraction)"
    host = facts.host
    if host is None:
        return
    num_blocks = config.max_num_seqs * -(-max_model_len // config.block_size)
    kv_bytes = num_blocks * facts.block_bytes
    needed_bytes = kv_bytes + host.adapter_bytes
    if splits_memory(config.memory_policy):
        slab_share = adapter_share(config.adapter_memory_fraction)
        needed_bytes = int(max(kv_bytes / (1 - slab_share), host.adapter_bytes / slab_share)) + 1
    yield (
        needed_bytes,
        (
            f"what {config.max_num_seqs} requests (--max-num-seqs) of {max_model_len} tokens "
            "(--max-model-len) and adapters can need"
        ),
    )
    if host.limit_bytes is not None and host.limit_bytes < host.total_bytes:
        yield int(host.limit_bytes * _GROUP_SHARE), f"{_GROUP_SHARE:.0%} of the control group's"
    else:
        yield int(host.total_bytes * _MACHINE_SHARE), "half of the machine's"


def needed_adapter_bytes(listed_bytes: Sequence[int], bytes_per_rank: int, max_rank: int) -> int:
    """What adapters can need: those listed, and as many others as these, eight at least.

    Of the others each takes as much as the largest of those listed, and no less than one of rank
    64, or ``max_rank`` if that is lower, for all targets.

    Args:
        listed_bytes: Of each adapter that the options name.
        bytes_per_rank: Of an adapter for all targets.
        max_rank: That the engine accepts.
    """
    one_bytes = min(_UNLISTED_RANK, max_rank) * bytes_per_rank
    num_others = max(_MIN_UNLISTED_ADAPTERS, len(listed_bytes))
    return sum(listed_bytes) + num_others * max([one_bytes, *listed_bytes])


def plan_host_slots(
    config: EngineConfig, block_bytes: int, host_available_bytes: int, *, has_link: bool
) -> int:
    """Say how many KV blocks the host has room for.

    Args:
        config: The options.
        block_bytes: Of one block over all layers.
        host_available_bytes: Memory of the host that nothing else is planned for.
        has_link: Whether the device's memory is apart from the host's.

    Raises:
        ConfigError: Room is asked for where none is of use, or too little for a block.
        ResourceError: There is less memory than was asked for.
    """
    asked = config.host_kv_bytes
    asked_bytes = None if asked is None else parse_num_bytes(asked, "--host-kv-bytes")
    use = None
    if not has_link:
        use = "the model runs on a CPU, where KV blocks are in the host's memory"
    elif config.prefix_cache == "off":
        use = "no KV is kept (--prefix-cache off)"
    if use is not None:
        if asked_bytes:
            raise ConfigError(f"--host-kv-bytes is {asked}, but {use}; leave it out")
        return 0
    if asked_bytes is None:
        asked_bytes = min(int(host_available_bytes * _HOST_KV_SHARE), _MAX_HOST_KV_BYTES)
    elif asked_bytes > host_available_bytes:
        raise ResourceError(
            f"--host-kv-bytes is {asked}, but only {host_available_bytes / _GIB:.3g} GiB of host "
            "memory are free"
        )
    elif 0 < asked_bytes < block_bytes:
        raise ConfigError(f"--host-kv-bytes is {asked}, but one KV block takes {block_bytes} bytes")
    return asked_bytes // block_bytes


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The arena of packed adapters on the host."""

    num_bytes: int  # of memory, or of addresses if it is elastic
    is_elastic: bool
    memory_bytes: int  # to be left out of the one budget; 0 where it is part of that
    # Where it is part of it: what of that adapters may take while no request uses some of them.
    idle_bytes: int | None = None


def plan_copied_arena(
    config: EngineConfig, device_type: str, host_available_bytes: int
) -> ArenaPlan:
    """Size the arena that adapters are copied from. CUDA pins it, so its size is fixed there.

    Raises:
        ResourceError: There is less memory than was asked for.
    """
    asked_bytes = _asked_arena_bytes(config)
    if asked_bytes is None:
        asked_bytes = min(int(host_available_bytes * _ARENA_SHARE), _MAX_ARENA_BYTES)
    elif not 0 < asked_bytes <= host_available_bytes:
        raise ResourceError(
            f"--host-adapter-bytes is {config.host_adapter_bytes}, but adapters that are copied "
            f"to the device need some, and {host_available_bytes / _GIB:.3g} GiB of host memory "
            "are free"
        )
    return ArenaPlan(asked_bytes, device_type == "cpu", memory_bytes=asked_bytes)


def plan_shared_arena(config: EngineConfig, capacity_bytes: int) -> ArenaPlan:
    """Size the arena that is the device's memory: ``capacity_bytes`` are its and the KV's."""
    asked_bytes = _asked_arena_bytes(config)
    return ArenaPlan(
        num_bytes=_ADDRESSES_PER_BYTE * capacity_bytes,
        is_elastic=True,
        memory_bytes=0,
        idle_bytes=capacity_bytes if asked_bytes is None else min(asked_bytes, capacity_bytes),
    )


def _asked_arena_bytes(config: EngineConfig) -> int | None:
    if config.host_adapter_bytes is None:
        return None
    return parse_num_bytes(config.host_adapter_bytes, "--host-adapter-bytes")
