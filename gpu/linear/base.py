"""The interface of matrix products with the base model's weights."""

from typing import Protocol

import torch


class LinearBackend(Protocol):
    """Holds one weight matrix in the layout it likes and multiplies by it."""

    name: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [..., in_features] -> [..., out_features], dtype of x."""
        ...
