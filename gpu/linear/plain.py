"""Products through torch's own linear, on the weight as it was loaded."""

from typing import ClassVar

import torch
import torch.nn.functional as F


class PlainLinear:
    """Any device and dtype; keeps the original weight."""

    name = "plain"
    dtypes: ClassVar[frozenset[torch.dtype] | None] = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Hold ``weight`` [out_features, in_features] and ``bias`` [out_features] or None."""
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias; see ``LinearBackend``."""
        return F.linear(x, self.weight, self.bias)
