"""Turns the tokens of one choice into text as they arrive, and finds stop strings in it.

Decides which text can be shown and which must be held back. Knows nothing of requests or of the
engine, and a tokenizer only as a function from token ids to text. The text depends only on the
tokens, not on how they were grouped into updates.

A single token has no text of its own: spaces depend on the token before, and characters may span
several tokens. A short window of tokens is therefore decoded again for every new token; the part
beyond the text shown so far is new.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, Protocol

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # written by decoders for bytes that are not a character (yet)
_MAX_REMEMBERED_TOKENS = 1 << 16
_MAX_REMEMBERED_STOPS = 64
_MAX_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 40
_MAX_CHARACTER_BYTES = 4  # in UTF-8; a token has at least one


class Detokenizer(Protocol):
    """The text of one choice that can be shown."""

    @property
    def stop(self) -> str | None:
        """The stop string that the tokens have completed; no tokens follow it."""

    def push(self, token_id: int) -> str:
        """Add one token; return the text to show: whole characters, possibly none."""

    def hide(self, token_id: int) -> str:
        """Add the last token, which is not shown; return the text to show before it."""

    def finish(self) -> str:
        """Return the text held back. No tokens follow."""


class Decoder:
    """Decodes tokens, and caches the length of each token's text."""

    __slots__ = ("decode", "num_chars")

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.num_chars = lru_cache(_MAX_REMEMBERED_TOKENS)(lambda token_id: len(decode([token_id])))


class WindowStream:
    """A ``Detokenizer`` over any decoder, without stop strings.

    The concatenated text equals that of the decoder for all tokens after the prompt, without a
    character that the last token leaves incomplete.
    """

    __slots__ = ("_decoder", "_num_context", "_num_shown", "_window")

    stop: Final[None] = None

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int]) -> None:
        """``prompt_token_ids``: the tokens before; their text is not repeated."""
        self._decoder = decoder
        self._window = _readable_tail(decoder.decode, prompt_token_ids)
        self._num_shown = _num_complete_chars(decoder.decode, self._window)
        self._num_context = len(self._window)  # tokens of the window with text that was shown

    def push(self, token_id: int) -> str:
        window = self._window
        window.append(token_id)
        text = self._decoder.decode(window)
        if not text.endswith(REPLACEMENT) and len(text) > self._num_shown:  # usual case
            new_text = text[self._num_shown :]
            self._shift()
            return new_text
        is_overlong = len(window) >= _MAX_WINDOW_TOKENS
        # Many invalid bytes or invisible tokens: stop waiting for a character.
        num_partial = 0 if is_overlong else self._num_partial_chars(text)
        new_text = text[self._num_shown : len(text) - num_partial]
        if num_partial:
            self._num_shown += len(new_text)
        elif new_text or is_overlong:
            self._shift()
        return new_text

    def hide(self, token_id: int) -> str:
        """Return nothing."""
        return ""

    def finish(self) -> str:
        """Return nothing: the rest is not a character."""
        return ""

    def _num_partial_chars(self, text: str) -> int:
        """Return the number of characters at the end that the next token can change.

        For one missing byte some decoders write U+FFFD for a whole run of bytes, including complete
        characters. A character spans at most as many tokens as it has bytes.
        """
        num_replaced = len(text) - len(text.rstrip(REPLACEMENT))
        if len(self._window) - self._num_context <= _MAX_CHARACTER_BYTES:
            return num_replaced
        return min(num_replaced, _MAX_CHARACTER_BYTES - 1)

    def _shift(self) -> None:
        """Drop the old context; the tokens just shown are the new context."""
        window = self._window
        del window[: max(self._num_context, len(window) - _MAX_CONTEXT_TOKENS)]
        self._num_context = len(window)
        if len(window) == 1:
            self._num_shown = self._decoder.num_chars(window[0])
        else:
            self._num_shown = len(self._decoder.decode(window))


def _readable_tail(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """Return the last few tokens, beginning with a whole character if possible."""
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


class StopMatcher:
    """Follows one stop string through a text, character by character (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        assert stop
        self.stop = stop
        self.num_matched = 0  # length of the longest prefix of ``stop`` that ends the text
        self._fallback = _prefix_function(stop)

    def feed(self, character: str) -> bool:
        """Add a character; return whether the text now ends with the stop string."""
        if self.num_matched == len(self.stop):
            self.num_matched = self._fallback[-1]
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched - 1]
        if self.stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.stop)

    @property
    def num_at_stake(self) -> int:
        """Number of characters at the text's end that can begin a match."""
        if self.num_matched == len(self.stop):  # this match did not count; the next can overlap it
            return self._fallback[-1]
        return self.num_matched


@lru_cache(_MAX_REMEMBERED_STOPS)  # choices of a request have the same stop strings
def _prefix_function(text: str) -> list[int]:
    """Return, for every end, the length of the longest proper border of ``text`` up to it."""
    lengths = [0] * len(text)
    for end in range(1, len(text)):
        length = lengths[end - 1]
        while length and text[length] != text[end]:
            length = lengths[length - 1]
        lengths[end] = length + (text[length] == text[end])
    return lengths


class StopFinder:
    """Releases text that cannot be part of a stop string any more, and finds complete ones.

    The match that ends first counts; of several that end together, the longest.
    """

    __slots__ = ("_held", "_include_stop_in_text", "_matchers")

    def __init__(self, stops: Iterable[str], *, include_stop_in_text: bool) -> None:
        self._matchers = [StopMatcher(stop) for stop in stops]
        assert self._matchers, "no stop strings"
        self._include_stop_in_text = include_stop_in_text
        self._held = ""  # the end of the text, if a stop string can begin there

    def feed(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Add text; return the released text and the stop string found, if any.

        While ``may_stop`` is false, matches that end in ``text`` do not count.
        """
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            # Every matcher must see the character: a list, not a generator.
            found = [matcher.stop for matcher in self._matchers if matcher.feed(character)]
            if found and may_stop:
                stop = max(found, key=len)
                return self._release_match(pending[:index], stop), stop
        num_held = max(matcher.num_at_stake for matcher in self._matchers)
        num_released = len(pending) - num_held
        self._held = pending[num_released:]
        return pending[:num_released], None

    def flush(self) -> str:
        """Return the text held back. No text follows."""
        held, self._held = self._held, ""
        return held

    def _release_match(self, pending: str, stop: str) -> str:
        self._held = ""
        if self._include_stop_in_text:
            return pending
        return pending[: len(pending) - len(stop)]


class StoppingDetokenizer:
    """A ``Detokenizer`` that looks for stop strings in the text of another one."""

    __slots__ = ("_finder", "_min_tokens", "_num_tokens", "_stream", "stop")

    def __init__(
        self,
        stream: Detokenizer,
        *,
        stops: Sequence[str],
        include_stop_in_text: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings count only after ``min_tokens`` tokens."""
        self._stream = stream
        self._finder = StopFinder(stops, include_stop_in_text=include_stop_in_text)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.stop: str | None = None

    def push(self, token_id: int) -> str:
        self._num_tokens += 1
        text = self._stream.push(token_id)
        may_stop = self._num_tokens >= self._min_tokens
        shown, self.stop = self._finder.feed(text, may_stop=may_stop)
        return shown

    def hide(self, token_id: int) -> str:
        """Return nothing: a token without text completes no stop string."""
        return ""

    def finish(self) -> str:
        return self._finder.flush()
