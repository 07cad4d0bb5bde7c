"""The bodies of answers, as structs that encode to JSON."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
from starlette.responses import Response

from ..frontend.outputs import Logprob, RequestOutput, TokenCandidates
from ..scheduler.events import AdapterStart
from ..timing import EngineTiming
from ..tools.parts import AnswerPart, ParsedAnswer, PartKind

_BYTES_PREFIX = "bytes:\\x"  # prefix of a token that is a part of a character


class Envelope(msgspec.Struct, frozen=True):
    """The fields that an answer shares with all its chunks."""

    id: str
    object: str
    created: int  # Unix time
    model: str


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed again."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one HTTP request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """Return the token counts of one HTTP request so far, from the last output of each prompt."""
    num_prompt = num_generated = num_cached = 0
    for output in outputs:
        num_prompt += len(output.prompt_token_ids)
        num_generated += sum(choice.num_tokens for choice in output.outputs)
        # All choices share the prompt; the first one shows what was cached before the request.
        num_cached += min(choice.num_cached_tokens for choice in output.outputs)
    return Usage(num_prompt, num_generated, num_prompt + num_generated, PromptTokensDetails(num_cached))


class PromptTokens(msgspec.Struct, frozen=True):
    """Sources of the KV of a prompt's tokens."""

    computed: int
    cached: int  # found on the device
    host_cached: int  # copied from the host


class ChoiceTiming(msgspec.Struct, frozen=True):
    """Where one choice's time in the engine went until its first token."""

    time_to_first_token_s: float  # or to its end without one
    parts_s: dict[str, float]  # their sum is the time above
    num_preemptions: int
    num_squashes: int
    predicted_output_tokens: int
    # Absent if the choice failed.
    prompt_tokens: PromptTokens | msgspec.UnsetType = msgspec.UNSET
    output_tokens: int | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(
        cls,
        timing: EngineTiming,
        prompt_tokens: PromptTokens | msgspec.UnsetType = msgspec.UNSET,
        output_tokens: int | msgspec.UnsetType = msgspec.UNSET,
    ) -> "ChoiceTiming":
        """Return the form of an answer."""
        return cls(
            timing.first_token_s,
            dict(timing.parts),
            timing.num_preemptions,
            timing.num_squashes,
            timing.num_predicted_output_tokens,
            prompt_tokens,
            output_tokens,
        )


class Timing(msgspec.Struct, frozen=True):
    """Times in seconds since the request's arrival; only with return_timing."""

    time_to_first_token_s: float
    total_s: float
    outside_engine_s: float  # of the first token: tokenising, transport to the engine, HTTP
    engine: list[ChoiceTiming | None]  # by choice; null = not known
    adapter_starts: list[AdapterStart | None]  # by choice; null = its adapter was on the device


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Columns with one entry per token; offsets count characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None: the first token of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


TokenIds = Sequence[int] | msgspec.UnsetType  # only with return_token_ids


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate for one token of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


# An entry per token, by token id, null for the first one; only with prompt_logprobs.
PromptLogprobs = Sequence[dict[str, PromptLogprob] | None] | msgspec.UnsetType


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of ``/v1/completions``, whole or a part of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET  # in a stream, once
    prompt_logprobs: PromptLogprobs = msgspec.UNSET


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One candidate for one token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The sampled token and the best candidates."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat choice."""

    content: list[ChatTokenLogprob]


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a call."""

    name: str
    arguments: str  # JSON of an object


class ChatToolCall(msgspec.Struct, frozen=True):
    """A call of a function by the model."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of the model."""

    content: str | None  # None: there are only calls
    role: str = "assistant"
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # the same, as other servers name it

    @classmethod
    def of(cls, answer: ParsedAnswer) -> "ChatMessage":
        calls = [
            ChatToolCall(one.head.call_id, CalledFunction(one.head.name, one.arguments))
            for one in answer.calls
        ]
        reasoning = answer.reasoning or msgspec.UNSET
        return cls(
            None if calls and not answer.content else answer.content,
            tool_calls=calls or msgspec.UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of ``/v1/chat/completions``."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: TokenIds = msgspec.UNSET


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new part of a call's function."""

    arguments: str  # a piece of their JSON
    name: str | None = None  # in the first part of a call


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new part of a call; the first one has the id and the name."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new part of a message in a stream."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as other servers name it

    @classmethod
    def of(cls, part: AnswerPart) -> "ChatDelta":
        if part.kind is PartKind.CONTENT:
            return cls(content=part.text)
        if part.kind is PartKind.REASONING:
            return cls(reasoning_content=part.text, reasoning=part.text)
        if part.head is None:
            return cls(tool_calls=[ToolCallDelta(part.index, FunctionDelta(part.text))])
        function = FunctionDelta(part.text, part.head.name)
        return cls(tool_calls=[ToolCallDelta(part.index, function, part.head.call_id, "function")])


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice in one chunk of a chat stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: TokenIds = msgspec.UNSET


ChoiceT = TypeVar("ChoiceT")


class Answer(Envelope, Generic[ChoiceT], frozen=True):
    """An answer that is not streamed."""

    choices: Sequence[ChoiceT]
    usage: Usage
    timing: Timing | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET  # of a chat
    prompt_logprobs: PromptLogprobs = msgspec.UNSET  # of a chat


class Chunk(Envelope, Generic[ChoiceT], frozen=True):
    """One event of a stream; the last one that is JSON may have no choice."""

    choices: Sequence[ChoiceT]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET  # with include_usage
    timing: Timing | msgspec.UnsetType = msgspec.UNSET  # in the last one, with return_timing
    prompt_token_ids: TokenIds = msgspec.UNSET  # in the first one of a chat


def json_response(value: object, *, status: int = 200) -> Response:
    """Return ``value`` as a JSON response."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs:
    """Return the scores of the prompt's tokens, if the request wants them."""
    if output.prompt_logprobs is None:
        return msgspec.UNSET
    return [
        None
        if candidates is None
        else {
            str(token_id): PromptLogprob(one.logprob, one.rank, one.decoded_token)
            for token_id, one in candidates.items()
        }
        for candidates in output.prompt_logprobs
    ]


def completion_logprobs(tokens: Sequence[TokenCandidates], *, text_offset: int) -> CompletionLogprobs:
    """Return columns for ``tokens``; ``text_offset``: the offset of the first one.

    Each dictionary of ``top_logprobs`` also holds the sampled token, at any rank.
    """
    columns = CompletionLogprobs([], [], [], [])
    for candidates in tokens:
        drawn = next(iter(candidates.values()))
        columns.tokens.append(drawn.decoded_token)
        columns.token_logprobs.append(drawn.logprob)
        columns.top_logprobs.append(
            {candidate.decoded_token: candidate.logprob for candidate in candidates.values()}
        )
        columns.text_offset.append(text_offset)
        text_offset += len(drawn.decoded_token) if _is_text(drawn) else 0
    return columns


def num_text_chars(tokens: Sequence[TokenCandidates]) -> int:
    """Return the number of characters that the sampled tokens add to the offsets."""
    drawn = [next(iter(candidates.values())) for candidates in tokens]
    return sum(len(token.decoded_token) for token in drawn if _is_text(token))


def chat_logprobs(tokens: Sequence[TokenCandidates], *, num_top: int) -> ChatLogprobs:
    """Return an entry per token with its ``num_top`` best candidates, the best first."""
    content = []
    for candidates in tokens:
        drawn = next(iter(candidates.values()))
        best = sorted(
            (candidate for candidate in candidates.values() if candidate.rank <= num_top),
            key=lambda candidate: candidate.rank,
        )
        content.append(
            ChatTokenLogprob(
                token=drawn.decoded_token,
                logprob=drawn.logprob,
                bytes=_token_bytes(drawn),
                top_logprobs=[
                    ChatTopLogprob(one.decoded_token, one.logprob, _token_bytes(one)) for one in best
                ],
            )
        )
    return ChatLogprobs(content)


def _is_text(candidate: Logprob) -> bool:
    return not candidate.decoded_token.startswith(_BYTES_PREFIX)


def _token_bytes(candidate: Logprob) -> list[int]:
    if _is_text(candidate):
        return list(candidate.decoded_token.encode("utf-8", "replace"))
    try:
        digits = candidate.decoded_token.removeprefix("bytes:").replace("\\x", "")
        return list(bytes.fromhex(digits))
    except ValueError:  # text that happens to begin like this
        return list(candidate.decoded_token.encode())
