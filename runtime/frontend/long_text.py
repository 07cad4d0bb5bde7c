"""Tokens of texts that are too long to be tokenized at once. Pure.

A tokenizer takes memory for each character of a text, however few tokens they are. A long text is
therefore tokenized in overlapping windows, until its end or until it has too many tokens. Two
windows are joined where both have the same run of tokens at the same characters, since a token
depends only on the text near it. A text without such a run is counted, and tokenized at once
if it may have few enough tokens.
"""

from bisect import bisect_left
from collections.abc import Generator
from typing import NamedTuple

from ..limits import TextLimit, check_whole_text

_MAX_CHARS_PER_TOKEN = 8  # of texts that are tokenized at once
_WINDOW_CHARS = 32_768
_MARGIN_CHARS = 4096  # at the end of a window, whose tokens may change with the text that follows
_NUM_CONTEXT = 8  # tokens at the beginning of a window, which may lack the text before
_NUM_SAME = 8  # tokens that two windows must have in common
_COUNT_SLACK = 64  # tokens that a cut between windows may add
_SECOND_OFFSET = 1009  # a prime, so that it is no multiple of a pattern's length

Span = tuple[int, int]


class TextPiece(NamedTuple):
    """The tokens of a part of a text."""

    token_ids: list[int]
    starts: list[int] | None  # the first character of each, rising; None = not known


# Takes the tokens of each span that it yields; returns those of the text, or None.
Steps = Generator[Span, TextPiece, list[int] | None]


def is_long(num_chars: int, limit: TextLimit) -> bool:
    """Whether a text is tokenized in windows."""
    return num_chars > max(_WINDOW_CHARS, _MAX_CHARS_PER_TOKEN * limit.max_tokens)


def num_worked_chars(num_chars: int, limit: TextLimit | None) -> int:
    """Return the characters of a text that are tokenized before it is refused, roughly."""
    if limit is None or not is_long(num_chars, limit):
        return num_chars
    return min(num_chars, max(_WINDOW_CHARS, _MAX_CHARS_PER_TOKEN * limit.max_tokens))


def long_text_tokens(num_chars: int, limit: TextLimit, around: tuple[list[int], list[int]] | None) -> Steps:
    """Tokenize a text of ``num_chars`` that is long.

    ``around``: the special tokens that are added before and after a text; None = not known.
    Returns its tokens, or at least those at its end that ``limit`` keeps. Returns None if it has
    to be tokenized at once. Raises the error of ``limit``, and that of ``check_whole_text``.
    """
    keeps_end = limit.num_kept is not None and limit.num_kept <= limit.max_tokens
    if around is None:
        return None if keeps_end else (yield from _count(0, num_chars, 0, limit))
    before, after = around
    if keeps_end:
        tokens = yield from _last_tokens(num_chars, limit, limit.num_kept or 1)
    else:
        tokens = yield from _joined(0, num_chars, limit, None)
        if tokens is not None and len(tokens) + len(before) + len(after) > limit.max_tokens:
            raise limit.error()
    return None if tokens is None else [*before, *tokens, *after]


def _last_tokens(num_chars: int, limit: TextLimit, num_kept: int) -> Steps:
    """Tokenize the end of a text, if its tokens are known not to depend on its beginning."""
    length = _MAX_CHARS_PER_TOKEN * num_kept + 2 * _WINDOW_CHARS
    while length < num_chars:
        start = num_chars - length
        first_char = yield from _settled(start)
        if first_char is None:
            break
        tail = yield from _joined(start, num_chars, limit, num_kept, first_char)
        if tail is None:
            break
        if len(tail) == num_kept:
            return tail
        length *= 4
    check_whole_text(num_chars, limit)
    return (yield from _joined(0, num_chars, limit, num_kept))


def _settled(start: int) -> Generator[Span, TextPiece, int | None]:
    """Return a character from which on tokens do not depend on where a window begins, or None."""
    one = yield start, start + _WINDOW_CHARS
    other = yield start + _SECOND_OFFSET, start + _SECOND_OFFSET + _WINDOW_CHARS
    if one.starts is None or other.starts is None:
        return None
    for at in range(_NUM_CONTEXT, len(other.token_ids) - _NUM_SAME):
        char = other.starts[at] + _SECOND_OFFSET
        if char > _WINDOW_CHARS - _MARGIN_CHARS:
            return None
        if _find(one, char, other, at) is not None:
            return start + char
    return None


def _joined(start: int, end: int, limit: TextLimit, num_kept: int | None, first_char: int = 0) -> Steps:
    """Tokenize from ``start`` to ``end`` in windows; return the last ``num_kept`` tokens, or all.

    Tokens before ``first_char`` are left out.
    """
    tokens: list[int] = []
    piece = yield start, min(end, start + _WINDOW_CHARS)
    at = 0 if piece.starts is None else bisect_left(piece.starts, first_char - start)
    while start + _WINDOW_CHARS < end:
        joint = yield from _next_window(start, end, piece, at)
        if joint is None:
            if num_kept is not None:
                return None
            return (yield from _count(start, end, len(tokens) - at, limit, piece))
        cut, start, following, next_at = joint
        tokens += piece.token_ids[at:cut]
        if num_kept is None:
            if len(tokens) > limit.max_tokens:
                raise limit.error()
        elif len(tokens) > num_kept + _WINDOW_CHARS:
            del tokens[:-num_kept]
        piece, at = following, next_at
    tokens += piece.token_ids[at:]
    return tokens if num_kept is None else tokens[-num_kept:]


def _next_window(
    start: int, end: int, piece: TextPiece, at: int
) -> Generator[Span, TextPiece, tuple[int, int, TextPiece, int] | None]:
    """Tokenize the window after ``piece``, which begins at ``start``.

    Returns the token of ``piece`` at which it ends, the first character of the next window, its
    tokens, and the one of them with which it continues. Returns None if they have no run in common.
    """
    if piece.starts is None:
        return None
    cut = bisect_left(piece.starts, _WINDOW_CHARS - _MARGIN_CHARS)
    first = cut - _NUM_CONTEXT
    if first <= at or cut + _NUM_SAME > len(piece.token_ids) or piece.starts[first] == 0:
        return None
    offset = piece.starts[first]
    next_start = start + offset
    following = yield next_start, min(end, next_start + _WINDOW_CHARS)
    found = _find(following, piece.starts[cut] - offset, piece, cut)
    return None if found is None else (cut, next_start, following, found)


def _find(piece: TextPiece, char: int, other: TextPiece, at: int) -> int | None:
    """Return where ``piece`` has the same tokens at ``char`` as ``other`` has from ``at`` on."""
    assert piece.starts is not None and other.starts is not None
    shift = other.starts[at] - char
    ids = other.token_ids[at : at + _NUM_SAME]
    starts = [one - shift for one in other.starts[at : at + _NUM_SAME]]
    index = bisect_left(piece.starts, char)
    while index < len(piece.starts) and piece.starts[index] == char:
        until = index + _NUM_SAME
        if piece.token_ids[index:until] == ids and piece.starts[index:until] == starts:
            return index
        index += 1  # several tokens may begin at one character
    return None


def _count(start: int, end: int, num_tokens: int, limit: TextLimit, piece: TextPiece | None = None) -> Steps:
    """Count the tokens from ``start`` on, after ``num_tokens``; return None.

    ``piece``: those of the first window, if they are known.
    """
    while True:
        if piece is None:
            piece = yield start, min(end, start + _WINDOW_CHARS)
        num_tokens += len(piece.token_ids) - _COUNT_SLACK
        piece = None
        start += _WINDOW_CHARS
        if num_tokens > limit.max_tokens:
            raise limit.error()
        if start >= end:
            return None
