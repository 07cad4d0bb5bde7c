"""Incremental decoding: the text of a growing list of tokens, in whole characters.

Knows a tokenizer only as a function from token ids to text. A single token has no text of its
own: spaces depend on the token before, characters may span several tokens. So a short window of
tokens is decoded again for every new one, and what goes beyond the text shown so far is new.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
_MAX_REMEMBERED_TOKENS = 1 << 16
_MAX_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 40
_MAX_CHARACTER_BYTES = 4  # in UTF-8; a token has at least one


class Decoder:
    """From tokens to text, and from one token to how long its text is, which is remembered."""

    __slots__ = ("decode", "num_chars")

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.num_chars = lru_cache(_MAX_REMEMBERED_TOKENS)(lambda token_id: len(decode([token_id])))


class WindowStream:
    """A ``Detokenizer`` over any decoder, which knows no stop strings.

    The concatenated text is what the decoder makes of all tokens at once after the prompt, apart
    from a character that the last token leaves incomplete: that one is left out.
    """

    __slots__ = ("_decoder", "_num_context", "_num_shown", "_window")

    stop: Final[None] = None

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int]) -> None:
        """``prompt_token_ids``: what the tokens follow; its text is not repeated."""
        self._decoder = decoder
        self._window = _readable_tail(decoder.decode, prompt_token_ids)
        self._num_shown = _num_complete_chars(decoder.decode, self._window)
        self._num_context = len(self._window)  # tokens of the window whose text has been shown

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes: whole characters, possibly none."""
        window = self._window
        window.append(token_id)
        text = self._decoder.decode(window)
        if not text.endswith(REPLACEMENT) and len(text) > self._num_shown:  # nearly always
            new_text = text[self._num_shown :]
            self._shift()
            return new_text
        is_overlong = len(window) >= _MAX_WINDOW_TOKENS
        # Invalid bytes or invisible tokens in a row: stop waiting for more.
        num_partial = 0 if is_overlong else self._num_partial_chars(text)
        new_text = text[self._num_shown : len(text) - num_partial]
        if num_partial:
            self._num_shown += len(new_text)
        elif new_text or is_overlong:
            self._shift()
        return new_text

    def finish(self) -> str:
        """Return nothing: what has been left out is no character."""
        return ""

    def _num_partial_chars(self, text: str) -> int:
        """Return how many characters at the end may turn into others with the next token.

        One byte too few makes some decoders write U+FFFD for a whole run of bytes, complete
        characters among them. But no character waits for more tokens than it has bytes.
        """
        num_replaced = len(text) - len(text.rstrip(REPLACEMENT))
        if len(self._window) - self._num_context <= _MAX_CHARACTER_BYTES:
            return num_replaced
        return min(num_replaced, _MAX_CHARACTER_BYTES - 1)

    def _shift(self) -> None:
        """Forget the old context; the tokens just shown are the new one."""
        window = self._window
        del window[: max(self._num_context, len(window) - _MAX_CONTEXT_TOKENS)]
        self._num_context = len(window)
        if len(window) == 1:
            self._num_shown = self._decoder.num_chars(window[0])
        else:
            self._num_shown = len(self._decoder.decode(window))


def _readable_tail(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """Return the last few tokens, from where a character begins if possible."""
    longest = min(_MAX_CONTEXT_TOKENS, len(token_ids))
    for num_tokens in range(longest, 0, -1):
        tail = list(token_ids[-num_tokens:])
        if not decode(tail).startswith(REPLACEMENT):
            return tail
    return list(token_ids[-longest:]) if longest else []


def _num_complete_chars(decode: Decode, token_ids: Sequence[int]) -> int:
    """Return the length of the text before a character that the last tokens leave incomplete."""
    for num_dropped in range(min(_MAX_CHARACTER_BYTES, len(token_ids) + 1)):
        text = decode(token_ids[: len(token_ids) - num_dropped])
        if not text.endswith(REPLACEMENT):
            return len(text)
    return len(decode(token_ids))
