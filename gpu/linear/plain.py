"""Products through torch: its own linear on the weight as loaded, or a quantised module."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


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


class FusedPlain:
    """Products of matrices of one width with the same x, computed as the product of one matrix."""

    def __init__(self, backends: Sequence[PlainLinear]) -> None:
        """Copy the weights into one matrix, of which each back end then holds its part."""
        self._widths = [backend.weight.shape[0] for backend in backends]
        weight = torch.cat([backend.weight for backend in backends])
        bias = None
        if any(backend.bias is not None for backend in backends):
            parts = zip(backends, self._widths, strict=True)
            bias = torch.cat([weight.new_zeros(w) if b.bias is None else b.bias for b, w in parts])
        self._whole = PlainLinear(weight, bias)
        for backend, part in zip(backends, weight.split(self._widths), strict=True):
            backend.weight = part

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[..., in_features] -> one [..., out_features] per matrix, columns of a new tensor."""
        return list(self._whole(x).split(self._widths, dim=-1))


class ModuleLinear:
    """Calls a module that stands in for an ``nn.Linear``: its library knows the weight's layout."""

    name = "module"

    def __init__(self, module: nn.Module, read_weight: Callable[[], torch.Tensor]) -> None:
        """``read_weight`` returns the full matrix [out_features, in_features], on the host."""
        self._module = module
        self._read_weight = read_weight

    @property
    def weight(self) -> torch.Tensor:
        """The full matrix, on the host; read at each access."""
        return self._read_weight()

    @property
    def bias(self) -> torch.Tensor | None:
        return getattr(self._module, "bias", None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's result; see ``LinearBackend``."""
        y: torch.Tensor = self._module(x)
        return y.to(x.dtype).contiguous()
