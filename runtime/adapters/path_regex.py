"""Regular expressions over module paths, in time that no pattern can make explode.

PEFT gives patterns of adapter files to ``re``, which tries alternatives one after the other: a
hostile one takes longer than anybody waits, and nothing can interrupt it. Here a pattern is walked
with the set of all places that it can have reached, so that a match costs at most the product of
the pattern's length and the square of the path's. The language is that of ``re``, but for what no
set of places can follow: references to groups, possessive and atomic groups, looking behind, and
inline flags are refused.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

# Private, but where ``re`` itself has its syntax from; the tests compare with ``re``.
_parser: Any = importlib.import_module("re._parser")
_code: Any = importlib.import_module("re._constants")

_MAX_PATTERN_CHARS = 4096
_MAX_REPEATS = 256  # of a counted repetition; a path has fewer characters that matter

_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    _code.CATEGORY_DIGIT: str.isdecimal,
    _code.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    _code.CATEGORY_SPACE: str.isspace,
    _code.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    _code.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    _code.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}
_Node = tuple[Any, Any]  # an operation of re's parser and its argument
_Ends = frozenset[int]
_NOWHERE: _Ends = frozenset()


class PathRegex:
    """One pattern. Raises ``ValueError`` with the reason if it is not taken."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise ValueError(f"it has more than {_MAX_PATTERN_CHARS} characters")
        try:
            parsed = _parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"it is not a regular expression: {error}") from error
        if parsed.state.flags & ~re.UNICODE.value:
            raise ValueError("inline flags are not served")
        self._nodes = list(parsed)
        _check(self._nodes)

    def fullmatch(self, text: str) -> bool:
        """Whether the pattern describes the whole of ``text``, as ``re.fullmatch`` says."""
        return len(text) in _Walk(text).ends(self._nodes, 0)

    def match(self, text: str) -> bool:
        """Whether the pattern describes a beginning of ``text``, as ``re.match`` says."""
        return bool(_Walk(text).ends(self._nodes, 0))

    @property
    def is_fixed(self) -> bool:
        """Whether every match has one shape: neither repetitions nor alternatives."""
        single = {_code.LITERAL, _code.NOT_LITERAL, _code.ANY, _code.IN, _code.AT}
        return all(operation in single for operation, _ in self._nodes)


@lru_cache(maxsize=1024)
def path_regex(pattern: str) -> PathRegex:
    """Return ``PathRegex(pattern)``, made once."""
    return PathRegex(pattern)


def _check(nodes: Sequence[_Node]) -> None:
    """Raise ``ValueError`` for what is not served, at any depth."""
    for operation, argument in nodes:
        if operation in (_code.MAX_REPEAT, _code.MIN_REPEAT):
            low, high, body = argument
            if low > _MAX_REPEATS or (high > _MAX_REPEATS and high != _code.MAXREPEAT):
                raise ValueError(f"it repeats something more than {_MAX_REPEATS} times")
            _check(body)
        elif operation is _code.SUBPATTERN:
            _, added, removed, body = argument
            if added or removed:
                raise ValueError("inline flags are not served")
            _check(body)
        elif operation is _code.BRANCH:
            for body in argument[1]:
                _check(body)
        elif operation in (_code.ASSERT, _code.ASSERT_NOT) and argument[0] == 1:
            _check(argument[1])
        elif operation not in _STEPS and operation is not _code.AT:
            raise ValueError(f"{str(operation).lower()} is not served")


class _Walk:
    """One text; knows where each part of a pattern may end that begins at a place."""

    def __init__(self, text: str) -> None:
        self._text = text
        # The nodes live as long as the pattern, so their identity names them.
        self._known: dict[tuple[int, int], _Ends] = {}

    def ends(self, nodes: Sequence[_Node], start: int) -> _Ends:
        """All places where the sequence ``nodes`` may end that begins at ``start``."""
        places: _Ends = frozenset((start,))
        for node in nodes:
            places = frozenset().union(*(self._node_ends(node, place) for place in places))
            if not places:
                break
        return places

    def _node_ends(self, node: _Node, start: int) -> _Ends:
        key = (id(node), start)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find(node, start)
        return found

    def _find(self, node: _Node, start: int) -> _Ends:
        operation, argument = node
        step = _STEPS.get(operation)
        here = frozenset((start,))
        if step is not None:
            is_taken = start < len(self._text) and step(argument, self._text[start])
            return frozenset((start + 1,)) if is_taken else _NOWHERE
        if operation is _code.AT:
            return here if self._is_at(argument, start) else _NOWHERE
        if operation is _code.SUBPATTERN:
            return self.ends(_items(argument[3]), start)
        if operation is _code.BRANCH:
            return frozenset().union(*(self.ends(_items(body), start) for body in argument[1]))
        if operation in (_code.ASSERT, _code.ASSERT_NOT):
            is_ahead = bool(self.ends(_items(argument[1]), start))
            return here if is_ahead == (operation is _code.ASSERT) else _NOWHERE
        return self._repeat(argument, start)

    def _repeat(self, argument: Any, start: int) -> _Ends:
        low, high, body = argument
        nodes = _items(body)
        places: _Ends = frozenset((start,))
        for _ in range(low):
            places = frozenset().union(*(self.ends(nodes, place) for place in places))
        reached, new, count = places, places, low
        while new and (high == _code.MAXREPEAT or count < high):
            new = frozenset().union(*(self.ends(nodes, place) for place in new)) - reached
            reached |= new
            count += 1
        return reached

    def _is_at(self, where: Any, place: int) -> bool:
        text = self._text
        if where in (_code.AT_BEGINNING, _code.AT_BEGINNING_STRING):
            return place == 0
        if where is _code.AT_END_STRING:
            return place == len(text)
        if where is _code.AT_END:
            return place == len(text) or (place == len(text) - 1 and text[place] == "\n")
        is_word = _CATEGORIES[_code.CATEGORY_WORD]
        before = place > 0 and is_word(text[place - 1])
        after = place < len(text) and is_word(text[place])
        return (before != after) == (where is _code.AT_BOUNDARY)


def _items(body: Any) -> list[_Node]:
    """The nodes of a parsed sequence, the same objects at every call."""
    items: list[_Node] = body.data
    return items


def _in_set(members: Sequence[_Node], char: str) -> bool:
    is_negated = members[0][0] is _code.NEGATE
    found = any(_is_member(member, char) for member in members[is_negated:])
    return found != is_negated


def _is_member(member: _Node, char: str) -> bool:
    operation, argument = member
    if operation is _code.LITERAL:
        return ord(char) == int(argument)
    if operation is _code.RANGE:
        return bool(argument[0] <= ord(char) <= argument[1])
    return _CATEGORIES[argument](char)


# What takes one character.
_STEPS: dict[Any, Callable[[Any, str], bool]] = {
    _code.LITERAL: lambda argument, char: ord(char) == argument,
    _code.NOT_LITERAL: lambda argument, char: ord(char) != argument,
    _code.ANY: lambda _, char: char != "\n",
    _code.IN: _in_set,
}
