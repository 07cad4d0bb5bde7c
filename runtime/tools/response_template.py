"""Response templates: how the text of a model's answer is divided into fields.

The format is that of transformers (``response_template`` of a tokenizer, version 1). They come with
models and adapters, so their patterns have a time limit. This module reads them, and finds their
marks in texts; it needs no transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import regex

from ..errors import RequestError
from .contents import CONTENT_KINDS, check_transform

MAX_TEMPLATE_BYTES = 1 << 20
_MATCH_TIMEOUT_S = 0.05  # of one search; texts that follow their template need microseconds
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats"),
    *("join", "optional", "transform", "transform_each"),
}


@dataclass(frozen=True, slots=True)
class Match:
    """A mark in a text, or the beginning of one at the text's end."""

    start: int
    end: int
    is_pending: bool  # more text can complete or change it
    captures: Mapping[str, str]


class Mark:
    """The text or pattern at which a field begins or ends."""

    def __init__(self, pattern: str, literals: tuple[str, ...] = ()) -> None:
        """``literals``: all texts that ``pattern`` matches, if they are known."""
        self.literals = literals
        self._pattern = regex.compile(pattern, regex.DOTALL)
        self._first = frozenset(one[0] for one in literals)
        # A literal that is complete cannot become a longer one, unless one begins another.
        self._is_final = bool(literals) and not any(
            one != other and other.startswith(one) for one in literals for other in literals
        )

    @property
    def text(self) -> str:
        """Its texts, or its pattern without escapes."""
        return "\n".join(self.literals) or self._pattern.pattern.replace("\\", "")

    @property
    def capture_names(self) -> frozenset[str]:
        return frozenset(self._pattern.groupindex)

    def find(self, text: str, start: int, *, is_end: bool) -> Match | None:
        """Return its first match from ``start``; ``is_end``: no more text follows.

        Raises ``RequestError`` if that takes too long.
        """
        if self._first and self._first.isdisjoint(text[start:]):  # usual case, and quick
            return None
        try:
            found = self._pattern.search(text, start, partial=not is_end, timeout=_MATCH_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(
                f"a pattern of the response template took more than {_MATCH_TIMEOUT_S:g} s: "
                f"{self._pattern.pattern!r:.100}"
            ) from None
        if found is None:
            return None
        at_edge = found.end() == len(text)
        is_empty = found.start() == found.end()
        can_grow = at_edge and (is_empty or not self._is_final)
        captures = {name: value for name, value in found.groupdict().items() if value is not None}
        is_pending = not is_end and (found.partial or can_grow)
        return Match(found.start(), found.end(), is_pending, captures)

    def end_of_last(self, text: str) -> int | None:
        end = None
        for found in self._pattern.finditer(text, timeout=_MATCH_TIMEOUT_S):
            end = found.end()
        return end


@dataclass(frozen=True, slots=True)
class TemplateField:
    """One field of an answer."""

    name: str
    opens: Mark | None  # None = the text outside of all other fields
    closes: Mark | None  # None = at the end of the answer
    content: str = "text"
    content_args: Mapping[str, Any] | None = None
    transform: Any = None
    transform_each: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The fields of an answer, and the mark after which it begins in a prompt."""

    fields: Mapping[str, TemplateField]
    start: Mark

    @property
    def outside(self) -> TemplateField | None:
        """The field of the text outside of all others; None = that text is dropped."""
        return next((one for one in self.fields.values() if one.opens is None), None)


def read_template(text: str | bytes) -> ResponseTemplate:
    """Return the response template with this JSON. Raises ``ValueError``."""
    if len(text) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and at most {MAX_TEMPLATE_BYTES} are read")
    try:
        return template_of(json.loads(text))
    except RecursionError:
        raise ValueError("its objects and arrays are too deep") from None


def template_of(value: object) -> ResponseTemplate:
    """Return the response template that JSON describes. Raises ``ValueError``."""
    template = _object(value, "it", _TEMPLATE_KEYS)
    if template.get("version", 1) != 1:
        raise ValueError(f"its version is {template['version']!r}, only 1 is served")
    fields = template.get("fields")
    if not isinstance(fields, dict) or not fields:
        raise ValueError("it has no fields")
    read = {name: _field(name, one) for name, one in fields.items()}
    outside = [name for name, one in read.items() if one.opens is None]
    if len(outside) > 1:
        raise ValueError(f"the fields {', '.join(outside)} have no open; at most one may have none")
    start = _mark("it", template, "start_anchor", "start_anchor_pattern")
    if start is None:
        raise ValueError("it has no start_anchor and no start_anchor_pattern")
    return ResponseTemplate(read, start)


def _field(name: str, value: object) -> TemplateField:
    where = f"the field {name!r}"
    field = _object(value, where, _FIELD_KEYS)
    content = field.get("content", "text")
    if content not in CONTENT_KINDS:
        raise ValueError(f"{where} has the content {content!r}, known are {sorted(CONTENT_KINDS)}")
    arguments = field.get("content_args", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"content_args of {where} is not an object")
    opens = _mark(where, field, "open", "open_pattern")
    closes = _mark(where, field, "close", "close_pattern")
    transform = field.get("transform")
    names = {name for mark in (opens, closes) if mark for name in mark.capture_names}
    if names and transform is None:
        raise ValueError(f"{where} has the groups {sorted(names)}, but no transform with them")
    check_transform(transform, where)
    is_each = bool(field.get("transform_each", False))
    return TemplateField(name, opens, closes, str(content), arguments, transform, is_each)


def _mark(where: str, owner: Mapping[str, Any], literal: str, pattern: str) -> Mark | None:
    if literal in owner and pattern in owner:
        raise ValueError(f"{where} has both {literal} and {pattern}")
    if literal in owner:
        value = owner[literal]
        literals = [value] if isinstance(value, str) else value
        if not isinstance(literals, list) or not literals:
            raise ValueError(f"{literal} of {where} is not a text or a list of texts")
        if not all(isinstance(one, str) and one for one in literals):
            raise ValueError(f"{literal} of {where} has a text that is empty or no text")
        by_length = sorted(literals, key=len, reverse=True)
        return Mark("|".join(map(regex.escape, by_length)), tuple(literals))
    if pattern not in owner:
        return None
    if not isinstance(owner[pattern], str):
        raise ValueError(f"{pattern} of {where} is not a text")
    try:
        return Mark(owner[pattern])
    except regex.error as error:
        raise ValueError(f"{pattern} of {where} is not a pattern: {error}") from error


def _object(value: object, what: str, keys: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    unknown = sorted(map(str, value.keys() - keys))
    if unknown:
        raise ValueError(f"{what} has unknown keys: {', '.join(unknown)}")
    return cast(dict[str, Any], value)
