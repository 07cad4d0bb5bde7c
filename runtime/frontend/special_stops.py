"""Stop strings that are, or contain, special tokens, which the text shown may leave out.

They are looked for in the text with special tokens, where a special token stands as it would be
shown. All others are looked for in the text shown, as ``detokenizer`` does without special tokens.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..sampling import SamplingParams
from .detokenizer import Detokenizer, StopMatcher

_BYTES = "bytes:"  # how ``Tokenizer.token_text`` writes what is no text


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One special token, as a tokenizer's files write it."""

    content: str
    lstrip: bool = False  # in prompts it swallows the white space before it
    rstrip: bool = False  # and that after it


class SpecialTokens:
    """The special tokens of one tokenizer, by id."""

    def __init__(
        self, tokens: Mapping[int, SpecialToken], token_text: Callable[[int], str]
    ) -> None:
        """``token_text``: how a token is shown where special tokens are."""
        self._tokens = tokens
        self._token_text = token_text
        self._first_characters = frozenset(token.content[0] for token in tokens.values())

    def text(self, token_id: int) -> str:
        """Return how a token is shown where special tokens are; "" if it is not special."""
        token = self._tokens.get(token_id)
        if token is None:
            return ""
        text = self._token_text(token_id)
        return token.content if not text or text.startswith(_BYTES) else text

    def dropped_blank(self, token_id: int, shown: str) -> str:
        """Return the blank that a token is written with, if it is ``shown`` without it; else "".

        Some decoders drop it from the first token that has text, and special tokens have none.
        """
        return " " if self._token_text(token_id) == f" {shown}" else ""

    def spellings(self, stops: Iterable[str]) -> dict[str, str]:
        """Return the texts that complete the ``stops`` with special tokens, and which each does.

        A model that has learned a token that swallows white space writes none beside it, and some
        decoders show a token otherwise than the tokenizer's files write it.
        """
        found: dict[str, str] = {}
        for stop in stops:
            if self._first_characters.isdisjoint(stop):  # nearly always
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
    """Return ``stop`` without the white space that one of its tokens swallows."""
    before, after = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
    return re.sub(before + re.escape(token.content) + after, lambda _: token.content, stop)


class SpecialStoppingDetokenizer:
    """A ``Detokenizer`` that looks for stop strings in the text shown and in that with tokens.

    The match that ends first counts; of those that end together, the one that begins first.
    """

    def __init__(
        self,
        stream: Detokenizer,
        tokens: SpecialTokens,
        params: SamplingParams,
        spellings: Mapping[str, str],
    ) -> None:
        """``stream``: without stop strings. ``spellings``: those of stops with special tokens."""
        self._stream = stream
        self._tokens = tokens
        self._params = params
        self._spellings = spellings
        self._shown_matchers = [StopMatcher(stop) for stop in params.stop]
        self._matchers = [StopMatcher(spelling) for spelling in spellings]
        # The end of the text, which a stop string may still claim, and where in the whole text
        # the characters of it are that are shown.
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
        """Return what is shown before the last token, which may complete a stop string."""
        self._num_tokens += 1
        return self._feed(self._tokens.text(token_id), is_shown=False)

    def finish(self) -> str:
        """Return the text held back: no stop string can claim it any more."""
        return self._release(len(self._held))

    def _feed(self, text: str, *, is_shown: bool) -> str:
        """Take more text; return what no stop string can claim any more."""
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
        """Return what the next character completes, by where it begins in what is held."""
        # Every matcher must see the character, so these are lists and not generators.
        starts: dict[int, str] = {}
        if is_shown:
            found = [one.stop for one in self._shown_matchers if one.feed(character)]
            starts = {self._start_shown(len(stop)): stop for stop in found}
        found = [one.stop for one in self._matchers if one.feed(character)]
        return starts | {self._start(len(stop)): stop for stop in found}

    def _start(self, num_characters: int) -> int:
        """Return where the last characters begin, in what is held."""
        return len(self._held) - num_characters

    def _start_shown(self, num_characters: int) -> int:
        """Return where the last characters that are shown begin, in what is held."""
        if not num_characters:
            return len(self._held)
        return self._shown_at[-num_characters] - self._num_released

    def _release(self, end: int) -> str:
        """Return what is shown of the first characters held, and forget them."""
        num_shown = bisect_left(self._shown_at, self._num_released + end)
        places = self._shown_at[:num_shown]
        shown = "".join(self._held[place - self._num_released] for place in places)
        del self._held[:end], self._shown_at[:num_shown]
        self._num_released += end
        return shown

    def _release_match(self, start: int, num_characters: int) -> str:
        """Return what is shown before a match of so many characters, and if asked the match."""
        shown = self._release(start)
        if self._params.include_stop_str_in_output:
            is_whole = len(self._held) == num_characters  # else tokens in it are left out
            shown += "".join(self._held) if is_whole else self._release(len(self._held))
        self._held.clear()
        return shown
