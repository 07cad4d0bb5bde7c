"""Incremental decoding: the text of a growing list of tokens, in whole characters.

Knows a tokenizer only as a function from token ids to text. A single token has no text of its
own: spaces depend on the token before, characters may span several tokens. So a short window of
tokens is decoded again for every new one, and what goes beyond the text shown so far is new.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
_MAX_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 40
_MAX_PARTIAL_CHARS = 3  # a character of 4 bytes of which 3 have come, each shown as one


def num_partial_chars(text: str) -> int:
    """Return how many characters at the end may turn into others with the next token."""
    run = len(text) - len(text.rstrip(REPLACEMENT))
    return min(run, _MAX_PARTIAL_CHARS)


class WindowStream:
    """A ``TokenStream`` over any decoder.

    The concatenated text is what the decoder makes of all tokens at once after the prompt, apart
    from a character that the last token leaves incomplete: that one is left out.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = _readable_tail(decode, prompt_token_ids)
        text = decode(self._window)
        self._num_shown = len(text) - num_partial_chars(text)
        self._num_context = len(self._window)  # tokens of the window whose text has been shown

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes: whole characters, possibly none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_partial = num_partial_chars(text)
        is_overlong = len(self._window) >= _MAX_WINDOW_TOKENS
        if is_overlong:  # invalid bytes or invisible tokens in a row: stop waiting for more
            num_partial = 0
        new_text = text[self._num_shown : len(text) - num_partial]
        if num_partial:
            self._num_shown += len(new_text)
        elif new_text or is_overlong:
            self._shift()
        return new_text

    def _shift(self) -> None:
        """Forget the old context; the tokens just shown are the new one."""
        shown = self._window[self._num_context :]
        self._window = shown[-_MAX_CONTEXT_TOKENS:]
        self._num_context = len(self._window)
        self._num_shown = len(self._decode(self._window))


def _readable_tail(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """Return the last few tokens, from where a character begins if possible."""
    longest = min(_MAX_CONTEXT_TOKENS, len(token_ids))
    for num_tokens in range(longest, 0, -1):
        tail = list(token_ids[-num_tokens:])
        if not decode(tail).startswith(REPLACEMENT):
            return tail
    return list(token_ids[-longest:]) if longest else []
