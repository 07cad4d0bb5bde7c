"""The answers of ``/v1/messages``: blocks, and the events of a stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..tools.parts import PartKind
from .answer_blocks import BlockWriter
from .responses import Usage


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text of the model."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the model has thought; it is not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a function, which the client runs."""

    id: str
    name: str
    input: Mapping[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicUsage(msgspec.Struct, frozen=True):
    """Token counts of one message; tokens of the prompt that were cached are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, usage: Usage) -> "AnthropicUsage":
        """Return the form of this route."""
        num_cached = usage.prompt_tokens_details.cached_tokens
        return cls(usage.prompt_tokens - num_cached, usage.completion_tokens, num_cached)


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The next message of a conversation."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[Block] = ()
    stop_reason: str | None = None  # end_turn, max_tokens, stop_sequence or tool_use
    stop_sequence: str | None = None
    usage: AnthropicUsage


class AnthropicEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream; which fields it has follows from its type."""

    type: str
    index: int | msgspec.UnsetType = msgspec.UNSET
    message: AnthropicMessage | msgspec.UnsetType = msgspec.UNSET
    content_block: Block | msgspec.UnsetType = msgspec.UNSET
    delta: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    usage: AnthropicUsage | msgspec.UnsetType = msgspec.UNSET
    error: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET


_DELTAS = {
    PartKind.CONTENT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


class AnthropicBlocks(BlockWriter[AnthropicEvent]):
    """Makes the blocks of one answer, and the events of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []  # that have ended

    def opened(self) -> Iterator[AnthropicEvent]:
        block = self._block("")
        yield AnthropicEvent(type="content_block_start", index=self.num_blocks, content_block=block)

    def delta(self, text: str) -> AnthropicEvent:
        kind, field = _DELTAS[self.kind]
        delta = {"type": kind, field: text}
        return AnthropicEvent(type="content_block_delta", index=self.num_blocks, delta=delta)

    def closed(self, text: str, *, is_complete: bool) -> Iterator[AnthropicEvent]:
        self.blocks.append(self._block(text))
        yield AnthropicEvent(type="content_block_stop", index=self.num_blocks)

    def _block(self, text: str) -> Block:
        match self.kind:
            case PartKind.CALL:
                return ToolUseBlock(self.head.call_id, self.head.name, _input(text))
            case PartKind.REASONING:
                return ThinkingBlock(text)
            case PartKind.CONTENT:
                return TextBlock(text)


def _input(text: str) -> Mapping[str, Any]:
    """Return the arguments of a call; those of a call that is cut are lost."""
    try:
        arguments = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
