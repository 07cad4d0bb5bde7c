"""What a scheduler is told once. Plain data; machine facts are resolved before."""

from dataclasses import dataclass

from ..errors import ConfigError

DEFAULT_MAX_OVERTAKING_TOKENS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of steps and requests. Raises ``ConfigError`` for a limit below 1."""

    max_num_batched_tokens: int  # of one step
    max_num_seqs: int  # requests that run at once
    max_model_len: int  # prompt plus output of one request
    block_size: int  # tokens in one KV block
    max_num_waiting: int | None = None  # None = no limit
    max_decode_gap_s: float | None = None  # see ``DecodeGap``; None = by how fast the machine is
    max_queue_s: float | None = None  # that a request waits for its first turn; None = no limit
    mix_decode_with_prefill: bool = True  # decode rows ride along with prefill chunks
    recompute_at_tokens: int | None = None  # KV made below this length is of no use from it on
    prefetch_expected: bool = False  # adapters, by when they were asked for before
    max_prefetch_requests: int = 16  # waiting requests whose adapters load ahead of admission
    max_assisted_tokens_per_step: int = 512  # of requests whose adapter is still being loaded
    max_assisted_rows_per_step: int = 4  # such requests
    growth_headroom: float = 0.01  # share of the blocks that admission leaves to growth

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size",
            "max_assisted_tokens_per_step", "max_assisted_rows_per_step",
        ):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is {value}, must be at least 1")
