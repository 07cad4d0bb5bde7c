"""Products on the CPU in bfloat16 through corun's own kernel."""

import collections
import math
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ...cpu_workers.kernels.linear.multiply import MATRIX_FIELDS, Y_FIELD, multiply, num_row_bytes
from ...cpu_workers.kernels.simd import layout
from ...cpu_workers.kernels.simd.arithmetic import linear_tag
from ..device import huge_pages
from ..forward.kernel_threads import kernel_helpers, num_kernel_threads
from ..forward.launcher import current_launcher

_ITEM_BYTES = torch.bfloat16.itemsize


class _Scratch(threading.local):
    """Memory for the kernel call that follows in the same thread."""

    memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, num_bytes: int) -> torch.Tensor:
        """At least this many bytes, aligned to 64; previous contents are lost."""
        if self.memory.numel() < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self.memory


_SCRATCH = _Scratch()


class KernelLinear:
    """One matrix in the layout of corun's kernel of dense products."""

    def __init__(
        self,
        tag: np.generic,
        shape: tuple[int, int],
        packed: np.ndarray,
        bias: torch.Tensor | None,
        beside: np.ndarray | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """Take ownership of the packed arrays.

        tag: the arithmetic, of ``layout``; shape: [out_features, in_features];
        beside, order: see ``PackedWeight``.
        """
        self.tag = tag
        self.out_features, self.in_features = shape
        self.padded_in, self.padded_out = layout.padded_linear_features(
            self.in_features, self.out_features, tag
        )
        self.bias = None if bias is None else bias.detach()
        padded_bias = np.zeros(self.padded_out, np.float32)
        if bias is not None:
            padded_bias[: self.out_features] = bias.detach().float().numpy()
        self.order = order
        self.arrays = (packed, padded_bias, beside, order)
        self._alone = FusedProduct((self,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias; see ``LinearBackend``."""
        return self._alone(x)[0]

    def describe(self) -> tuple[int, ...]:
        """The kernel's arguments for this matrix; the address of y is filled in later."""
        packed, padded_bias, beside, _ = self.arrays
        return (
            packed.ctypes.data,
            padded_bias.ctypes.data,
            0,
            self.padded_out * _ITEM_BYTES,
            self.padded_out // (layout.COLUMNS_PER_GROUP * layout.GROUPS_PER_LINEAR_UNIT),
            0 if beside is None else beside.ctypes.data,
        )


def pack_in_shares(num_rows: int, num_columns: int, pack: Callable[[slice, slice], None]) -> None:
    """Call ``pack`` with shares of rows and their panels, in as many threads as the kernels have.

    ``num_columns``: of a panel. Most of the time of packing is that of new pages.
    """
    num_panels = -(-num_rows // num_columns)
    share = -(-num_panels // num_kernel_threads())

    def pack_share(start: int) -> None:
        end = start + share
        pack(slice(start * num_columns, end * num_columns), slice(start, end))

    with ThreadPoolExecutor(num_kernel_threads(), "corun-packing") as threads:
        collections.deque(threads.map(pack_share, range(0, num_panels, share)), maxlen=0)


class NumbaLinear(KernelLinear):
    """Holds only the packed copy; the original weight is released if it has no other references."""

    name = "numba"
    dtypes: ClassVar[frozenset[torch.dtype] | None] = frozenset({torch.bfloat16})

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, tag: np.generic | None = None
    ) -> None:
        """Pack ``weight`` [out_features, in_features], bfloat16.

        ``tag``: the arithmetic, of ``layout``; None = the fastest here.
        """
        tag = linear_tag() if tag is None else tag
        assert weight.dtype == torch.bfloat16, weight.dtype
        out_features, in_features = weight.shape
        shape = layout.linear_shape(out_features, in_features, tag)
        memory = huge_pages.zeros(math.prod(shape) * _ITEM_BYTES)
        self.packed = memory.view(torch.uint16).view(shape)
        bits = weight.detach().contiguous().view(torch.uint16)
        rows, packed = bits.numpy(), self.packed.numpy()
        pack_in_shares(
            out_features,
            layout.linear_panel_columns(tag),
            lambda share, panels: layout.pack_linear(rows[share], packed[panels], tag),
        )
        super().__init__(tag, (out_features, in_features), self.packed.numpy(), bias)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, unpacked at each access: a copy."""
        shape = self.out_features, self.in_features
        dense = layout.unpack_linear(self.packed.numpy(), *shape, self.tag)
        return torch.from_numpy(dense).view(torch.bfloat16)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix: int64 [...] -> bfloat16 [..., in_features]. A copy."""
        columns = layout.linear_panel_columns(self.tag)
        panel, column = indices // columns, indices % columns
        lines = self.packed.view(torch.bfloat16)
        if layout.is_in_pairs(self.tag):
            rows = lines.view(torch.int32)[panel, :, column].view(torch.bfloat16)
        else:
            fours = lines.unflatten(-1, (columns // 4, 2, 4))
            rows = fours[panel, :, column // 4, :, column % 4].flatten(-2)
        if self.padded_in == self.in_features:
            return rows
        return rows[..., : self.in_features].contiguous()


def has_same_order(one: KernelLinear, other: KernelLinear) -> bool:
    """Whether two matrices read the same inputs in the same order."""
    if one.order is None or other.order is None:
        return one.order is other.order
    return np.array_equal(one.order, other.order)


class FusedProduct:
    """Products of matrices of one width with the same x, computed in one kernel."""

    def __init__(self, backends: Sequence[KernelLinear]) -> None:
        """All of one arithmetic, one width of x, and one order of it."""
        self._tag = backends[0].tag
        order = backends[0].order
        self._order = 0 if order is None else order.ctypes.data
        self._in_features, self._padded_in = backends[0].in_features, backends[0].padded_in
        # Not the back ends, one of which owns this object; their memory is read by address.
        self._alive = [backend.arrays for backend in backends]
        self._matrices = array("q", [field for backend in backends for field in backend.describe()])
        self._num_matrices = len(backends)
        self._widths = [(backend.padded_out, backend.out_features) for backend in backends]

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[..., in_features] -> one [..., out_features] per matrix, new and contiguous."""
        assert x.dtype == torch.bfloat16, x.dtype
        *leading, in_features = x.shape
        assert in_features == self._in_features, (x.shape, self._in_features)
        rows, stride = x, self._padded_in
        if in_features != stride or not x.is_contiguous():
            rows = self._padded_rows(x)
            stride = rows.stride(0)
        launcher = current_launcher()
        results = [launcher.new_output((*leading, padded), torch.bfloat16) for padded, _ in self._widths]
        matrices = launcher.keep_alive(array("q", self._matrices))
        for matrix, y in enumerate(results):
            matrices[matrix * MATRIX_FIELDS + Y_FIELD] = y.data_ptr()
        num_tokens = x.numel() // in_features
        num_threads = num_kernel_threads()
        num_bytes = num_row_bytes(self._tag, num_tokens, self._padded_in // 2, num_threads)
        scratch = launcher.keep_alive(_SCRATCH.at_least(num_bytes))
        if num_tokens:
            launcher.launch(
                multiply,
                self._tag,
                matrices.buffer_info()[0],
                self._num_matrices,
                rows.data_ptr(),
                stride * _ITEM_BYTES,
                self._order,
                self._padded_in // 2,
                num_tokens,
                scratch.data_ptr(),
                num_threads,
                kernel_helpers(),
            )
        return [
            y if padded == out_features else y[..., :out_features].contiguous()
            for y, (padded, out_features) in zip(results, self._widths, strict=True)
        ]

    def _padded_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as [tokens, padded in_features]: a view if possible."""
        rows = x.reshape(-1, self._in_features)
        if self._padded_in != self._in_features:
            return F.pad(rows, (0, self._padded_in - self._in_features))
        return rows if rows.stride(1) == 1 else rows.contiguous()
