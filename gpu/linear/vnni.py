"""Products on the CPU in bfloat16 through corun's own kernel; needs AVX512_BF16."""

from array import array
from collections.abc import Sequence
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
        return multiply_all((self,), x)[0]

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as [tokens, padded in_features]: a view where that can be."""
        assert x.dtype == torch.bfloat16, x.dtype
        assert x.shape[-1] == self._in_features, (x.shape, self._in_features)
        rows = x.reshape(-1, self._in_features)
        if self._padded_in != self._in_features:
            return F.pad(rows, (0, self._padded_in - self._in_features))
        return rows if rows.stride(1) == 1 else rows.contiguous()

    def new_result(self, num_tokens: int) -> torch.Tensor:
        """Memory for a product: [tokens, padded out_features]."""
        return torch.empty((num_tokens, self._padded_bias.shape[0]), dtype=torch.bfloat16)

    def describe(self, y: torch.Tensor) -> tuple[int, ...]:
        """What the kernel is told of this matrix and its result."""
        return (
            self._packed.data_ptr(),
            self._padded_bias.data_ptr(),
            y.data_ptr(),
            y.stride(0) * _ITEM_BYTES,
            self._num_units,
        )

    def shaped(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A product without its padding, in the shape that belongs to x."""
        if y.shape[1] != self._out_features:
            y = y[:, : self._out_features].contiguous()
        return y.view(*x.shape[:-1], self._out_features)


def multiply_all(backends: Sequence[VnniLinear], x: torch.Tensor) -> list[torch.Tensor]:
    """Return the products of matrices of one width with the same x, computed in one kernel."""
    rows = backends[0].rows_of(x)
    num_tokens = rows.shape[0]
    results = [backend.new_result(num_tokens) for backend in backends]
    pairs = list(zip(backends, results, strict=True))
    # Its memory is read by the kernel through an address.
    matrices = array("q", [field for backend, y in pairs for field in backend.describe(y)])
    if num_tokens:
        multiply(
            matrices.buffer_info()[0],
            len(backends),
            rows.data_ptr(),
            rows.stride(0) * _ITEM_BYTES,
            rows.shape[1] // 2,
            num_tokens,
            numba.get_num_threads(),
        )
    return [backend.shaped(y, x) for backend, y in pairs]
