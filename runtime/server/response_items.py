"""The output of ``/v1/responses``: items made of an answer's parts, and the events of a stream."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ..tools.parts import PartKind
from .answer_blocks import BlockWriter
from .response_objects import (
    CallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
)

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
        """Return the id of the open item."""
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


def encoded(events: Iterable[ResponseEvent]) -> bytes:
    """Return events as server-sent events."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event.type.encode(), msgspec.json.encode(event)) for event in events
    )
