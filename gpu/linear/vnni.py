"""Products on the CPU in bfloat16 through corun's own kernel; needs AVX512_BF16."""

from typing import ClassVar

import numba
import torch
import torch.nn.functional as F

from ...cpu_workers.kernels import layout
from ...cpu_workers.kernels.linear import multiply

_ITEM_BYTES = torch.bfloat16.itemsize


class VnniLinear:
    """Holds only the packed copy: a weight that nobody else refers to is released."""

    name = "vnni"
    dtypes: ClassVar[frozenset[torch.dtype] | None] = frozenset({torch.bfloat16})

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Pack ``weight`` [out_features, in_features], bfloat16."""
        assert weight.dtype == torch.bfloat16, weight.dtype
        self._out_features, self._in_features = weight.shape
        self._padded_in, padded_out = layout.padded_linear_features(
            self._in_features, self._out_features
        )
        groups = padded_out // layout.COLUMNS_PER_GROUP
        # Memory of torch, because it is aligned to the 64 bytes of a vector load.
        self._packed = torch.zeros(
            (groups, self._padded_in // 2, layout.COLUMNS_PER_GROUP, 2), dtype=torch.uint16
        )
        bits = weight.detach().contiguous().view(torch.uint16)
        layout.pack_linear(bits.numpy(), self._packed.numpy())
        self._num_units = groups // layout.GROUPS_PER_LINEAR_UNIT
        self.bias = None if bias is None else bias.detach()
        self._padded_bias = torch.zeros(padded_out, dtype=torch.float32)
        if bias is not None:
            self._padded_bias[: self._out_features] = bias.detach()

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, unpacked at each access: a copy."""
        dense = layout.unpack_linear(self._packed.numpy(), self._out_features, self._in_features)
        return torch.from_numpy(dense).view(torch.bfloat16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias; see ``LinearBackend``."""
        assert x.dtype == torch.bfloat16, x.dtype
        assert x.shape[-1] == self._in_features, (x.shape, self._in_features)
        rows = x.reshape(-1, self._in_features)
        if self._padded_in != self._in_features:
            rows = F.pad(rows, (0, self._padded_in - self._in_features))
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        num_tokens = rows.shape[0]
        padded_out = self._padded_bias.shape[0]
        y = torch.empty((num_tokens, padded_out), dtype=torch.bfloat16)
        if num_tokens:
            multiply(
                self._packed.data_ptr(),
                rows.data_ptr(),
                rows.stride(0) * _ITEM_BYTES,
                self._padded_in // 2,
                self._padded_bias.data_ptr(),
                y.data_ptr(),
                padded_out * _ITEM_BYTES,
                self._num_units,
                num_tokens,
                numba.get_num_threads(),
            )
        if padded_out != self._out_features:
            y = y[:, : self._out_features].contiguous()
        return y.view(*x.shape[:-1], self._out_features)
