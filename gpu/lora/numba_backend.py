"""LoRA products on the CPU through the grouped kernels that CPU workers use, too."""

import numba
import numpy as np
import torch
import torch.nn.functional as F

from ...cpu_workers.kernels import layout
from ...cpu_workers.kernels.lora import add_delta
from ..step import LoraBatch
from .base import PackedLora
from .table import LoraTable


class NumbaLora:
    """One kernel call per target, over all segments; bfloat16 or float32.

    Not to be called from two threads at once: it owns the scratch memory of a call.
    """

    name = "numba"

    def __init__(
        self, table: LoraTable, *, dtype: torch.dtype, use_bfloat16_dot: bool | None = None
    ) -> None:
        """Serve the adapters of ``table``, in ``dtype``.

        ``use_bfloat16_dot`` None = if the processor has it.
        """
        assert dtype in {torch.bfloat16, torch.float32}, dtype
        assert table.device.type == "cpu", table.device
        self._table = table
        self._dtype = dtype
        self._tag: np.generic
        if dtype == torch.float32:
            self._tag = layout.FLOAT32
        elif layout.has_bfloat16_dot() if use_bfloat16_dot is None else use_bfloat16_dot:
            self._tag = layout.BFLOAT16_DOT
        else:
            self._tag = layout.BFLOAT16
        self._hidden = torch.empty(0, dtype=torch.float32)

    def pack(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> PackedLora:
        """Lay out A and B as ``cpu_workers.kernels.layout`` says; the rank is padded to 8 and 2."""
        # Clones, because torch aligns to the 64 bytes of a vector load and numpy does not.
        packed_a = torch.from_numpy(layout.pack_a(self._bits(a).numpy())).clone()
        packed_b = torch.from_numpy(layout.pack_b(self._bits(b).numpy())).clone()
        return PackedLora(
            a=packed_a.view(self._dtype),
            b=packed_b.view(self._dtype),
            rank=a.shape[0],
            scaling=scaling,
        )

    def add_delta(
        self, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch
    ) -> None:
        """Add the deltas of one target to y, in place; see ``LoraBackend``."""
        assert x.dtype == y.dtype == self._dtype, (x.dtype, y.dtype, self._dtype)
        assert x.stride(1) == 1 and y.stride(1) == 1, (x.stride(), y.stride())
        assert batch.segment_ends_host[-1] <= min(x.shape[0], y.shape[0])
        itemsize = x.element_size()
        in_features, out_features = layout.padded_features(x.shape[1], y.shape[1], itemsize)
        if in_features != x.shape[1]:
            x = F.pad(x, (0, in_features - x.shape[1]))
        result = y
        if out_features != y.shape[1]:
            y = F.pad(y, (0, out_features - y.shape[1]))
        hidden = self._scratch(x.shape[0] * -(-batch.max_rank // layout.RANKS_PER_TILE))
        table = self._table
        add_delta(
            self._tag,
            itemsize,
            x.data_ptr(),
            x.stride(0) * itemsize,
            in_features * itemsize // 8,
            y.data_ptr(),
            y.stride(0) * itemsize,
            out_features,
            table.a_pointers.data_ptr() + 8 * target_index,
            table.b_pointers.data_ptr() + 8 * target_index,
            table.ranks.data_ptr() + 4 * target_index,
            table.scalings.data_ptr() + 4 * target_index,
            table.num_targets,
            batch.segment_starts.data_ptr(),
            batch.segment_ends.data_ptr(),
            batch.table_rows.data_ptr(),
            batch.num_segments,
            hidden.data_ptr(),
            numba.get_num_threads(),
        )
        if y is not result:
            result.copy_(y[:, : result.shape[1]])

    def _bits(self, matrix: torch.Tensor) -> torch.Tensor:
        matrix = matrix.detach().to("cpu", self._dtype).contiguous()
        return matrix if self._dtype == torch.float32 else matrix.view(torch.uint16)

    def _scratch(self, num_tiles: int) -> torch.Tensor:
        num_values = num_tiles * layout.RANKS_PER_TILE
        if self._hidden.numel() < num_values:
            self._hidden = torch.empty(num_values, dtype=torch.float32)
        return self._hidden
