"""Divides the text of an answer into parts by a response template, as it arrives.

Text that may belong to a mark is held back until that is clear. A call that cannot be read is
content, so that nothing is lost.
"""

import json
import secrets
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from .contents import cast_arguments, transformed, value_of
from .parts import AnswerPart, CallHead, PartKind
from .response_template import Match, ResponseTemplate, TemplateField

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
CALLS_FIELD = "tool_calls"
_MAX_STILL = 8  # marks without a character in between
_ID_CHARACTERS = string.ascii_letters + string.digits
_NUM_ID_CHARACTERS = 9  # some chat templates accept no other ids


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Where the JSON of a call has its name and its arguments."""

    name: str = "name"
    arguments: str | None = "arguments"  # None = the JSON is the arguments, the name stands before
    in_list: bool = False  # of calls


class CallScanner:
    """Reads the JSON of one call, or of a list of calls, piece by piece.

    It does not check the JSON. It shows nothing of a call that has its arguments before its name,
    or arguments that are no object.
    """

    def __init__(self, keys: CallKeys, name: str | None = None) -> None:
        """``name``: of the function, if it stands before the JSON."""
        self._keys = keys
        self._depth = 0  # of open brackets
        self._call_depth = int(keys.in_list) + (keys.arguments is not None)  # within a call
        self.in_string = self._is_escaped = False
        self._string: list[str] | None = None  # a name, as it is read
        self._key: str | None = None
        self._is_value = keys.arguments is None  # a value follows, not a key
        self._name = name
        self._in_arguments = False
        self.num_complete = 0  # calls with complete arguments

    def feed(self, text: str) -> Iterator[tuple[str | None, str]]:
        """Yield pieces of arguments; with the first one of a call, its name."""
        start = 0
        head: str | None = None
        for at, character in enumerate(text):
            was_inside = self._in_arguments
            self._feed_character(character)
            if self._in_arguments and not was_inside:
                start, head = at, self._name
            elif was_inside and not self._in_arguments:
                yield head, text[start : at + 1]
                head = None
        if self._in_arguments and start < len(text):
            yield head, text[start:]

    def _feed_character(self, character: str) -> None:
        if self.in_string:
            self._feed_string(character)
        elif character == '"':
            self.in_string = True
            is_read = self._depth == self._call_depth and not self._in_arguments
            self._string = [] if is_read else None
        elif character in "{[":
            self._in_arguments = self._in_arguments or self._begins_arguments(character)
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._in_arguments and self._depth == self._call_depth:
                self._end_arguments()
            elif self._depth < self._call_depth:
                self._end_call()
        elif self._depth == self._call_depth and not self._in_arguments:
            self._is_value = character == ":" or (self._is_value and character != ",")

    def _begins_arguments(self, character: str) -> bool:
        is_here = self._depth == self._call_depth and self._is_value and not self._in_arguments
        is_named = self._name is not None and self._key == self._keys.arguments
        return is_here and is_named and character == "{" and not self._has_ended

    @property
    def _has_ended(self) -> bool:
        return self.num_complete > 0 and not self._keys.in_list

    def _end_arguments(self) -> None:
        self._in_arguments = False
        self.num_complete += 1
        self._key = None

    def _end_call(self) -> None:
        self._key = None
        if self._keys.arguments is not None:
            self._name, self._is_value = None, False

    def _feed_string(self, character: str) -> None:
        if self._string is not None:
            self._string.append(character)
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == "\n":  # not valid in JSON: the string has no end
            self.in_string = False
        elif character == '"':
            self.in_string = False
            if self._string is not None:
                self._end_string("".join(self._string[:-1]))

    def _end_string(self, raw: str) -> None:
        try:
            text = json.loads(f'"{raw}"', strict=False)
        except ValueError:
            return
        if not self._is_value:
            self._key = text
        elif self._key == self._keys.name and self._keys.arguments is not None:
            self._name = text or None


def new_call_id() -> str:
    """Return the id of a new call."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_NUM_ID_CHARACTERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """What a parser looks for."""

    with_calls: bool = True  # else calls are content
    with_reasoning: bool = True  # else reasoning is content
    shows_reasoning: bool = True  # else it is dropped
    is_live: bool = False  # arguments are shown before it is known that they are valid
    max_calls: int | None = None  # later ones are dropped; None = any number
    parameters: Mapping[str, Mapping[str, Any]] | None = None  # schemas, by function


class TemplateParser:
    """An ``AnswerParser`` over a response template."""

    def __init__(
        self,
        template: ResponseTemplate,
        options: ParserOptions,
        prompt: str,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """``prompt``: the text before the answer; its end may have begun a field."""
        self._options = options
        self._call_id = call_id
        self._fields = [one for one in template.fields.values() if self._is_read(one)]
        self._outside = template.outside
        self._current: TemplateField | None = self._outside
        self._texts = {kind: _Stripped() for kind in (PartKind.CONTENT, PartKind.REASONING)}
        self._call: _OpenCalls | None = None
        self._num_calls = 0
        self._buffer, self._at = "", 0
        self._parts: list[AnswerPart] = []
        begins = template.start.end_of_last(prompt)
        if begins is not None:
            self.feed(prompt[begins:])
            self._num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that follows is reasoning."""
        return self._current is not None and self._kind(self._current) is PartKind.REASONING

    def feed(self, text: str) -> list[AnswerPart]:
        """See ``AnswerParser``. Raises ``RequestError`` for a template that takes too long."""
        self._buffer += text
        self._advance(is_end=False)
        return self._taken()

    def finish(self) -> list[AnswerPart]:
        self._advance(is_end=True)
        self._close("")
        return self._taken()

    def _taken(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return parts

    def _is_read(self, field: TemplateField) -> bool:
        kind = _kind_of(field)
        return (self._options.with_calls or kind is not PartKind.CALL) and (
            self._options.with_reasoning or kind is not PartKind.REASONING
        )

    def _kind(self, field: TemplateField) -> PartKind:
        return _kind_of(field) if self._is_read(field) else PartKind.CONTENT

    def _advance(self, *, is_end: bool) -> None:
        num_still = 0  # marks since the last character
        while True:
            found, held_from = self._next_mark(is_end=is_end)
            if found is None:
                self._take(self._buffer[self._at : held_from])
                self._at = held_from
                return
            field, match = found
            self._take(self._buffer[self._at : match.start])
            if self._call is not None and self._call.in_string:  # the mark is a part of it
                end = max(match.end, match.start + 1)
                self._take(self._buffer[match.start : end])
                self._at = min(end, len(self._buffer))
                if match.start == len(self._buffer):
                    return
                continue
            is_stuck = match.start == match.end == self._at and field is None
            num_still = num_still + 1 if match.end == self._at else 0
            if num_still > _MAX_STILL:
                raise RequestError("the response template's fields begin and end without a text")
            self._at = match.end
            mark = self._buffer[match.start : match.end]
            if is_stuck and self._current is self._outside:
                return
            self._close("" if field is not None else mark)
            if field is not None:
                self._open(field, match, mark)

    def _next_mark(self, *, is_end: bool) -> tuple[tuple[TemplateField | None, Match] | None, int]:
        """Return the next mark, with the field that it opens, and where text is held back from."""
        candidates = []
        if self._current is self._outside:
            candidates = [(one, one.opens) for one in self._fields if one.opens is not None]
        closes = self._current.closes if self._current is not None else None
        best: tuple[TemplateField | None, Match] | None = None
        held_from = len(self._buffer)
        for field, mark in [*candidates, *([(None, closes)] if closes is not None else [])]:
            match = mark.find(self._buffer, self._at, is_end=is_end)
            if match is None:
                continue
            if match.is_pending:
                held_from = min(held_from, match.start)
            elif best is None or (match.start, -match.end) < (best[1].start, -best[1].end):
                best = field, match
        if best is not None and best[1].start >= held_from:
            best = None
        return best, held_from

    def _open(self, field: TemplateField, match: Match, mark: str) -> None:
        self._current = field
        if _kind_of(field) is PartKind.CALL:
            self._call = _OpenCalls(field, match.captures, mark, is_live=self._options.is_live)

    def _take(self, text: str) -> None:
        if not text or self._current is None:
            return
        if self._call is not None:
            for name, piece in self._call.feed(text):
                self._add_call(name, piece)
        else:
            self._add_text(self._current, text)

    def _add_text(self, field: TemplateField, text: str) -> None:
        kind = self._kind(field)
        if kind is PartKind.REASONING and not self._options.shows_reasoning:
            return
        strips = (field.content_args or {}).get("strip", True)
        shown = self._texts[kind].feed(text) if strips else text
        if shown:
            self._parts.append(AnswerPart(kind, shown))

    def _add_call(self, name: str | None, piece: str) -> None:
        if name is not None:
            self._num_calls += 1
        index = self._num_calls - 1
        if self._options.max_calls is not None and index >= self._options.max_calls:
            return
        if name is not None:
            head = CallHead(self._call_id(), name)
            self._parts.append(AnswerPart(PartKind.CALL, "", index, head))
        if piece:
            self._parts.append(AnswerPart(PartKind.CALL, piece, index))

    def _close(self, mark: str) -> None:
        call, self._call = self._call, None
        self._current = self._outside
        if call is None:
            return
        try:
            for name, arguments in call.rest(self._options.parameters or {}):
                self._add_call(name, arguments)
        except (ValueError, RecursionError):
            shown = self._texts[PartKind.CONTENT].feed(f"{call.text}{mark}")
            self._parts.append(AnswerPart(PartKind.CONTENT, shown))


class _Stripped:
    """A text without white space at its beginning and its end."""

    def __init__(self) -> None:
        self._space: str | None = None  # that the next text follows; None = there was no text

    def feed(self, text: str) -> str:
        if self._space is None:
            text = text.lstrip()
            if not text:
                return ""
            self._space = ""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown


class _OpenCalls:
    """A field of calls that is being written."""

    def __init__(
        self, field: TemplateField, captures: Mapping[str, str], mark: str, *, is_live: bool
    ) -> None:
        self._field = field
        self._captures = captures
        self._mark = mark
        self._body: list[str] = []
        keys = keys_of(field)
        name = captures.get("name") if keys is not None and keys.arguments is None else None
        self._keys = keys
        self._name = name
        self._scanner = None if keys is None else CallScanner(keys, name)
        self._is_live = is_live
        self._num_shown = 0

    @property
    def in_string(self) -> bool:
        """Whether a string of the JSON has begun and not ended."""
        return self._scanner is not None and self._scanner.in_string

    @property
    def text(self) -> str:
        """What the model has written, with the mark."""
        return self._mark + "".join(self._body)

    def feed(self, text: str) -> list[tuple[str | None, str]]:
        """Return names and pieces of arguments that can be shown."""
        self._body.append(text)
        if self._scanner is None:
            return []
        found = list(self._scanner.feed(text))
        shown = found if self._is_live else []
        self._num_shown += sum(name is not None for name, _ in shown)
        return shown

    def rest(self, parameters: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Return the calls that were not shown. Raises ``ValueError`` if they cannot be read."""
        if self._num_shown:
            return []
        body, field = "".join(self._body), self._field
        value = value_of(body, field.content, field.content_args or {})
        shaped = transformed(value, field.transform, self._captures, each=field.transform_each)
        values = shaped if isinstance(shaped, list) else [shaped]
        calls = [_call_of(one, field, parameters) for one in values]
        if not calls:
            raise ValueError("it has no call")
        if self._keys is not None:  # the arguments as the model wrote them
            written: list[tuple[str, str]] = []
            for name, piece in CallScanner(self._keys, self._name).feed(body):
                assert name is not None, "the scanner has the whole text"
                written.append((name, piece))
            if [name for name, _ in written] == [name for name, _ in calls]:
                return written
        return calls


def _call_of(
    value: Any, field: TemplateField, parameters: Mapping[str, Mapping[str, Any]]
) -> tuple[str, str]:
    """Return name and arguments of a call in any of the usual shapes. Raises ``ValueError``."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    if field.content != "json":  # all values are texts
        arguments = cast_arguments(arguments, parameters.get(name.strip(), {}))
    return name.strip(), json.dumps(arguments, ensure_ascii=False)


def keys_of(field: TemplateField) -> CallKeys | None:
    """Return where the JSON of a field of calls has names and arguments; None if it has no JSON."""
    if field.content != "json" or field.content_args:
        return None
    transform, in_list = field.transform, field.transform_each
    function = transform.get("function") if isinstance(transform, dict) else None
    if transform is None or function == "{content}" or transform == "{content}":
        return CallKeys()
    if not isinstance(function, dict):
        return None
    prefix = "" if in_list else "content."
    name, arguments = function.get("name"), function.get("arguments")
    if name == "{name}" and arguments == "{content}" and not in_list:
        return CallKeys(arguments=None)
    keys = [
        one.strip("{}").removeprefix(prefix)
        for one in (name, arguments)
        if isinstance(one, str) and one.startswith("{" + prefix)
    ]
    if len(keys) != 2 or any("." in key for key in keys):
        return None
    return CallKeys(keys[0], keys[1], in_list)


def _kind_of(field: TemplateField) -> PartKind:
    if field.name in REASONING_FIELDS:
        return PartKind.REASONING
    return PartKind.CALL if field.name == CALLS_FIELD else PartKind.CONTENT
