"""The factors of DoRA: each row of an output is scaled by magnitude / norm of its merged weights.

PEFT scales x W^T + d, where d is the delta of A and B, and then adds the bias. With y0 = x W^T +
bias + d this is y0 * factor + (1 - factor) * bias: a factor and a summand for each output, made
once, when the adapter is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...runtime.adapters.resolved import TargetLora
from ...runtime.adapters.target_map import Target
from ...runtime.errors import AdapterError

# The weight [out_features, in_features] that is served, and the bias, both in the host's memory.
ReadBase = Callable[[Target], tuple[torch.Tensor, torch.Tensor | None]]

_WEIGHTS_AT_ONCE = 1 << 20  # in float32, so that they stay in the cache


@dataclass(frozen=True, slots=True)
class FactorMaker:
    """Collects the tensors of one target, in any order, and writes its factors."""

    lora: TargetLora
    scaling: float  # as kernels read it
    read_base: ReadBase
    place: torch.Tensor  # float32 [2, out_features]: factors, then summands
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by name

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add A, B or the magnitudes; the last one makes the factors.

        Raises ``AdapterError`` if a row's norm is 0 or not finite.
        """
        # A copy, as ``tensor`` may be over a buffer that is used again.
        self._tensors[name] = tensor.to(torch.float32, copy=True)
        if len(self._tensors) == len(self.lora.tensors):
            a, b, magnitudes = (self._tensors.pop(raw.name) for raw in self.lora.tensors)
            self._write(a, b, magnitudes)

    def _write(self, a: torch.Tensor, b: torch.Tensor, magnitudes: torch.Tensor) -> None:
        weight, bias = self.read_base(self.lora.target)
        factors = magnitudes / merged_norms(weight, a, b, self.scaling)
        if not factors.isfinite().all():
            row = int(factors.isfinite().logical_not().nonzero()[0])
            raise AdapterError(
                f"{self.lora.tensors[-1].name}: row {row} of the base's weight with A and B has no "
                "norm to divide by (0, or not finite)"
            )
        self.place[0] = factors
        self.place[1] = 0.0 if bias is None else (1.0 - factors) * bias.float()


def merged_norms(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Norms of the rows of W + scaling * B A: float32 [out_features].

    weight: [out_features, in_features]; a: float32 [rank, in_features]; b: float32 [out_features,
    rank].
    """
    step = max(1, _WEIGHTS_AT_ONCE // weight.shape[1])
    norms = [
        torch.addmm(rows.float(), b_rows, a, alpha=scaling).norm(dim=1)
        for rows, b_rows in zip(weight.split(step), b.split(step), strict=True)
    ]
    return torch.cat(norms)
