"""The bodies of answers, as structs that encode straight to JSON."""

from typing import Any

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one HTTP request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AdapterStartInfo(msgspec.Struct, frozen=True):
    """How one choice was started whose adapter was not on the device."""

    strategy: str
    reason: str


class Timing(msgspec.Struct, frozen=True):
    """When things happened, in seconds from the request's arrival; only if asked for."""

    time_to_first_token_s: float
    total_s: float
    adapter_starts: list[AdapterStartInfo | None]  # by choice; null = its adapter was there


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Columns with one entry per token; offsets count characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of ``/v1/completions``, whole or a part of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One candidate for one token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The drawn token and the best candidates."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat choice."""

    content: list[ChatTokenLogprob]


class ChatMessage(msgspec.Struct, frozen=True):
    """What the model said."""

    content: str
    role: str = "assistant"


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of ``/v1/chat/completions``."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chat stream adds."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice in one chunk of a chat stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class Answer(msgspec.Struct, frozen=True):
    """The envelope of an answer that is not streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage
    timing: Timing | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``/v1/models``: the base model, or an adapter whose parent it is."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "corun"
    root: str
    parent: str | None
    max_model_len: int
