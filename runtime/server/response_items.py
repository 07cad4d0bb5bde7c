"""The output of ``/v1/responses``: items made of an answer's parts, and the events of a stream."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from ..tools.parts import AnswerPart, CallHead, PartKind
from .response_objects import (
    CallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
)

_Status = Literal["in_progress", "completed", "incomplete"]
_ID_PREFIXES = {PartKind.CONTENT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_TEXT_EVENTS = {PartKind.CONTENT: "output_text", PartKind.REASONING: "reasoning_text"}


class ItemAssembler:
    """Joins the parts of one answer to items, and returns the events of each part.

    An item ends where a part of another kind, or of another call, begins.
    """

    def __init__(self, response_id: str) -> None:
        self.items: list[Item] = []  # that have ended
        self._response_id = response_id
        self._num_events = 0
        self._open: tuple[PartKind, int] | None = None  # kind of the open item, index of its call
        self._head = CallHead("", "")  # of the open call
        self._pieces: list[str] = []  # of the open item's text
        self._blank = ""  # content before an item, which is none if it is only space

    def begin(self, response: ResponseObject) -> Iterator[ResponseEvent]:
        """Yield the events before the first part."""
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, parts: Iterable[AnswerPart]) -> Iterator[ResponseEvent]:
        """Yield the events of the next parts. All of them must be taken."""
        for part in parts:
            text = part.text
            if part.kind is PartKind.CONTENT and self._open != (PartKind.CONTENT, 0):
                self._blank += text
                text = self._blank
                if not text or text.isspace():
                    continue
            self._blank = ""
            if self._open != (part.kind, part.index):
                yield from self._close("completed")
                yield from self._open_item(part)
            if text:
                self._pieces.append(text)
                yield self._delta(part.kind, text)

    def end(self, *, is_complete: bool) -> Iterator[ResponseEvent]:
        """Yield the events of the end of the last item. An empty answer is an empty message."""
        if self._open is None and not self.items:
            yield from self._open_item(AnswerPart(PartKind.CONTENT, ""))
            if self._blank:
                self._pieces.append(self._blank)
                yield self._delta(PartKind.CONTENT, self._blank)
        yield from self._close("completed" if is_complete else "incomplete")

    def finish(self, response: ResponseObject) -> ResponseEvent:
        """Return the last event of the stream; its name follows from the status."""
        return self._event(f"response.{response.status}", response=response)

    def _open_item(self, part: AnswerPart) -> Iterator[ResponseEvent]:
        self._open = part.kind, part.index
        self._head = part.head or self._head
        yield self._event(
            "response.output_item.added", item=self._item("in_progress", None), **self._place()
        )
        if part.kind in _TEXT_EVENTS:
            yield self._event(
                "response.content_part.added", part=_part(part.kind, ""), **self._place_of_text()
            )

    def _delta(self, kind: PartKind, text: str) -> ResponseEvent:
        if kind is PartKind.CALL:
            return self._event(
                "response.function_call_arguments.delta", delta=text, **self._place_of_call()
            )
        name = f"response.{_TEXT_EVENTS[kind]}.delta"
        return self._event(name, delta=text, **self._logprobs(kind), **self._place_of_text())

    def _close(self, status: _Status) -> Iterator[ResponseEvent]:
        if self._open is None:
            return
        kind, text = self._open[0], "".join(self._pieces)
        if kind is PartKind.CALL:
            yield self._event(
                "response.function_call_arguments.done",
                arguments=text, name=self._head.name, **self._place_of_call(),
            )  # fmt: skip
        else:
            name = f"response.{_TEXT_EVENTS[kind]}.done"
            yield self._event(name, text=text, **self._logprobs(kind), **self._place_of_text())
            yield self._event(
                "response.content_part.done", part=_part(kind, text), **self._place_of_text()
            )
        item = self._item(status, text)
        yield self._event("response.output_item.done", item=item, **self._place())
        self.items.append(item)
        self._open, self._pieces = None, []

    def _item(self, status: _Status, text: str | None) -> Item:
        """Return the open item; ``text`` None: its text begins."""
        assert self._open is not None
        kind = self._open[0]
        match kind:
            case PartKind.CALL:
                return CallItem(
                    id=self._id(), status=status, call_id=self._head.call_id,
                    name=self._head.name, arguments=text or "",
                )  # fmt: skip
            case PartKind.REASONING:
                thoughts = [] if text is None else [ReasoningText(text)]
                return ReasoningItem(id=self._id(), status=status, content=thoughts)
            case PartKind.CONTENT:
                texts = [] if text is None else [OutputText(text)]
                return MessageItem(id=self._id(), status=status, content=texts)

    def _id(self) -> str:
        """Return the id of the open item."""
        assert self._open is not None
        return f"{_ID_PREFIXES[self._open[0]]}_{self._response_id}_{len(self.items)}"

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.items)}

    def _place_of_call(self) -> dict[str, Any]:
        return {"item_id": self._id(), "output_index": len(self.items)}

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
        b"event: %b\ndata: %b\n\n" % (event.type.encode(), msgspec.json.encode(event))
        for event in events
    )
