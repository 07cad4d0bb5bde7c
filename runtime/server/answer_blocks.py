"""Divides the parts of an answer into blocks: a text, a reasoning or a call.

Events of streams have a ``type``, which names them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from ..frontend.outputs import CompletionOutput, RequestOutput
from ..tools.parts import AnswerParser, AnswerPart, CallHead, PartKind
from .generation_request import ParsedRequest
from .responses import Timing, Usage
from .sse import StreamEncoder

EventT = TypeVar("EventT")


class BlockWriter(ABC, Generic[EventT]):
    """Joins the parts of one answer to blocks, and makes the events of a stream from them.

    A block ends where a part of another kind, or of another call, begins. Content that is only
    space is none, unless it is the whole answer.
    """

    def __init__(self) -> None:
        self.num_blocks = 0  # that have ended
        self.head = CallHead("", "")  # of the open call
        self._open: tuple[PartKind, int] | None = None  # kind of the open block, index of its call
        self._pieces: list[str] = []  # of the open block's text
        self._space = ""  # before content

    @property
    def kind(self) -> PartKind:
        assert self._open is not None, "no block is open"
        return self._open[0]

    def add(self, parts: Iterable[AnswerPart]) -> Iterator[EventT]:
        """Yield the events of the next parts. All of them must be taken."""
        for part in parts:
            text = part.text
            if part.kind is PartKind.CONTENT and self._open != (PartKind.CONTENT, 0):
                self._space += text
                text = self._space
                if not text or text.isspace():
                    continue
            self._space = ""
            if self._open != (part.kind, part.index):
                yield from self._close(is_complete=True)
                yield from self._begin(part)
            if text:
                yield from self._write(text)

    def end(self, *, is_complete: bool) -> Iterator[EventT]:
        """Yield the events of the end of the last block. An empty answer is an empty text."""
        if self._open is None and not self.num_blocks:
            yield from self._begin(AnswerPart(PartKind.CONTENT, ""))
            if self._space:
                yield from self._write(self._space)
        yield from self._close(is_complete=is_complete)

    def _begin(self, part: AnswerPart) -> Iterator[EventT]:
        self._open = part.kind, part.index
        self.head = part.head or self.head
        yield from self.opened()

    def _write(self, text: str) -> Iterator[EventT]:
        self._pieces.append(text)
        yield self.delta(text)

    def _close(self, *, is_complete: bool) -> Iterator[EventT]:
        if self._open is None:
            return
        yield from self.closed("".join(self._pieces), is_complete=is_complete)
        self.num_blocks += 1
        self._open, self._pieces = None, []

    @abstractmethod
    def opened(self) -> Iterator[EventT]:
        """Yield the events of a block that begins."""

    @abstractmethod
    def delta(self, text: str) -> EventT:
        """Return the event of more text in the open block; of a call, of its arguments."""

    @abstractmethod
    def closed(self, text: str, *, is_complete: bool) -> Iterator[EventT]:
        """Yield the events of the open block's end; ``text``: all of it."""


class BlockEvents(StreamEncoder):
    """Encodes the stream of one answer."""

    __slots__ = ("_blocks", "_latest", "_parser", "_request")

    def __init__(self, request: ParsedRequest, blocks: BlockWriter[Any]) -> None:
        self._request = request
        self._blocks = blocks
        self._parser: AnswerParser | None = None  # there is none before the prompt is made
        self._latest: CompletionOutput | None = None

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        events = b""
        if self._parser is None:
            self._parser = self._request.answers.parser()
            events = encoded(self._first(output))
        (self._latest,) = output.outputs
        return events + encoded(self._blocks.add(self._parser.feed(self._latest.new_text)))

    def end(self, usage: Usage | None, timing: Timing | None) -> bytes:
        assert self._parser is not None and self._latest is not None and usage is not None
        rest = self._request.answers.rest(self._parser, self._latest)
        events = encoded(self._blocks.add(rest))
        events += encoded(self._blocks.end(is_complete=is_complete(self._latest)))
        return events + encoded(self._last(self._latest, usage))

    @abstractmethod
    def _first(self, output: RequestOutput) -> Iterable[Any]:
        """Return the events before the first block."""

    @abstractmethod
    def _last(self, choice: CompletionOutput, usage: Usage) -> Iterable[Any]:
        """Return the events after the last block."""


def is_complete(choice: CompletionOutput) -> bool:
    """Whether the model has ended the answer, or a stop sequence has."""
    return choice.finish_reason != "length"


def encoded(events: Iterable[Any]) -> bytes:
    """Return events as server-sent events."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event.type.encode(), msgspec.json.encode(event)) for event in events
    )
