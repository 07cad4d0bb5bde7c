"""Sampling parameters of a request. Plain data without HTTP or tensors."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .errors import RequestError
from .limits import check_num_bad_words, check_structure_bytes

MAX_LOGPROBS = 20
MAX_CHOICES = 128
STRUCTURE_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a number: ``low`` to ``high``, inclusive unless ``open_low``."""

    low: float
    high: float
    open_low: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ``RequestError`` for field ``name`` unless ``value`` is in the range."""
        below = value <= self.low if self.open_low else value < self.low
        if below or value > self.high or math.isnan(value):
            raise RequestError(f"{name} is {value}, must be in {self}", param=name)

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low}, {self.high}]"


_TOKEN_ID = Range(0, 2**31 - 1)
_BIAS = Range(-100.0, 100.0)  # as OpenAI's API has it
# Ranges of the numeric fields of ``SamplingParams``.
RANGES: Mapping[str, Range] = {
    "n": Range(1, MAX_CHOICES),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, open_low=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "min_tokens": Range(0, 2**31 - 1),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.0, 100.0, open_low=True),
    "max_tokens": Range(0, 2**31 - 1),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "seed": Range(-(2**63), 2**64 - 1),
    "truncate_prompt_tokens": Range(-1, 2**31 - 1),
}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an answer has: a schema, regex, list of choices, grammar, or tags.

    Raises ``RequestError`` for an unknown ``kind`` and a ``text`` that is too long. Whether the
    text can be compiled is checked when a request is sent.
    """

    kind: str  # one of ``STRUCTURE_KINDS``
    text: str  # schema, choices and tags as JSON; a regex; a grammar in llguidance's Lark or GBNF
    field: str = "structured_output"  # the request's field that has it, for errors

    def __post_init__(self) -> None:
        if self.kind not in STRUCTURE_KINDS:
            raise RequestError(
                f"the kind of {self.field} is {self.kind!r}, must be one of {', '.join(STRUCTURE_KINDS)}",
                param=self.field,
            )
        check_structure_bytes(self.text, self.field)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    Fields have the names of OpenAI's API, or else those of vLLM.
    Raises ``RequestError`` (with ``param``) for a value out of range.
    """

    n: int = 1  # choices per prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    seed: int | None = None  # None = drawn by the front end once per request
    max_tokens: int | None = 16  # None = up to the context length; 0 = only score the prompt
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
    logit_bias: Mapping[int, float] | None = None  # added to logits, by token
    allowed_token_ids: tuple[int, ...] | None = None  # None = all
    bad_words: tuple[str, ...] = ()  # texts that are never completed
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # sequences of tokens, likewise
    prompt_logprobs: int | None = None  # alternatives per prompt token; 0 = the token only
    truncate_prompt_tokens: int | None = None  # the last ones kept; -1 = as many as fit
    structured_output: StructuredOutput | None = None  # None = any text
    structured_forced_tokens: bool = True  # text without a choice is computed at once, not drawn

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _string_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words", _string_tuple(self.bad_words))
        object.__setattr__(self, "bad_words_ids", tuple(map(tuple, self.bad_words_ids)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        for name, bounds in RANGES.items():
            value = getattr(self, name)
            if value is not None:
                bounds.check(name, value)
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens is 0, must be 1 or more, or -1 for as many as fit",
                param="truncate_prompt_tokens",
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens is 0, must be in [1, 2147483647]; 0 is for requests that score their "
                "prompt: give prompt_logprobs, or echo to /v1/completions",
                param="max_tokens",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})", param="min_tokens"
            )
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        if any(not text for text in self.stop):
            raise RequestError("a stop string is empty", param="stop")
        self._check_token_rules()

    def _check_token_rules(self) -> None:
        """Raise ``RequestError`` for invalid rules about single tokens."""
        _check_token_ids("logit_bias", self.logit_bias or ())
        for bias in (self.logit_bias or {}).values():
            _BIAS.check("logit_bias", bias)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty", param="allowed_token_ids")
        _check_token_ids("allowed_token_ids", self.allowed_token_ids or ())
        for token_ids in self.bad_words_ids:
            _check_token_ids("bad_words_ids", token_ids)
        check_num_bad_words(len(self.bad_words))
        if not all(self.bad_words) or not all(self.bad_words_ids):
            raise RequestError("a bad word is empty", param="bad_words")


def _check_token_ids(name: str, token_ids: Collection[int]) -> None:
    """Raise ``RequestError`` for field ``name`` if an id is out of range."""
    if token_ids:
        _TOKEN_ID.check(name, min(token_ids))
        _TOKEN_ID.check(name, max(token_ids))


def _string_tuple(value: "str | tuple[str, ...] | list[str] | None") -> tuple[str, ...]:
    """Accept one string where a list of strings is meant, as OpenAI's API does."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
