"""Turns the tokens of one choice into text as they arrive, and finds stop strings in it.

Owns what may be shown and what must be held back; knows nothing of requests or of the engine.
Text depends on the tokens alone, never on how they were grouped on the way here.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """The text of one choice, as it may be shown."""

    @property
    def stop(self) -> str | None:
        """The stop string that the tokens have completed, if one was; then nothing more comes."""
        ...

    def push(self, token_id: int) -> str:
        """Take one token; return the text to show: whole characters, possibly none."""
        ...

    def finish(self) -> str:
        """Return the text held back: no more tokens come."""
        ...


class _StopMatcher:
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
        self._matchers = [_StopMatcher(stop) for stop in stops]
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
        """See ``Detokenizer``."""
        self._num_tokens += 1
        text = self._stream.push(token_id)
        may_stop = self._num_tokens >= self._min_tokens
        shown, self.stop = self._finder.feed(text, may_stop=may_stop)
        return shown

    def finish(self) -> str:
        """See ``Detokenizer``: no stop string can claim any more what it might have."""
        return self._finder.flush()
