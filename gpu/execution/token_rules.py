"""A request's rules for single tokens: which are allowed, and which are biased."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...runtime.sampling import SamplingParams

WORD_BITS = 32


@dataclass(slots=True, eq=False)
class TokenRules:
    """The rules of one request, as inputs of the sampler."""

    mask: NDArray[np.int32] | None  # of the allowed tokens; None = all
    biased: Sequence[int]
    biases: Sequence[float]  # by ``biased``
    _bad_words: Sequence[NDArray[np.int64]]

    @classmethod
    def of(cls, sampling: SamplingParams) -> "TokenRules | None":
        """Return None if there are no rules."""
        allowed, biases = sampling.allowed_token_ids, sampling.logit_bias or {}
        if allowed is None and not biases and not sampling.bad_words_ids:
            return None
        return cls(
            None if allowed is None else mask_of(allowed),
            list(biases),
            list(biases.values()),
            [np.array(word, dtype=np.int64) for word in sampling.bad_words_ids],
        )

    def forbidden(self, output: NDArray[np.int64]) -> list[int]:
        """Return the tokens that would complete a bad word after ``output``.

        A bad word is prevented at its last token, if all its other tokens have just been generated.
        """
        return [
            int(word[-1])
            for word in self._bad_words
            if len(word) - 1 <= len(output)
            and np.array_equal(output[len(output) - len(word) + 1 :], word[:-1])
        ]


def mask_of(token_ids: Collection[int]) -> NDArray[np.int32]:
    """Return the words of a mask: bit i of word w stands for token 32 * w + i."""
    words = np.zeros(max(token_ids) // WORD_BITS + 1, dtype=np.uint32)
    ids = np.fromiter(token_ids, dtype=np.int64)
    np.bitwise_or.at(words, ids // WORD_BITS, np.uint32(1) << (ids % WORD_BITS).astype(np.uint32))
    return words.view(np.int32)
