"""A request's rules for single tokens: which are allowed, and which are biased."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...runtime.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class TokenRules:
    """The rules of one request; their indices are moved to the device of its logits once."""

    _bad_words: Sequence[NDArray[np.int64]]
    _allowed: torch.Tensor | None  # int64
    _biased: torch.Tensor  # int64
    _biases: torch.Tensor  # float32, by ``_biased``

    @classmethod
    def of(cls, sampling: SamplingParams) -> "TokenRules | None":
        """Return None if there are no rules."""
        allowed, biases = sampling.allowed_token_ids, sampling.logit_bias or {}
        if allowed is None and not biases and not sampling.bad_words_ids:
            return None
        return cls(
            [np.array(word, dtype=np.int64) for word in sampling.bad_words_ids],
            None if allowed is None else torch.tensor(sorted(set(allowed)), dtype=torch.int64),
            torch.tensor(list(biases), dtype=torch.int64),
            torch.tensor(list(biases.values()), dtype=torch.float32),
        )

    def apply(self, row: torch.Tensor, output: NDArray[np.int64]) -> None:
        """Change the logits of the token that comes after ``output``, in place.

        row: float32 [vocabulary]. A bad word is prevented at its last token, if all its other
        tokens have just been generated.
        """
        if self._biased.device != row.device:
            self._move(row.device)
        if self._allowed is not None:
            kept = row[self._allowed]
            row.fill_(float("-inf"))
            row[self._allowed] = kept
        if len(self._biased):
            row[self._biased] += self._biases
        for word in self._bad_words:
            start = len(output) - len(word) + 1
            if start >= 0 and np.array_equal(output[start:], word[:-1]):
                row[int(word[-1])] = float("-inf")

    def _move(self, device: torch.device) -> None:
        self._biased, self._biases = self._biased.to(device), self._biases.to(device)
        if self._allowed is not None:
            self._allowed = self._allowed.to(device)
