"""The interface of matrix products with the base model's weights."""

from typing import Protocol

import torch


class LinearBackend(Protocol):
    """Holds one weight matrix in its own layout and multiplies by it."""

    name: str

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [out_features, in_features]; may be unpacked at each access."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias [out_features], if there is one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [..., in_features] -> [..., out_features], dtype of x.

        The result is new and contiguous, so deltas can be added in place.
        """


class MakeLinear(Protocol):
    """Makes a backend from a weight [out_features, in_features] and a bias or None."""

    name: str
    dtypes: frozenset[torch.dtype] | None  # of the weight; None = any

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearBackend:
        """Return the backend; the caller drops its own reference to the weight afterwards."""
