"""Limits of a scheduler, and whether a request can be served at all within them.

Limits that depend on the machine have their values already. Errors name the limit and its flag.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigError, RequestError
from ..limits import check_prompt_length
from ..memory.device_memory import DeviceMemory
from ..request import Request

DEFAULT_MAX_OVERTAKING_TOKENS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of steps and requests. Raises ``ConfigError`` for a limit below 1."""

    max_num_batched_tokens: int  # of one step
    max_num_seqs: int  # running requests
    max_model_len: int  # prompt plus output of one request
    block_size: int  # tokens in one KV block
    max_num_waiting: int | None = None  # None = no limit
    max_decode_gap_s: float | None = None  # see ``DecodeGap``; None = by the machine's speed
    max_queue_s: float | None = None  # before a request begins; None = no limit
    mix_decode_with_prefill: bool = True  # decode rows share the forward pass of prefill chunks
    separate_assisted_rows: bool = False  # assisted rows have a forward pass of their own
    recompute_at_tokens: int | None = None  # KV of a shorter context is useless from here on
    max_prefetch_requests: int = 16  # adapters of so many waiting requests are loaded ahead
    max_assisted_tokens_per_step: int = 512  # of cold requests
    max_assisted_rows_per_step: int = 4  # cold requests
    growth_headroom: float = 0.01  # share of blocks that admission leaves free

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "block_size",
            "max_assisted_tokens_per_step",
            "max_assisted_rows_per_step",
        ):
            value = getattr(self, name)
            if value < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is {value}, must be at least 1")


def max_total_tokens(request: Request, config: SchedulerConfig, memory: DeviceMemory) -> int:
    """Return the most tokens, prompt and output, that ``request`` can have.

    Raises ``RequestError`` if the prompt is empty or leaves no room for output, or if the request
    would not fit the device even alone.
    """
    num_prompt_tokens = request.num_prompt_tokens
    check_prompt_length(num_prompt_tokens, config.max_model_len)
    total_tokens = config.max_model_len
    if request.sampling.max_tokens is not None:
        total_tokens = min(total_tokens, num_prompt_tokens + request.sampling.max_tokens)
    _check_memory(request, total_tokens, config, memory)
    return total_tokens


def check_pin(
    num_bytes: int,
    pinned_bytes: int,
    other_bytes: int,
    open_requests: Iterable[Request],
    config: SchedulerConfig,
    memory: DeviceMemory,
) -> None:
    """Raise ``RequestError`` unless ``num_bytes`` more may be pinned.

    Pinned adapters are never evicted. So the rest of the memory must hold a request of the full
    context with an adapter of ``other_bytes``, and each open request by itself.
    """
    block_bytes = memory.block_bytes
    full_bytes = blocks_for(config.max_model_len - 1, config.block_size) * block_bytes
    if memory.adapter_limit_bytes is not None:
        capacity_bytes = memory.adapter_limit_bytes
        needed_bytes = max([other_bytes, *(request.adapter_bytes for request in open_requests)])
    else:
        capacity_bytes = memory.capacity_bytes
        open_bytes = [
            blocks_for(one.max_total_tokens - 1, config.block_size) * block_bytes + one.adapter_bytes
            for one in open_requests
        ]
        needed_bytes = max([full_bytes + other_bytes, *open_bytes])
    if pinned_bytes + num_bytes + needed_bytes > capacity_bytes:
        raise RequestError(
            f"the adapter takes {_mib(num_bytes)}, {_mib(pinned_bytes)} are pinned already "
            f"and one request may need {_mib(needed_bytes)}; there are {_mib(capacity_bytes)} "
            "(raise --memory-gib, lower --max-model-len, or unpin others)",
            param="pinned",
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def _check_memory(request: Request, total_tokens: int, config: SchedulerConfig, memory: DeviceMemory) -> None:
    """Raise ``RequestError`` unless the request fits the device alone."""
    num_blocks = blocks_for(total_tokens - 1, config.block_size)  # the last token needs no KV
    run_pages = () if request.adapter is None else request.adapter.run_pages
    if memory.can_ever_hold(num_blocks, request.adapter_bytes, request.adapter_id, run_pages):
        return
    limit_bytes = memory.adapter_limit_bytes
    if limit_bytes is not None and request.adapter_bytes > limit_bytes:
        raise RequestError(
            f"the adapter takes {_mib(request.adapter_bytes)}, but {_mib(limit_bytes)} of "
            "the memory are for adapters (raise --adapter-memory-fraction or --memory-gib)",
            param="model",
        )
    needed_bytes = num_blocks * memory.block_bytes + request.adapter_bytes
    pinned_bytes = memory.pins.num_bytes(without=request.adapter_id)
    pinned = f", {_mib(pinned_bytes)} of it for pinned adapters" if pinned_bytes else ""
    raise RequestError(
        f"{total_tokens} tokens with their adapter need {_mib(needed_bytes)} and {num_blocks} KV "
        f"blocks; there are {_mib(memory.capacity_bytes)} and {memory.num_blocks} "
        f"blocks in all{pinned} (raise --memory-gib, lower --max-model-len, or ask for fewer "
        "max_tokens)",
        param="max_tokens",
    )


def _mib(num_bytes: int) -> str:
    """Format bytes for a message."""
    return f"{num_bytes / 2**20:.2f} MiB"
