"""The bodies of answers of ``/v1/responses``, as structs that encode to JSON."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from .responses import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """A text of the model."""

    text: str
    annotations: Sequence[Any] = ()
    logprobs: Sequence[Any] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """What the model has thought."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: Sequence[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning before a message or a call; it is not summarised."""

    id: str
    status: ItemStatus
    summary: Sequence[Any] = ()
    content: Sequence[ReasoningText]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function, which the client runs."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str  # JSON of an object


Item = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Tokens that were not computed again; all tokens are cached, at no price."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Tokens of reasoning are not counted apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """Return the form of this route."""
        return cls(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        )


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why a stream ended early."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer is cut."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """One response, with the fields of its request that shaped it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # Unix time
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    model: str
    output: Sequence[Item] = ()
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    tools: Sequence[Any]
    tool_choice: Any
    parallel_tool_calls: bool
    text: Mapping[str, Any]
    reasoning: Mapping[str, Any]
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: Mapping[str, Any]
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream; which fields it has follows from its type."""

    type: str
    sequence_number: int
    response: ResponseObject | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    item: Item | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    part: OutputText | ReasoningText | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: Sequence[Any] | msgspec.UnsetType = msgspec.UNSET
