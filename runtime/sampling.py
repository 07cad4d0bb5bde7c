"""What a request asks of the sampler. Plain data; knows nothing of HTTP or tensors."""

import math
from dataclasses import dataclass

from .errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    Fields keep the names of OpenAI's API and, where that has none, of vLLM's.
    Raises ``RequestError`` (with ``param``) for a value out of range.
    """

    n: int = 1  # choices per prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    seed: int | None = None  # None = drawn by the front end once per request
    max_tokens: int | None = 16  # None = as many as the context takes
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; 0 = the chosen one only
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _string_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_range("n", self.n, 1, MAX_CHOICES)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})",
                    param="min_tokens",
                )
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, 2**31 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"{len(self.stop)} stop strings were given, at most {MAX_STOP_STRINGS} are served",
                param="stop",
            )
        if any(not text for text in self.stop):
            raise RequestError("a stop string is empty", param="stop")


def _string_tuple(value: "str | tuple[str, ...] | list[str] | None") -> tuple[str, ...]:
    """Accept one string where a list of strings is meant, as OpenAI's API does."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise ``RequestError`` unless ``low <= value <= high`` (``<`` below if ``open_low``)."""
    below = value <= low if open_low else value < low
    if below or value > high or math.isnan(value):
        left = "(" if open_low else "["
        raise RequestError(f"{name} is {value}, must be in {left}{low}, {high}]", param=name)
