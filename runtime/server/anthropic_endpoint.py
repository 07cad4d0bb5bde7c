"""``POST /v1/messages``: continues a conversation in Anthropic's form, as a chat does."""

from collections.abc import Sequence

import msgspec

from ..frontend.outputs import CompletionOutput, RequestOutput
from ..tools.parts import AnswerParser
from .anthropic_blocks import (
    AnthropicBlocks,
    AnthropicEvent,
    AnthropicMessage,
    AnthropicUsage,
    ToolUseBlock,
    encoded_events,
)
from .anthropic_chat import FIELD_NAMES, chat_body_of
from .anthropic_fields import AnthropicRequest
from .body import is_large, parse_body
from .errors import ErrorReply
from .generation_request import ParsedRequest
from .open_record import OpenRecord, PromptRun
from .responses import Timing, Usage, usage_of
from .sse import StreamEncoder
from .translation import TranslatedEndpoint


class AnthropicEndpoint(TranslatedEndpoint):
    """Answers ``/v1/messages``."""

    id_prefix = "msg"
    field_names = FIELD_NAMES

    async def parse(self, body: bytes, record: OpenRecord) -> ParsedRequest:
        asked = await parse_body(AnthropicRequest, body, self.state.unknown_fields)
        record.read(asked.model, stream=bool(asked.stream))
        return await self._as_chat(chat_body_of, asked, record, is_large=is_large(body))

    def stream_encoder(self, request: ParsedRequest) -> StreamEncoder:
        return _MessageEvents(request)

    def answer(self, request: ParsedRequest, runs: Sequence[PromptRun]) -> msgspec.Struct:
        (choice,) = runs[0].latest.outputs
        blocks = AnthropicBlocks()
        list(blocks.add(request.answers.whole(choice)))  # its events are for streams
        list(blocks.end(is_complete=True))
        reason, sequence = _stop_of(choice, blocks)
        return msgspec.structs.replace(
            _message(request, usage_of(run.latest for run in runs)),
            content=blocks.blocks, stop_reason=reason, stop_sequence=sequence,
        )  # fmt: skip


class _MessageEvents(StreamEncoder):
    """The events of one stream."""

    __slots__ = ("_blocks", "_latest", "_parser", "_request")

    def __init__(self, request: ParsedRequest) -> None:
        self._request = request
        self._blocks = AnthropicBlocks()
        self._parser: AnswerParser | None = None  # there is none before the prompt is made
        self._latest: CompletionOutput | None = None

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        events = b""
        if self._parser is None:
            self._parser = self._request.answers.parser()
            message = _message(self._request, usage_of([output]))
            events = encoded_events([AnthropicEvent(type="message_start", message=message)])
        (self._latest,) = output.outputs
        return events + encoded_events(self._blocks.add(self._parser.feed(self._latest.new_text)))

    def end(self, usage: Usage | None, timing: Timing | None) -> bytes:
        assert self._parser is not None and self._latest is not None and usage is not None
        rest = self._request.answers.rest(self._parser, self._latest)
        events = [*self._blocks.add(rest), *self._blocks.end(is_complete=True)]
        reason, sequence = _stop_of(self._latest, self._blocks)
        events.append(
            AnthropicEvent(
                type="message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=AnthropicUsage.of(usage),
            )
        )
        return encoded_events([*events, AnthropicEvent(type="message_stop")])

    def error_event(self, reply: ErrorReply) -> bytes:
        error = {"type": reply.type, "message": reply.message}
        return encoded_events([AnthropicEvent(type="error", error=error)])


def _message(request: ParsedRequest, usage: Usage) -> AnthropicMessage:
    """Return the message before its first token."""
    envelope = request.envelope
    return AnthropicMessage(id=envelope.id, model=envelope.model, usage=AnthropicUsage.of(usage))


def _stop_of(choice: CompletionOutput, blocks: AnthropicBlocks) -> tuple[str, str | None]:
    """Return why the answer ended, and the stop sequence that ended it, if one did."""
    if choice.finish_reason == "length":
        return "max_tokens", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    has_calls = any(isinstance(block, ToolUseBlock) for block in blocks.blocks)
    return "tool_use" if has_calls else "end_turn", None
