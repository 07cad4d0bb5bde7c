"""``POST /v1/responses``: answers input items, as a chat does; stores nothing.

Its output is items made of an answer's parts, and the events of a stream.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..frontend.outputs import CompletionOutput, RequestOutput
from ..tools.parts import PartKind
from .answer_blocks import BlockEvents, BlockWriter, encoded, is_complete
from .body import is_large, parse_body
from .endpoint import OpenRecord, PromptRun
from .errors import ErrorReply
from .generation_request import ParsedRequest
from .response_chat import FIELD_NAMES, chat_body
from .response_fields import ResponsesRequest
from .response_objects import (
    CallItem,
    IncompleteDetails,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from .responses import Usage, usage_of
from .sse import StreamEncoder
from .translation import TranslatedEndpoint

_ID_PREFIXES = {PartKind.CONTENT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_TEXT_EVENTS = {PartKind.CONTENT: "output_text", PartKind.REASONING: "reasoning_text"}


class ItemAssembler(BlockWriter[ResponseEvent]):
    """Makes an item of each block of one answer, and the events of a stream."""

    def __init__(self, response_id: str) -> None:
        super().__init__()
        self.items: list[Item] = []  # that have ended
        self._response_id = response_id
        self._num_events = 0

    def begin(self, response: ResponseObject) -> Iterator[ResponseEvent]:
        """Yield the events before the first part."""
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def finish(self, response: ResponseObject) -> ResponseEvent:
        """Return the last event of the stream; its name follows from the status."""
        return self._event(f"response.{response.status}", response=response)

    def opened(self) -> Iterator[ResponseEvent]:
        item = self._item("in_progress", None)
        yield self._event("response.output_item.added", item=item, **self._place())
        if self.kind in _TEXT_EVENTS:
            yield self._event(
                "response.content_part.added", part=_part(self.kind, ""), **self._place_of_text()
            )

    def delta(self, text: str) -> ResponseEvent:
        kind = self.kind
        if kind is PartKind.CALL:
            return self._event("response.function_call_arguments.delta", delta=text, **self._place_of_call())
        name = f"response.{_TEXT_EVENTS[kind]}.delta"
        return self._event(name, delta=text, **self._logprobs(kind), **self._place_of_text())

    def closed(self, text: str, *, is_complete: bool) -> Iterator[ResponseEvent]:
        kind = self.kind
        if kind is PartKind.CALL:
            yield self._event(
                "response.function_call_arguments.done",
                arguments=text,
                name=self.head.name,
                **self._place_of_call(),
            )
        else:
            name = f"response.{_TEXT_EVENTS[kind]}.done"
            yield self._event(name, text=text, **self._logprobs(kind), **self._place_of_text())
            yield self._event("response.content_part.done", part=_part(kind, text), **self._place_of_text())
        item = self._item("completed" if is_complete else "incomplete", text)
        yield self._event("response.output_item.done", item=item, **self._place())
        self.items.append(item)

    def _item(self, status: ItemStatus, text: str | None) -> Item:
        """Return the open item; ``text`` None: its text begins."""
        match self.kind:
            case PartKind.CALL:
                return CallItem(
                    id=self._id(),
                    status=status,
                    call_id=self.head.call_id,
                    name=self.head.name,
                    arguments=text or "",
                )
            case PartKind.REASONING:
                thoughts = [] if text is None else [ReasoningText(text)]
                return ReasoningItem(id=self._id(), status=status, content=thoughts)
            case PartKind.CONTENT:
                texts = [] if text is None else [OutputText(text)]
                return MessageItem(id=self._id(), status=status, content=texts)

    def _id(self) -> str:
        return f"{_ID_PREFIXES[self.kind]}_{self._response_id}_{self.num_blocks}"

    def _place(self) -> dict[str, Any]:
        return {"output_index": self.num_blocks}

    def _place_of_call(self) -> dict[str, Any]:
        return {"item_id": self._id(), "output_index": self.num_blocks}

    def _place_of_text(self) -> dict[str, Any]:
        return self._place_of_call() | {"content_index": 0}

    def _logprobs(self, kind: PartKind) -> dict[str, Any]:
        return {"logprobs": []} if kind is PartKind.CONTENT else {}

    def _event(self, kind: str, /, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event


def _part(kind: PartKind, text: str) -> OutputText | ReasoningText:
    return OutputText(text) if kind is PartKind.CONTENT else ReasoningText(text)


_FAILURE_CODES = {429: "rate_limit_exceeded"}  # by status; else "server_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(ParsedRequest):
    """One request of this route."""

    asked: ResponsesRequest

    def response(self) -> ResponseObject:
        """Return the response before its first token."""
        asked = self.asked
        text = {} if asked.text is None else asked.text.model_dump(exclude_none=True)
        reasoning = {} if asked.reasoning is None else asked.reasoning.model_dump()
        return ResponseObject(
            id=self.envelope.id,
            created_at=self.envelope.created,
            model=self.envelope.model,
            instructions=asked.instructions,
            tools=asked.tools or (),
            tool_choice=asked.tool_choice or "auto",
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            text={"format": {"type": "text"}} | text,
            reasoning={"effort": None, "summary": None} | reasoning,
            max_output_tokens=asked.max_output_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            metadata=asked.metadata or {},
        )


class ResponsesEndpoint(TranslatedEndpoint):
    """Answers ``/v1/responses``."""

    id_prefix = "resp"
    prompt_field = "input"
    field_names = FIELD_NAMES

    async def parse(self, body: bytes, record: OpenRecord) -> ParsedResponse:
        asked = await parse_body(ResponsesRequest, body, self.state.unknown_fields)
        record.read(asked.model, stream=bool(asked.stream))
        parsed = await self._as_chat(chat_body, asked, record, is_large=is_large(body))
        fields = {one.name: getattr(parsed, one.name) for one in dataclasses.fields(parsed)}
        return ParsedResponse(**fields, asked=asked)

    def stream_encoder(self, request: ParsedRequest) -> StreamEncoder:
        assert isinstance(request, ParsedResponse)
        return _ResponseEvents(request)

    def answer(self, request: ParsedRequest, runs: Sequence[PromptRun]) -> msgspec.Struct:
        assert isinstance(request, ParsedResponse)
        (choice,) = runs[0].latest.outputs
        items = ItemAssembler(request.envelope.id)
        list(items.add(request.answers.whole(choice)))  # its events are for streams
        list(items.end(is_complete=is_complete(choice)))
        return _ended(request.response(), items, choice, usage_of(run.latest for run in runs))


class _ResponseEvents(BlockEvents):
    __slots__ = ("_response",)
    _blocks: ItemAssembler

    def __init__(self, request: ParsedResponse) -> None:
        self._response = request.response()
        super().__init__(request, ItemAssembler(self._response.id))

    def _first(self, output: RequestOutput) -> Iterable[ResponseEvent]:
        return self._blocks.begin(self._response)

    def _last(self, choice: CompletionOutput, usage: Usage) -> Iterable[ResponseEvent]:
        return [self._blocks.finish(_ended(self._response, self._blocks, choice, usage))]

    def error_event(self, reply: ErrorReply) -> bytes:
        code = _FAILURE_CODES.get(reply.status, "server_error")
        response = msgspec.structs.replace(
            self._response,
            status="failed",
            output=self._blocks.items,
            error=ResponseFailure(code, reply.message),
        )
        return encoded([self._blocks.finish(response)])


def _ended(
    response: ResponseObject, items: ItemAssembler, choice: CompletionOutput, usage: Usage
) -> ResponseObject:
    has_ended = is_complete(choice)
    return msgspec.structs.replace(
        response,
        status="completed" if has_ended else "incomplete",
        incomplete_details=None if has_ended else IncompleteDetails(),
        output=items.items,
        usage=ResponseUsage.of(usage),
    )
