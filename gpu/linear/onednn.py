"""Products on the CPU with weights packed once for oneDNN.

In the model's own type if oneDNN multiplies it on this processor. Otherwise in float32, on a copy
of twice the size: exact, with one rounding at the end, and many times faster than torch's own
products of 16 bits, which convert their weights at each call.
"""

from typing import ClassVar

import torch

# oneDNN chooses the layout for a number of rows; the layouts differ little from 1 to 128 rows.
_TOKENS_PACKED_FOR = 8


class OnednnLinear:
    """Holds only the packed copy; the original weight is released if it has no other references."""

    name = "onednn"
    dtypes: ClassVar[frozenset[torch.dtype] | None] = frozenset(
        {torch.float32, torch.bfloat16, torch.float16}
    )

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Pack ``weight`` [out_features, in_features]; RuntimeError if oneDNN cannot."""
        self._dtype = weight.dtype
        self._product_dtype = product_dtype(weight.dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().to(self._product_dtype).contiguous(), _TOKENS_PACKED_FOR
        )
        self.bias = None if bias is None else bias.detach()
        self._added = None if self.bias is None else self.bias.to(self._product_dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, unpacked at each access: a copy."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense.to(self._dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias; see ``LinearBackend``."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self._product_dtype), self._packed, self._added, "none", [], ""
        )
        return result.to(self._dtype)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which oneDNN multiplies matrices of ``dtype`` on this processor."""
    can = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype if dtype not in can or can[dtype]() else torch.float32
