"""What a grammar allows after the tokens of one output."""

import logging
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from ..adapters.vocabulary import MAX_ADDED_TOKENS
from ..errors import StepFailedError

_LOG = logging.getLogger(__name__)

_WORD_BITS = 32
_MAX_SHOWN_CHARS = 300  # of llguidance's message
_MAX_FORCED_BYTES = 2048  # at once: 1 ms of the engine's thread


class Matcher:
    """Follows one output. Not thread-safe: its caller uses it in one thread at a time.

    A function of the output: it consumes only tokens that continue those it has consumed, and
    otherwise starts from the first token again. So recomputed rows lose no token, and no token
    counts twice.
    """

    def __init__(self, start: LLMatcher, tokenizer: LLTokenizer, forcing: "Matcher | None" = None) -> None:
        """``start``: the grammar, compiled for ``tokenizer``; not changed.

        ``forcing``: the same, compiled apart, for ``forced``: its limits are for all answers;
        None = no text is forced.
        """
        self._forcing = forcing
        self._start = start
        self._tree = tokenizer
        self._tree_ends = tokenizer.eos_tokens
        self._state = start.deep_copy()
        self._consumed = b""  # the tokens as bytes, which compare fast
        # The tree's tokens, and those beyond them that may end an adapter's answers.
        self._num_words = -(-tokenizer.vocab_size // _WORD_BITS)
        num_more = -(-MAX_ADDED_TOKENS // _WORD_BITS)
        self._words = np.zeros(self._num_words + num_more, dtype=np.int32)

    def advance(self, output: NDArray[np.int64]) -> None:
        """Consume the tokens of ``output`` that are new. Raises ``StepFailedError``."""
        known = output.tobytes()
        num_consumed = len(self._consumed) // output.itemsize
        if not known.startswith(self._consumed):
            self._state, num_consumed = self._start.deep_copy(), 0
        self._state.consume_tokens(output[num_consumed:].tolist())
        self._consumed = known
        self._check()

    def is_at(self, output: NDArray[np.int64]) -> bool:
        """Whether just ``output`` has been consumed."""
        return output.tobytes() == self._consumed

    @property
    def may_end(self) -> bool:
        """Whether the consumed tokens are a whole answer."""
        return self._state.is_accepting()

    @property
    def has_ended(self) -> bool:
        """Whether the consumed tokens are a whole answer that nothing can continue."""
        return self._state.is_stopped()

    def forced(self, output: NDArray[np.int64]) -> list[int]:
        """Return the tokens of the text that the grammar forces after ``output``.

        The last ones are missing where a token may contain them and text that follows, unless the
        answer ends there. Consumes nothing.
        """
        if self._forcing is None:
            return []
        try:
            self._forcing.advance(output)
            return self._forcing._forced_tokens()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of llguidance is no Exception
            _LOG.info("text of an answer is no longer forced: %s", error)
            self._forcing = None  # the answer has limits of its own, and goes on
            return []

    def _forced_tokens(self) -> list[int]:
        text = self._state.compute_ff_bytes()
        self._check()
        if not text:
            return []
        tokens, rest = self._tree.tokenize_partial(text[:_MAX_FORCED_BYTES])
        if len(text) <= _MAX_FORCED_BYTES:
            last = [*tokens, *self._tree.tokenize_bytes(rest)]
            after = self._state.deep_copy()
            if after.try_consume_tokens(last) == len(last) and after.is_stopped():
                return last
        # The text of a special token must not become that token.
        return tokens[: self._state.validate_tokens(tokens)]

    def mask(self, ends: Collection[int], drawable_ends: Collection[int]) -> NDArray[np.int32]:
        """Return the words of the tokens that may follow; valid until the next call.

        Bit i of word w stands for token 32 * w + i. End tokens may follow only where the grammar
        may end, or where it allows nothing else. ``ends``: all end tokens of the request;
        ``drawable_ends``: those that may end the answer at this length.

        Raises ``StepFailedError``.
        """
        words = self._words
        words[self._num_words :] = 0
        num_bytes = self._num_words * words.itemsize
        self._state.unsafe_compute_mask_ptr(words.ctypes.data, num_bytes)
        self._check()
        may_end = self.may_end
        before = _bits(words, ends)
        _set_bits(words, self._tree_ends, is_set=False)
        _set_bits(words, ends, is_set=False)
        if may_end:
            _set_bits(words, drawable_ends, is_set=True)
        if not words.any():
            _set_bits(words, ends if may_end else before, is_set=True)
        return words

    def _check(self) -> None:
        if self._state.is_error():
            reason = " ".join(self._state.get_error().split())[:_MAX_SHOWN_CHARS]
            raise StepFailedError(f"the grammar of the answer failed: {reason}")


def _bits(words: NDArray[np.int32], token_ids: Collection[int]) -> list[int]:
    return [
        token
        for token in token_ids
        if token < _WORD_BITS * len(words) and int(words[token // 32]) >> token % 32 & 1
    ]


def _set_bits(words: NDArray[np.int32], token_ids: Collection[int], *, is_set: bool) -> None:
    unsigned = words.view(np.uint32)
    for token in token_ids:
        if token < _WORD_BITS * len(words):
            bit = np.uint32(1 << token % _WORD_BITS)
            if is_set:
                unsigned[token // _WORD_BITS] |= bit
            else:
                unsigned[token // _WORD_BITS] &= ~bit
