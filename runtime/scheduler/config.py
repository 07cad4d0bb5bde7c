"""Configuration of a scheduler. Plain data; facts of the machine are resolved before."""

from dataclasses import dataclass

from ..errors import ConfigError

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
    recompute_at_tokens: int | None = None  # KV of a shorter context is useless from here on
    prefetch_expected: bool = False  # load adapters of expected requests ahead
    max_prefetch_requests: int = 16  # adapters of so many waiting requests are loaded ahead
    max_assisted_tokens_per_step: int = 512  # of cold requests
    max_assisted_rows_per_step: int = 4  # cold requests
    growth_headroom: float = 0.01  # share of blocks that admission leaves free

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size",
            "max_assisted_tokens_per_step", "max_assisted_rows_per_step",
        ):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is {value}, must be at least 1")
