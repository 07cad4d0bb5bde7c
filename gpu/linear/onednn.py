"""Products on the CPU with weights packed once for oneDNN; float32, and bfloat16 where it can."""

from typing import ClassVar

import torch

# oneDNN picks the layout for a number of rows; the layouts differ little from 1 to 128 rows.
_TOKENS_PACKED_FOR = 8


class OnednnLinear:
    """Holds only the packed copy: a weight that nobody else refers to is released."""

    name = "onednn"
    dtypes: ClassVar[frozenset[torch.dtype] | None] = frozenset(
        {torch.float32, torch.bfloat16, torch.float16}
    )

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Pack ``weight`` [out_features, in_features]; RuntimeError where oneDNN cannot."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), _TOKENS_PACKED_FOR
        )
        self.bias = None if bias is None else bias.detach()

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, unpacked at each access: a copy."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias; see ``LinearBackend``."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return result
