"""Finds the names and arguments of calls in JSON while the model writes it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass


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
