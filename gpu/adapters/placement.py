"""Where an adapter goes on the device: worked out once for an adapter, not at every load.

Offsets count from the start of the memory that a load takes; only that differs between loads.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...shm.region import ALIGNMENT_BYTES
from ..coexec.invocation import JobShape, job_shape
from ..lora.adapter_layout import AdapterLayout, GroupKey, GroupPlan, TargetMatrices
from ..lora.base import PackedLora
from ..lora.table import TableEntries


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """A layer group: regions [first, end) of the adapter, which lie together on the device."""

    first: int
    end: int
    start_bytes: int
    end_bytes: int


class Placement:
    """All of one adapter: its regions as they are, or each matrix as plain rows."""

    def __init__(
        self, layout: AdapterLayout, plans: Sequence[GroupPlan], group_of_layer: Sequence[int],
        *, is_packed: bool,
    ) -> None:  # fmt: skip
        """``plans``: of its regions, layers ascending; ``group_of_layer``: ascending, by layer."""
        self._layout = layout
        self.group_of_layer = group_of_layer
        self.is_packed = is_packed
        self.keys: tuple[GroupKey, ...] = tuple(plan.key for plan in plans)
        self.shapes: tuple[JobShape, ...] = tuple(job_shape(plan.region) for plan in plans)
        self.matrices = tuple(layout.matrices_of(plan.key, plan.region) for plan in plans)
        self._starts = [0]  # of each region, and the end of the last
        self._offsets: list[tuple[int, int]] = []  # of A and B, in the order of the matrices
        for plan, found in zip(plans, self.matrices, strict=True):
            self._place(plan.region.num_bytes, found)
        self._region_of = {
            one.target.index: (region, one)
            for region, found in enumerate(self.matrices)
            for one in found
        }
        self._targets = np.array(list(self._region_of), np.int64)
        self._offset_of = dict(zip(self._region_of, self._offsets, strict=True))
        self._a_offsets, self._b_offsets = np.array(self._offsets, np.int64).reshape(-1, 2).T
        ones = [one for _, one in self._region_of.values()]
        self._ranks = np.array([one.rank for one in ones], np.int32)
        self._scalings = np.array([one.scaling for one in ones], np.float32)
        self._max_rank = max((one.rank for one in ones), default=0)
        self.max_region_bytes = max((plan.region.num_bytes for plan in plans), default=0)
        self.layer_spans = self._layer_spans()

    @property
    def num_bytes(self) -> int:
        """Memory of the device that a load takes."""
        return self._starts[-1]

    def start_bytes(self, region: int) -> int:
        """Where a region begins."""
        return self._starts[region]

    def entries(self, memory: torch.Tensor) -> TableEntries:
        """What kernels are told of the adapter in ``memory``."""
        base = memory.data_ptr()
        return TableEntries(
            self._targets, self._a_offsets + base, self._b_offsets + base, self._ranks,
            self._scalings, self._max_rank,
        )  # fmt: skip

    def views(self, target_index: int, memory: torch.Tensor) -> PackedLora:
        """One target's matrices in ``memory``. Raises ``KeyError`` if the adapter has none."""
        region, one = self._region_of[target_index]
        if self.is_packed:
            part = memory[self._starts[region] : self._starts[region + 1]]
            return self._layout.views(one, part)
        a_offset, b_offset = self._offset_of[target_index]
        target = one.target
        return PackedLora(
            a=self._rows(memory, a_offset, one.rank, target.in_features),
            b=self._rows(memory, b_offset, one.rank, target.out_features),
            rank=one.rank,
            scaling=one.scaling,
        )

    @property
    def target_indices(self) -> Collection[int]:
        """Of the targets that the adapter has."""
        return self._region_of.keys()

    def _place(self, region_bytes: int, found: Sequence[TargetMatrices]) -> None:
        """Take in one more region."""
        start = self._starts[-1]
        if self.is_packed:
            self._offsets += [(start + one.a_offset, start + one.b_offset) for one in found]
            self._starts.append(start + region_bytes)
            return
        for one in found:
            b_start = start + row_bytes(one.rank, one.target.in_features, self._layout.dtype)
            self._offsets.append((start, b_start))
            start = b_start + row_bytes(one.rank, one.target.out_features, self._layout.dtype)
        self._starts.append(start)

    def _layer_spans(self) -> tuple[LayerSpan, ...]:
        group_of_region = [self.group_of_layer[layer] for layer, _ in self.keys]
        spans, first = [], 0
        for group in range(max(self.group_of_layer) + 1):
            end = first + group_of_region.count(group)
            spans.append(LayerSpan(first, end, self._starts[first], self._starts[end]))
            first = end
        return tuple(spans)

    def _rows(self, memory: torch.Tensor, offset: int, height: int, width: int) -> torch.Tensor:
        dtype = self._layout.dtype
        num_bytes = height * width * dtype.itemsize
        return memory[offset : offset + num_bytes].view(dtype).view(height, width)


class PlacedMatrices(Mapping[int, PackedLora]):
    """An adapter's matrices by target index, viewed only when somebody asks for them."""

    def __init__(self, placement: Placement, memory: torch.Tensor) -> None:
        self._placement = placement
        self._memory = memory

    def __getitem__(self, target_index: int) -> PackedLora:
        return self._placement.views(target_index, self._memory)

    def __iter__(self) -> Iterator[int]:
        return iter(self._placement.target_indices)

    def __len__(self) -> int:
        return len(self._placement.target_indices)


def row_bytes(rank: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of one matrix as rows, rounded up so that the next one is aligned."""
    num_bytes = rank * width * dtype.itemsize
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
