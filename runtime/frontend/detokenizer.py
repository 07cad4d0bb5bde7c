"""Turns the tokens of one choice into text as they arrive, and finds stop strings in it.

Owns what may be shown and what must be held back; knows nothing of requests or of the engine, and
a tokenizer only as a function from token ids to text. Text depends on the tokens alone, never on
how they were grouped on the way here.

A single token has no text of its own: spaces depend on the token before, characters may span
several tokens. So a short window of tokens is decoded again for every new one, and what goes
beyond the text shown so far is new.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, Protocol

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
_MAX_REMEMBERED_TOKENS = 1 << 16
_MAX_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 40
_MAX_CHARACTER_BYTES = 4  # in UTF-8; a token has at least one


class Detokenizer(Protocol):
    """The text of one choice, as it may be shown."""

    @property
    def stop(self) -> str | None:
        """The stop string that the tokens have completed, if one was; then nothing more comes."""
        ...

    def push(self, token_id: int) -> str:
        """Take one token; return the text to show: whole characters, possibly none."""
        ...

    def hide(self, token_id: int) -> str:
        """Take the last token, of which nothing is shown; return the text to show before it."""
        ...

    def finish(self) -> str:
        """Return the text held back: no more tokens come."""
        ...


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

    def hide(self, token_id: int) -> str:
        """Return nothing."""
        return ""

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


class StopMatcher:
    """Follows one stop string through a text, character by character (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        assert stop
        self.stop = stop
        self.num_matched = 0  # the longest prefix of ``stop`` that the text ends with
        self._fallback = _prefix_function(stop)

    def feed(self, character: str) -> bool:
        """Take the next character; return whether the text now ends with the stop string."""
        if self.num_matched == len(self.stop):
            self.num_matched = self._fallback[-1]
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched - 1]
        if self.stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.stop)

    @property
    def num_at_stake(self) -> int:
        """How many characters at the text's end could still begin a match."""
        if self.num_matched == len(self.stop):  # this one did not count: the next can overlap it
            return self._fallback[-1]
        return self.num_matched


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
    """Releases text that no stop string can claim any more, and says when one is complete.

    The match that ends first counts; of those that end together, the longest.
    """

    __slots__ = ("_held", "_include_stop_in_text", "_matchers")

    def __init__(self, stops: Iterable[str], *, include_stop_in_text: bool) -> None:
        self._matchers = [StopMatcher(stop) for stop in stops]
        assert self._matchers, "nothing to look for"
        self._include_stop_in_text = include_stop_in_text
        self._held = ""  # the end of the text that is a beginning of a stop string

    def feed(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Take new text; return the text released and the stop string found, if one was.

        While ``may_stop`` is false, matches that end in ``text`` do not count.
        """
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            # Every matcher must see the character, so this is a list and not a generator.
            found = [matcher.stop for matcher in self._matchers if matcher.feed(character)]
            if found and may_stop:
                stop = max(found, key=len)
                return self._release_match(pending[:index], stop), stop
        num_held = max(matcher.num_at_stake for matcher in self._matchers)
        num_released = len(pending) - num_held
        self._held = pending[num_released:]
        return pending[:num_released], None

    def flush(self) -> str:
        """Return what is held back: nothing more comes, so no stop string can claim it."""
        held, self._held = self._held, ""
        return held

    def _release_match(self, pending: str, stop: str) -> str:
        self._held = ""
        if self._include_stop_in_text:
            return pending
        return pending[: len(pending) - len(stop)]


class StoppingDetokenizer:
    """A ``Detokenizer`` that looks for stop strings in the text of another."""

    __slots__ = ("_finder", "_min_tokens", "_num_tokens", "_stream", "stop")

    def __init__(
        self,
        stream: Detokenizer,
        *,
        stops: Sequence[str],
        include_stop_in_text: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """A stop string is not looked for before ``min_tokens`` tokens have come."""
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
        """Return the text held back: no stop string can claim it any more."""
        return self._finder.flush()
