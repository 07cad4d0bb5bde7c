"""An answer in parts: reasoning, content and calls of functions. Plain data."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class PartKind(Enum):
    """What a part of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class CallHead:
    """The name of a called function, and the id of the call."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """The next piece of an answer, in the order in which the model wrote it."""

    kind: PartKind
    text: str  # of a call: a piece of the JSON of its arguments
    index: int = 0  # of the call, from 0
    head: CallHead | None = None  # in the first part of a call, which has no text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call."""

    head: CallHead
    arguments: str  # JSON of an object


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[ToolCall]


class AnswerParser(Protocol):
    """Splits the text of one choice into parts as it arrives.

    The parts of a text are the same, once joined, however the text was cut.
    """

    def feed(self, text: str) -> list[AnswerPart]: ...

    def finish(self) -> list[AnswerPart]:
        """Return the parts that were held back. No text follows."""


class PlainParser:
    """An ``AnswerParser`` for texts that are all content."""

    def feed(self, text: str) -> list[AnswerPart]:
        return [AnswerPart(PartKind.CONTENT, text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


def joined(parts: Iterable[AnswerPart]) -> ParsedAnswer:
    """Return the whole answer that consists of ``parts``."""
    texts: dict[PartKind, list[str]] = {kind: [] for kind in PartKind}
    heads: list[CallHead] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.head is not None:
            heads.append(part.head)
            arguments.append([])
        if part.kind is PartKind.CALL:
            arguments[part.index].append(part.text)
        else:
            texts[part.kind].append(part.text)
    return ParsedAnswer(
        "".join(texts[PartKind.CONTENT]),
        "".join(texts[PartKind.REASONING]),
        [ToolCall(head, "".join(one)) for head, one in zip(heads, arguments, strict=True)],
    )


def parsed(text: str, parser: AnswerParser) -> ParsedAnswer:
    """Return the whole answer of a choice with ``text``; ``parser`` is new."""
    return joined([*parser.feed(text), *parser.finish()])
