"""Incremental counts of the tokens in a growing list, for penalties."""

import numpy as np
from numpy.typing import NDArray

_MIN_ROOM = 16


class TokenCounts:
    """Distinct tokens in the order of their first occurrence, with their counts."""

    __slots__ = ("_counts", "_index_of", "_tokens", "num_counted")

    def __init__(self) -> None:
        self.num_counted = 0  # tokens counted so far, from the start of the list
        self._index_of: dict[int, int] = {}
        self._tokens = np.empty(_MIN_ROOM, dtype=np.int64)
        self._counts = np.empty(_MIN_ROOM, dtype=np.float32)

    def catch_up(self, tokens: NDArray[np.int64]) -> None:
        """Count the new tokens of ``tokens``, which is the whole list. O(new tokens)."""
        for token in tokens[self.num_counted :].tolist():
            index = self._index_of.get(token)
            if index is None:
                index = self._add(token)
            self._counts[index] += 1
        self.num_counted = len(tokens)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The distinct tokens: a view, valid until the next ``catch_up``."""
        return self._tokens[: len(self._index_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """The count of each of ``tokens``: a view, valid as long."""
        return self._counts[: len(self._index_of)]

    def _add(self, token: int) -> int:
        index = self._index_of[token] = len(self._index_of)
        if index == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._tokens[index], self._counts[index] = token, 0.0
        return index
