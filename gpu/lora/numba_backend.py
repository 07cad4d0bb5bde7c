"""LoRA products on the CPU by the grouped kernels that CPU workers use, too."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numba import types

from ...cpu_workers.kernels.lora.factors import scale_rows
from ...cpu_workers.kernels.lora.grouped import BATCH_FIELDS, add_deltas
from ...cpu_workers.kernels.simd import layout
from ...cpu_workers.kernels.simd.arithmetic import bfloat16_tag
from ..forward.batch import LoraBatch, PassMetadata
from ..forward.kernel_threads import kernel_helpers, num_kernel_threads
from ..forward.launcher import current_launcher
from .base import PackedLora
from .matrix_layout import PACKED, MatrixLayout
from .table import LoraTable


class NumbaLora:
    """One kernel call per input group, over all segments; one more with factors.

    Of bfloat16 or float32.

    Must not be called from two threads at once: it owns the scratch memory of a call.
    """

    name = "numba"
    layout: MatrixLayout = PACKED

    def __init__(self, table: LoraTable, *, dtype: torch.dtype, tag: np.generic | None = None) -> None:
        """Serve the adapters of ``table``, in ``dtype``.

        ``tag``: the arithmetic for bfloat16, of ``layout``; None = the fastest here.
        """
        assert dtype in {torch.bfloat16, torch.float32}, dtype
        assert table.device.type == "cpu", table.device
        self.table = table
        self._dtype = dtype
        self._tag: np.generic = layout.FLOAT32
        if dtype == torch.bfloat16:
            self._tag = bfloat16_tag() if tag is None else tag
        # Scratch of a call: x A^T, and x in float32, for a processor that only multiplies float32.
        self._wide = torch.empty(0, dtype=torch.float32)
        self._hidden = torch.empty(0, dtype=torch.float32)
        # Largest call so far; scratch memory is large enough for it.
        self._most_targets = self._most_features = 0
        self._seen: LoraBatch | None = None  # the batch of the next two fields
        self._has_rank: list[bool] = []  # by target: whether an adapter of the batch has it
        self._batch_fields = array("q", [0] * BATCH_FIELDS)  # at a fixed address

    def pack(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> PackedLora:
        """Lay out A and B as in ``kernels.simd.layout``; the rank is padded to 8 and 2."""
        # Clones, because torch aligns to the 64 bytes of a vector load and numpy does not.
        packed_a = torch.from_numpy(layout.pack_a(self._bits(a).numpy())).clone()
        packed_b = torch.from_numpy(layout.pack_b(self._bits(b).numpy())).clone()
        return PackedLora(
            a=packed_a.view(self._dtype), b=packed_b.view(self._dtype), rank=a.shape[0], scaling=scaling
        )

    def add_delta(self, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch) -> None:
        """Add the deltas of one target to y, in place; see ``LoraBackend``."""
        self.add_deltas(x, (y,), (target_index,), batch)

    def add_deltas(
        self, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int], batch: LoraBatch
    ) -> None:
        """Add the deltas of targets that read the same x, in one kernel; see ``LoraBackend``."""
        assert x.dtype == self._dtype and x.stride(1) == 1, (x.dtype, x.stride())
        assert batch.segment_ends_host[-1] <= x.shape[0]
        itemsize = x.element_size()
        in_features, _ = layout.padded_features(x.shape[1], 0, itemsize)
        self._prepare(batch, x.shape[0], len(ys), in_features)
        launcher = current_launcher()
        if not (launcher.is_recording or any(self._has_rank[index] for index in target_indices)):
            return  # an empty call would cost as much as a small one
        if in_features != x.shape[1]:
            x = F.pad(x, (0, in_features - x.shape[1]))
        padded = [self._padded(y, x.shape[0]) for y in ys]
        fields = [
            value
            for index, y in zip(target_indices, padded, strict=True)
            for value in (index, y.data_ptr(), y.stride(0) * itemsize, y.shape[1])
        ]
        targets = launcher.keep_alive(array("q", fields))  # read by the kernel through an address
        launcher.before_replay(self, self._prepare_replay)
        table = self.table
        launcher.launch(
            add_deltas,
            self._tag,
            itemsize,
            x.data_ptr(),
            x.stride(0) * itemsize,
            in_features * itemsize // 8,
            targets.buffer_info()[0],
            len(padded),
            table.a_pointers.data_ptr(),
            table.b_pointers.data_ptr(),
            table.ranks.data_ptr(),
            table.scalings.data_ptr(),
            table.num_targets,
            self._batch_fields.buffer_info()[0],
            num_kernel_threads(),
            kernel_helpers(),
        )
        for y, result in zip(padded, ys, strict=True):
            if y is not result:
                result.copy_(y[:, : result.shape[1]])
        if self.table.has_factors(batch.table_rows_host):
            self._scale(ys, target_indices)

    def prepare_factors(self) -> None:
        """Compile the kernel of factors: a start does not, as few servers need it."""
        scale_rows.compile((types.boolean, *(types.int64,) * 6))

    def _scale(self, ys: Sequence[torch.Tensor], target_indices: Sequence[int]) -> None:
        """Apply the factors of the batch that the kernel's fields are set for."""
        fields = [
            value
            for index, y in zip(target_indices, ys, strict=True)
            for value in (index, y.data_ptr(), y.stride(0) * y.element_size(), y.shape[1])
        ]
        launcher, table = current_launcher(), self.table
        targets = launcher.keep_alive(array("q", fields))  # read by the kernel through an address
        launcher.launch(
            scale_rows,
            self._dtype == torch.float32,
            targets.buffer_info()[0],
            len(ys),
            table.factor_pointers.data_ptr(),
            table.num_targets,
            self._batch_fields.buffer_info()[0],
            num_kernel_threads(),
        )

    def _prepare_replay(self, metadata: PassMetadata) -> None:
        assert metadata.lora is not None, "the captured pass has adapters"
        self._prepare(metadata.lora, metadata.attention.num_tokens, 0, 0)

    def _prepare(self, batch: LoraBatch, num_tokens: int, num_targets: int, in_features: int) -> None:
        """Set the kernel's fields for a batch, and the largest number of targets and features."""
        has_room = num_targets <= self._most_targets and in_features <= self._most_features
        if batch is self._seen and has_room:
            return
        ranks = self.table.host_ranks[list(batch.table_rows_host)].max(axis=0)
        self._has_rank = [rank > 0 for rank in ranks.tolist()]
        self._seen = batch
        self._most_targets = max(self._most_targets, num_targets)
        tiles = -(-batch.max_rank // layout.RANKS_PER_TILE)
        num_values = self._most_targets * num_tokens * tiles * layout.RANKS_PER_TILE
        if self._hidden.numel() < num_values:
            self._hidden = torch.empty(num_values, dtype=torch.float32)
        self._most_features = max(self._most_features, in_features)
        if self._tag.dtype == layout.BFLOAT16.dtype and self._wide.numel() < num_tokens * self._most_features:
            self._wide = torch.empty(num_tokens * self._most_features, dtype=torch.float32)
        scratch = (self._hidden, self._wide)
        places = (batch.segment_starts, batch.segment_ends, batch.table_rows, *scratch)
        fields = (batch.num_pieces, *(tensor.data_ptr() for tensor in places))
        for field, value in enumerate(fields):
            self._batch_fields[field] = value

    def _padded(self, y: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Y, or a copy that is as wide as the kernels write."""
        assert y.dtype == self._dtype and y.stride(1) == 1, (y.dtype, y.stride())
        assert y.shape[0] == num_tokens, (y.shape, num_tokens)
        _, out_features = layout.padded_features(0, y.shape[1], y.element_size())
        return y if out_features == y.shape[1] else F.pad(y, (0, out_features - y.shape[1]))

    def _bits(self, matrix: torch.Tensor) -> torch.Tensor:
        matrix = matrix.detach().to("cpu", self._dtype).contiguous()
        return matrix if self._dtype == torch.float32 else matrix.view(torch.uint16)
