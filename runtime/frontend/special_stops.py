"""Stop strings that contain special tokens, which the shown text may omit.

These are looked for in the text with special tokens. All other stop strings are looked for in the
shown text, as ``detokenizer`` does.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..sampling import SamplingParams
from .detokenizer import Detokenizer, StopMatcher

_BYTES = "bytes:"  # prefix by which ``Tokenizer.token_text`` marks bytes


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One special token, as written in a tokenizer's files."""

    content: str
    lstrip: bool = False  # in prompts it includes the white space before it
    rstrip: bool = False  # and the white space after it


class SpecialTokens:
    """The special tokens of one tokenizer, by id."""

    def __init__(self, tokens: Mapping[int, SpecialToken], token_text: Callable[[int], str]) -> None:
        """``token_text``: a token's text where special tokens are shown."""
        self._tokens = tokens
        self._token_text = token_text
        self._first_characters = frozenset(token.content[0] for token in tokens.values())

    def occur_in(self, text: str) -> bool:
        return any(token.content in text for token in self._tokens.values())

    def text(self, token_id: int) -> str:
        """Return a token's text where special tokens are shown; "" if it is not special."""
        token = self._tokens.get(token_id)
        if token is None:
            return ""
        text = self._token_text(token_id)
        return token.content if not text or text.startswith(_BYTES) else text

    def dropped_blank(self, token_id: int, shown: str) -> str:
        """Return the space that begins a token's text, if it is ``shown`` without it; else "".

        Some decoders drop it from the first token with text, and special tokens count as textless.
        """
        return " " if self._token_text(token_id) == f" {shown}" else ""

    def spellings(self, stops: Iterable[str]) -> dict[str, str]:
        """Return the texts that complete ``stops`` with special tokens, each with its stop string.

        A model writes no white space beside a token that includes it, and some decoders show a
        token differently from the tokenizer's files.
        """
        found: dict[str, str] = {}
        for stop in stops:
            if self._first_characters.isdisjoint(stop):  # usual case
                continue
            ids = [one for one, token in self._tokens.items() if token.content in stop]
            if not ids:
                continue
            swallowed = stop
            for token_id in ids:
                swallowed = _swallow(swallowed, self._tokens[token_id])
            for spelling in (stop, swallowed):
                shown = spelling
                for token_id in ids:
                    shown = shown.replace(self._tokens[token_id].content, self.text(token_id))
                found.setdefault(spelling, stop)
                found.setdefault(shown, stop)
        return found


def _swallow(stop: str, token: SpecialToken) -> str:
    """Return ``stop`` without the white space that one of its tokens includes."""
    before, after = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
    return re.sub(before + re.escape(token.content) + after, lambda _: token.content, stop)


class SpecialStoppingDetokenizer:
    """A ``Detokenizer`` that looks for stop strings in the shown text and with special tokens.

    The match that ends first counts; of several that end together, the one that begins first.
    """

    def __init__(
        self, stream: Detokenizer, tokens: SpecialTokens, params: SamplingParams, spellings: Mapping[str, str]
    ) -> None:
        """``stream``: without stop strings. ``spellings``: from ``SpecialTokens.spellings``."""
        self._stream = stream
        self._tokens = tokens
        self._params = params
        self._spellings = spellings
        self._shown_matchers = [StopMatcher(stop) for stop in params.stop]
        self._matchers = [StopMatcher(spelling) for spelling in spellings]
        # The end of the text, which may be part of a stop string, and the positions of its shown
        # characters.
        self._held: list[str] = []
        self._shown_at: list[int] = []
        self._num_released = 0
        self._num_tokens = 0
        self.stop: str | None = None

    def push(self, token_id: int) -> str:
        self._num_tokens += 1
        text = self._stream.push(token_id)
        if not self._params.skip_special_tokens:
            return self._feed(text, is_shown=True)
        shown = self._feed(self._tokens.dropped_blank(token_id, text), is_shown=False)
        for part, is_shown in ((text, True), (self._tokens.text(token_id), False)):
            if self.stop is None:
                shown += self._feed(part, is_shown=is_shown)
        return shown

    def hide(self, token_id: int) -> str:
        """Return the text to show before the last token, which may complete a stop string."""
        self._num_tokens += 1
        return self._feed(self._tokens.text(token_id), is_shown=False)

    def finish(self) -> str:
        return self._release(len(self._held))

    def _feed(self, text: str, *, is_shown: bool) -> str:
        """Add text; return the text that cannot be part of a stop string any more."""
        may_stop = self._num_tokens >= self._params.min_tokens
        for character in text:
            if is_shown:
                self._shown_at.append(self._num_released + len(self._held))
            self._held.append(character)
            starts = self._starts_of_matches(character, is_shown=is_shown)
            if starts and may_stop:
                start = min(starts)
                found = starts[start]
                self.stop = self._spellings.get(found, found)
                return self._release_match(start, len(found))
        at_stake = [self._start(one.num_at_stake) for one in self._matchers]
        at_stake += [self._start_shown(one.num_at_stake) for one in self._shown_matchers]
        return self._release(min(at_stake))

    def _starts_of_matches(self, character: str, *, is_shown: bool) -> dict[int, str]:
        """Return the stop strings that ``character`` completes, by their start in the held text."""
        # Every matcher must see the character: lists, not generators.
        starts: dict[int, str] = {}
        if is_shown:
            found = [one.stop for one in self._shown_matchers if one.feed(character)]
            starts = {self._start_shown(len(stop)): stop for stop in found}
        found = [one.stop for one in self._matchers if one.feed(character)]
        return starts | {self._start(len(stop)): stop for stop in found}

    def _start(self, num_characters: int) -> int:
        """Return the start of the last characters in the held text."""
        return len(self._held) - num_characters

    def _start_shown(self, num_characters: int) -> int:
        """Return the start of the last shown characters in the held text."""
        if not num_characters:
            return len(self._held)
        return self._shown_at[-num_characters] - self._num_released

    def _release(self, end: int) -> str:
        """Remove the first held characters; return those that are shown."""
        num_shown = bisect_left(self._shown_at, self._num_released + end)
        places = self._shown_at[:num_shown]
        shown = "".join(self._held[place - self._num_released] for place in places)
        del self._held[:end], self._shown_at[:num_shown]
        self._num_released += end
        return shown

    def _release_match(self, start: int, num_characters: int) -> str:
        """Return the shown text before a match, and the match if it is to be included."""
        shown = self._release(start)
        if self._params.include_stop_str_in_output:
            is_whole = len(self._held) == num_characters  # else special tokens in it are omitted
            shown += "".join(self._held) if is_whole else self._release(len(self._held))
        self._held.clear()
        return shown
