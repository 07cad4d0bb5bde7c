"""Chooses memory and streams for copies of adapters to the device; ``arrival`` makes the copies.

An adapter's layout on the device is computed once and used by every load: its offsets are relative
to the start of the load's memory.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...runtime.adapters.resolved import FACTOR_BYTES
from ...runtime.adapters.target_map import Target
from ...runtime.errors import ResourceError
from ...shm.region import ALIGNMENT_BYTES, rows_bytes
from ..coexec.invocation import JobShape, job_shape
from ..device.base import Stream
from ..device.host_memory import TorchDevice
from ..lora.adapter_layout import AdapterLayout, GroupKey, GroupPlan, TargetMatrices
from ..lora.base import PackedLora
from ..lora.matrix_layout import PACKED, MatrixLayout, unpack
from ..lora.table import TableEntries

# Demand loads that share the link at the same time; further loads queue.
_NUM_LOAD_STREAMS = 3
# A copy occupies the copy engine for at most this many bytes, so that activations can interleave.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """A layer group: regions [first, end) of the adapter, which are adjacent on the device."""

    first: int
    end: int
    start_bytes: int
    end_bytes: int


class DeviceLayout:
    """The layout of one adapter: its regions as they are, or each matrix as plain rows."""

    def __init__(
        self,
        layout: AdapterLayout,
        plans: Sequence[GroupPlan],
        group_of_layer: Sequence[int],
        *,
        is_packed: bool,
    ) -> None:
        """``plans``: one per region, layers ascending; ``group_of_layer``: ascending, by layer."""
        self._layout = layout
        self.group_of_layer = group_of_layer
        self.is_packed = is_packed
        self.keys: tuple[GroupKey, ...] = tuple(plan.key for plan in plans)
        self.shapes: tuple[JobShape, ...] = tuple(job_shape(plan.region) for plan in plans)
        self.matrices = tuple(layout.matrices_of(plan.key, plan.region) for plan in plans)
        self._starts = [0]  # of each region, and the end of the last
        # Of A, B, factors and rows of tokens (0 = none), in the order of the matrices.
        self._offsets: list[tuple[int, int, int, int]] = []
        for plan, found in zip(plans, self.matrices, strict=True):
            self._place(plan.region.num_bytes, found)
        self._region_of = {
            one.target.index: (region, one) for region, found in enumerate(self.matrices) for one in found
        }
        self._targets = np.array(list(self._region_of), np.int64)
        self._offset_of = dict(zip(self._region_of, self._offsets, strict=True))
        self._a_offsets, self._b_offsets, self._factor_offsets, _ = (
            np.array(self._offsets, np.int64).reshape(-1, 4).T
        )
        ones = [one for _, one in self._region_of.values()]
        self._ranks = np.array([one.rank for one in ones], np.int32)
        self._scalings = np.array([one.scaling for one in ones], np.float32)
        self._max_rank = max((one.rank for one in ones), default=0)
        # By region, of what is unpacked: rows of tokens are copied to their places.
        self.matrix_bytes = tuple(plan.region.matrix_bytes for plan in plans)
        self.max_matrix_bytes = max(self.matrix_bytes, default=0)
        self.layer_spans = self._layer_spans()

    @property
    def num_bytes(self) -> int:
        """Device memory that a load takes."""
        return self._starts[-1]

    def start_bytes(self, region: int) -> int:
        """The offset of a region."""
        return self._starts[region]

    def entries(self, memory: torch.Tensor) -> TableEntries:
        """The kernels' table entries for the adapter in ``memory``."""
        base = memory.data_ptr()
        return TableEntries(
            self._targets,
            self._a_offsets + base,
            self._b_offsets + base,
            self._ranks,
            self._scalings,
            np.where(self._factor_offsets, self._factor_offsets + base, 0),
            self._max_rank,
        )

    def views(self, target_index: int, memory: torch.Tensor) -> PackedLora:
        """One target's matrices in ``memory``. Raises ``KeyError`` if the adapter has none."""
        region, one = self._region_of[target_index]
        if self.is_packed:
            part = memory[self._starts[region] : self._starts[region + 1]]
            return self._layout.views(one, part)
        a_offset, b_offset, factor_offset, rows_offset = self._offset_of[target_index]
        target = one.target
        factors = None
        if factor_offset:
            factors = memory[factor_offset : factor_offset + FACTOR_BYTES * target.out_features]
            factors = factors.view(torch.float32).view(2, target.out_features)
        return PackedLora(
            a=self._rows(memory, a_offset, one.rank, target.in_features),
            b=self._rows(memory, b_offset, one.rank, target.out_features),
            rank=one.rank,
            scaling=one.scaling,
            factors=factors,
            own=self._layout.own_rows(one, memory, rows_offset) if one.num_tokens else None,
        )

    def own_rows(self, one: TargetMatrices, memory: torch.Tensor) -> torch.Tensor:
        """The bytes in ``memory`` of one target's own rows of tokens, if they are not packed."""
        offset = self._offset_of[one.target.index][3]
        return memory[offset:][: own_bytes(one.num_rows, one.target, self._layout.dtype)]

    @property
    def target_indices(self) -> Collection[int]:
        """Indices of the targets that the adapter has."""
        return self._region_of.keys()

    def _place(self, region_bytes: int, found: Sequence[TargetMatrices]) -> None:
        """Place one more region."""
        start = self._starts[-1]
        if self.is_packed:
            self._offsets += [
                (
                    start + one.a_offset,
                    start + one.b_offset,
                    start + one.factor_offset if one.factor_offset else 0,
                    start + one.rows_offset if one.num_rows else 0,
                )
                for one in found
            ]
            self._starts.append(start + region_bytes)
            return
        for one in found:
            b_start = start + row_bytes(one.rank, one.target.in_features, self._layout.dtype)
            end = b_start + row_bytes(one.rank, one.target.out_features, self._layout.dtype)
            rows_start = end + (aligned_factor_bytes(one.target) if one.factor_offset else 0)
            self._offsets.append(
                (start, b_start, end if one.factor_offset else 0, rows_start if one.num_rows else 0)
            )
            start = rows_start + own_bytes(one.num_rows, one.target, self._layout.dtype)
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
    """An adapter's matrices by target index; a view is made on first access."""

    def __init__(self, placement: DeviceLayout, memory: torch.Tensor) -> None:
        self._placement = placement
        self._memory = memory

    def __getitem__(self, target_index: int) -> PackedLora:
        return self._placement.views(target_index, self._memory)

    def __iter__(self) -> Iterator[int]:
        return iter(self._placement.target_indices)

    def __len__(self) -> int:
        return len(self._placement.target_indices)


def unpack_target(packed: PackedLora, rows: PackedLora) -> None:
    """Copy the matrices and factors of one target to their places as rows."""
    unpack(packed.a, rows.a)
    unpack(packed.b, rows.b.t())
    if rows.factors is not None:
        assert packed.factors is not None
        rows.factors.copy_(packed.factors)


def row_bytes(rank: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of one matrix as rows, rounded up so that the next one is aligned."""
    return _aligned(rank * width * dtype.itemsize)


def aligned_factor_bytes(target: Target) -> int:
    """Bytes of one target's factors, rounded up likewise."""
    return _aligned(FACTOR_BYTES * target.out_features)


def own_bytes(num_rows: int, target: Target, dtype: torch.dtype) -> int:
    """Bytes of one target's own rows of tokens, likewise."""
    return rows_bytes(num_rows, target.row_features * dtype.itemsize)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class SlabSize:
    """The size of the device memory that is reserved for adapters."""

    num_bytes: int  # includes the staging buffers of loads
    max_rank: int  # the largest of any adapter


@dataclass(slots=True, eq=False)
class Lane:
    """A stream for loads, with its staging buffer if they need one."""

    stream: Stream
    staging: torch.Tensor | None = None


class AdapterCopier:
    """Places and copies adapters on the device; used only by the thread that owns the device."""

    def __init__(
        self,
        device: TorchDevice,
        where: torch.device,
        layout: AdapterLayout,
        wanted: MatrixLayout,
        slab: SlabSize | None = None,
    ) -> None:
        """Make the streams, and the slab, which CUDA requires.

        Args:
            device: The device that copies.
            where: The torch device of its memory.
            layout: The layout of the arena, packed.
            wanted: The layout that the device's kernels read.
            slab: None = memory is allocated for each adapter.

        Raises ``ResourceError`` if the slab is too small for any adapter.
        """
        assert layout.matrices is PACKED, layout.matrices.name
        assert slab is not None or where.type == "cpu", where
        self.device = device
        self.layout = layout
        self.wanted = wanted
        self._where = where
        self._lanes = [Lane(device.stream(f"load {n}")) for n in range(_NUM_LOAD_STREAMS)]
        self._prefetch_lane = Lane(device.stream("prefetch"))
        self._num_taken = 0
        self._reader: Stream | None = None
        self._slab = None if slab is None else self._make_slab(slab)

    @property
    def slab_bytes(self) -> int | None:
        """Bytes of the slab for adapters; None = there is no slab."""
        return None if self._slab is None else self._slab.numel()

    def set_compute_stream(self, compute: Stream) -> None:
        """Set the stream on which kernels read adapters, if steps end before their kernels do."""
        self._reader = compute

    def await_readers(self, lane: Lane) -> None:
        """Hold the lane until all work enqueued on the readers' stream is done.

        That work may still read released memory that the lane is about to overwrite.
        """
        if self._reader is None:
            return
        event = self.device.event()
        self.device.record(self._reader, event)
        self.device.wait_event(lane.stream, event)
        self.device.release_event(event)

    def take_lane(self, *, is_prefetch: bool) -> Lane:
        """Return the stream for one more load; demand loads rotate, so that they share the link."""
        if is_prefetch:
            return self._prefetch_lane
        self._num_taken += 1
        return self._lanes[self._num_taken % len(self._lanes)]

    def device_bytes(self, plans: Sequence[GroupPlan]) -> int:
        """Device memory that an adapter takes."""
        if self.wanted is PACKED:
            return sum(plan.region.num_bytes for plan in plans)
        loras = [lora for plan in plans for lora in plan.loras if lora is not None]
        scaled = [lora.target for lora in loras if lora.magnitudes is not None]
        matrix_bytes = sum(
            row_bytes(lora.rank, width, self.layout.dtype)
            for lora in loras
            for width in (lora.target.in_features, lora.target.out_features)
        )
        rows = [rows for plan in plans for rows in plan.rows if rows is not None]
        return (
            matrix_bytes
            + sum(map(aligned_factor_bytes, scaled))
            + sum(own_bytes(one.num_rows, one.target, self.layout.dtype) for one in rows)
        )

    def place(self, plans: Sequence[GroupPlan], group_of_layer: Sequence[int]) -> DeviceLayout:
        """The layout of an adapter, the same for every load."""
        is_packed = self.wanted is PACKED
        return DeviceLayout(self.layout, plans, group_of_layer, is_packed=is_packed)

    def memory(self, num_bytes: int, offset_bytes: int | None) -> torch.Tensor:
        """Device memory for an adapter, uint8: in the slab at this offset, or allocated.

        The lane that writes it has waited for its readers. Earlier copies to it have ended: its
        previous owner has waited for them.
        """
        if self._slab is None:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._where)
        assert offset_bytes is not None and offset_bytes + num_bytes <= self._slab.numel()
        return self._slab[offset_bytes : offset_bytes + num_bytes]

    def staging(self, lane: Lane, num_bytes: int) -> torch.Tensor:
        """The buffer that packed regions pass through, used in stream order.

        The caller holds a reference: without a slab a larger buffer may replace this one.
        """
        if lane.staging is None or lane.staging.numel() < num_bytes:
            assert self._slab is None, f"a region of {num_bytes} bytes exceeds the rank limit"
            lane.staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._where)
        return lane.staging

    def close(self) -> None:
        """Release the slab; no operation may use it any more. Idempotent."""
        self._slab = None
        for lane in (*self._lanes, self._prefetch_lane):
            lane.staging = None

    def _make_slab(self, slab: SlabSize) -> torch.Tensor:
        """Allocate all memory that loads will ever need, so that they never allocate from torch.

        torch allocates and frees CUDA memory with calls that wait for the whole device, which may
        be waiting for the host.
        """
        region_bytes = 0 if self.wanted is PACKED else self.layout.max_region_bytes(slab.max_rank)
        lanes = (*self._lanes, self._prefetch_lane)
        if slab.num_bytes <= len(lanes) * region_bytes:
            raise ResourceError(
                f"{slab.num_bytes} bytes for adapters on the device are too few: {len(lanes)} "
                f"staging buffers of {region_bytes} bytes are taken from them; raise "
                "--adapter-memory-fraction or --memory-gib, or lower --max-lora-rank"
            )
        memory = torch.empty(slab.num_bytes, dtype=torch.uint8, device=self._where)
        for lane in lanes:
            lane.staging, memory = memory[:region_bytes], memory[region_bytes:]
        return memory

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, in chunks."""
        if source.numel() <= _CHUNK_BYTES:
            self.device.copy(lane.stream, destination, source)
            return
        for start in range(0, source.numel(), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            self.device.copy(lane.stream, destination[start:end], source[start:end])
