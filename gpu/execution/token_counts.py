"""How often each token occurs in a list that grows: what penalties need, without counting anew."""

import numpy as np
from numpy.typing import NDArray

_MIN_ROOM = 16


class TokenCounts:
    """Distinct tokens in the order in which they were first seen, and how often each was."""

    __slots__ = ("_counts", "_index_of", "_tokens", "num_counted")

    def __init__(self) -> None:
        self.num_counted = 0  # tokens of the list, from its beginning
        self._index_of: dict[int, int] = {}
        self._tokens = np.empty(_MIN_ROOM, dtype=np.int64)
        self._counts = np.empty(_MIN_ROOM, dtype=np.float32)

    def catch_up(self, tokens: NDArray[np.int64]) -> None:
        """Count what ``tokens``, the whole list, has more than last time. O(new tokens)."""
        for token in tokens[self.num_counted :].tolist():
            index = self._index_of.get(token)
            if index is None:
                index = self._add(token)
            self._counts[index] += 1
        self.num_counted = len(tokens)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The distinct tokens: a view that the next ``catch_up`` may leave behind."""
        return self._tokens[: len(self._index_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of ``tokens`` occurs: a view like it."""
        return self._counts[: len(self._index_of)]

    def _add(self, token: int) -> int:
        index = self._index_of[token] = len(self._index_of)
        if index == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._tokens[index], self._counts[index] = token, 0.0
        return index
