"""Chooses memory and streams for copies of adapters to the device; ``arrival`` makes the copies.

An adapter's layout on the device is computed once and used by every load: its offsets are relative
to the runs of the load's memory.
"""

import itertools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...runtime.adapters.resolved import FACTOR_BYTES
from ...runtime.adapters.target_map import Target
from ...runtime.memory.pages import pack_runs
from ...shm.region import aligned, rows_bytes
from ..coexec.invocation import JobShape, job_shape
from ..device.base import Stream
from ..device.host_memory import TorchDevice
from ..lora.adapter_layout import AdapterLayout, GroupKey, GroupPlan, TargetMatrices
from ..lora.base import PackedLora
from ..lora.matrix_layout import PACKED, MatrixLayout, unpack
from ..lora.table import TableEntries

_NUM_LANES = 2  # of loads that requests wait for, and of prefetches
# A copy occupies the copy engine for at most this many bytes, so that activations can interleave.
_CHUNK_BYTES = 4 << 20
_NOWHERE = (-1, 0)  # the place of a part that an adapter does not have


# Bytes [start, end) of a run.
Stretch = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """A layer group: regions [first, end) of the adapter, and where they are on the device."""

    first: int
    end: int
    stretches: tuple[Stretch, ...]  # (run, start, end)


class DeviceLayout:
    """The layout of one adapter: its regions as they are, or each matrix as plain rows.

    Its memory is a list of runs. Without pages there is one run, in which all follows end to end.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        plans: Sequence[GroupPlan],
        group_of_layer: Sequence[int],
        *,
        is_packed: bool,
        page_bytes: int | None = None,
    ) -> None:
        """``plans``: one per region, layers ascending; ``group_of_layer``: ascending, by layer.

        ``page_bytes``: None = the device has no pages; regions as they are need that.
        """
        self._layout = layout
        self.group_of_layer = group_of_layer
        self.is_packed = is_packed
        self.keys: tuple[GroupKey, ...] = tuple(plan.key for plan in plans)
        self.shapes: tuple[JobShape, ...] = tuple(job_shape(plan.region) for plan in plans)
        self.matrices = tuple(layout.matrices_of(plan.key, plan.region) for plan in plans)
        self._region_of = {
            one.target.index: (region, one) for region, found in enumerate(self.matrices) for one in found
        }
        ones = [one for _, one in self._region_of.values()]
        # By target: of A, B, factors and rows of tokens, the run (-1 = none) and the offset there.
        places, self.run_pages, self.num_bytes = self._place(plans, ones, page_bytes)
        self._places = dict(zip(self._region_of, places, strict=True))
        self._runs, self._offsets = np.array(places, np.int64).reshape(-1, 4, 2).transpose(2, 1, 0)
        self._targets = np.array(list(self._region_of), np.int64)
        self._ranks = np.array([one.rank for one in ones], np.int32)
        self._scalings = np.array([one.scaling for one in ones], np.float32)
        self._max_rank = max((one.rank for one in ones), default=0)
        # By region, of what is unpacked: rows of tokens are copied to their places.
        self.matrix_bytes = tuple(plan.region.matrix_bytes for plan in plans)
        self.max_matrix_bytes = max(self.matrix_bytes, default=0)
        self.layer_spans = self._layer_spans()

    def start_bytes(self, region: int) -> int:
        return self._starts[region]

    def entries(self, memories: Sequence[torch.Tensor]) -> TableEntries:
        """The kernels' table entries for the adapter in ``memories``: its runs."""
        bases = np.array([memory.data_ptr() for memory in memories] + [0], np.int64)  # -1: the last
        a_pointers, b_pointers, factor_pointers, _ = bases[self._runs] + self._offsets
        return TableEntries(
            self._targets,
            a_pointers,
            b_pointers,
            self._ranks,
            self._scalings,
            factor_pointers,
            self._max_rank,
        )

    def views(self, target_index: int, memories: Sequence[torch.Tensor]) -> PackedLora:
        """One target's matrices in ``memories``. Raises ``KeyError`` if the adapter has none."""
        region, one = self._region_of[target_index]
        if self.is_packed:
            return self._layout.views(one, memories[0][self._starts[region] : self._starts[region + 1]])
        a, b, (factor_run, factor_offset), (rows_run, rows_offset) = self._places[target_index]
        target = one.target
        factors = None
        if one.factor_offset:
            factors = memories[factor_run][factor_offset:][: FACTOR_BYTES * target.out_features]
            factors = factors.view(torch.float32).view(2, target.out_features)
        return PackedLora(
            a=self._rows(memories, a, one.rank, target.in_features),
            b=self._rows(memories, b, one.rank, target.out_features),
            rank=one.rank,
            scaling=one.scaling,
            factors=factors,
            own=self._layout.own_rows(one, memories[rows_run], rows_offset) if one.num_tokens else None,
        )

    def own_rows(self, one: TargetMatrices, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes in ``memories`` of one target's own rows of tokens, if they are not packed."""
        run, offset = self._places[one.target.index][3]
        return memories[run][offset:][: own_bytes(one.num_rows, one.target, self._layout.dtype)]

    @property
    def target_indices(self) -> Collection[int]:
        return self._region_of.keys()

    def _place(
        self, plans: Sequence[GroupPlan], ones: Sequence[TargetMatrices], page_bytes: int | None
    ) -> tuple[list[list[tuple[int, int]]], tuple[int, ...], int]:
        """Return the places of all parts by target, the pages of each run, and all bytes."""
        if self.is_packed:
            assert page_bytes is None, "regions are not divided into pages"
            self._starts = [0, *itertools.accumulate(plan.region.num_bytes for plan in plans)]
            places = []
            for region, one in self._region_of.values():
                offsets = [one.a_offset, one.b_offset, one.factor_offset, one.rows_offset]
                is_there = [True, True, one.factor_offset > 0, one.num_rows > 0]
                start = self._starts[region]
                places.append(
                    [
                        (0, start + at) if there else _NOWHERE
                        for at, there in zip(offsets, is_there, strict=True)
                    ]
                )
            return places, (), self._starts[-1]
        self._sizes = [self._part_bytes(one) for one in ones]
        sizes = tuple(size for parts in self._sizes for size in parts if size)
        run_pages: tuple[int, ...] = ()
        if page_bytes is None:
            *starts, num_bytes = [0, *itertools.accumulate(sizes)]
            left = iter([(0, start) for start in starts])
        else:
            run_pages, placed = pack_runs(sizes, page_bytes)
            num_bytes = sum(run_pages) * page_bytes
            left = iter(placed)
        places = [[next(left) if size else _NOWHERE for size in parts] for parts in self._sizes]
        return places, run_pages, num_bytes

    def _part_bytes(self, one: TargetMatrices) -> tuple[int, int, int, int]:
        """The bytes of A, B, factors and rows of tokens as rows, each aligned; 0 = none."""
        target, dtype = one.target, self._layout.dtype
        return (
            row_bytes(one.rank, target.in_features, dtype),
            row_bytes(one.rank, target.out_features, dtype),
            aligned(FACTOR_BYTES * target.out_features) if one.factor_offset else 0,
            own_bytes(one.num_rows, target, dtype) if one.num_rows else 0,
        )

    def _layer_spans(self) -> tuple[LayerSpan, ...]:
        group_of_region = [self.group_of_layer[layer] for layer, _ in self.keys]
        spans, first = [], 0
        for group in range(max(self.group_of_layer) + 1):
            end = first + group_of_region.count(group)
            spans.append(LayerSpan(first, end, self._stretches(first, end)))
            first = end
        return tuple(spans)

    def _stretches(self, first: int, end: int) -> tuple[Stretch, ...]:
        """The memory of regions [first, end), in order; what follows end to end is one stretch."""
        if self.is_packed:
            return ((0, self._starts[first], self._starts[end]),)
        found = [
            (*place, place[1] + size)
            for (region, _), places, sizes in zip(
                self._region_of.values(), self._places.values(), self._sizes, strict=True
            )
            if first <= region < end
            for place, size in zip(places, sizes, strict=True)
            if size
        ]
        stretches: list[Stretch] = []
        for run, start, stop in sorted(found):
            follows = bool(stretches) and stretches[-1][0] == run and stretches[-1][2] == start
            stretches.append((run, stretches.pop()[1] if follows else start, stop))
        return tuple(stretches)

    def _rows(
        self, memories: Sequence[torch.Tensor], place: tuple[int, int], height: int, width: int
    ) -> torch.Tensor:
        run, offset = place
        dtype = self._layout.dtype
        num_bytes = height * width * dtype.itemsize
        return memories[run][offset : offset + num_bytes].view(dtype).view(height, width)


class PlacedMatrices(Mapping[int, PackedLora]):
    """An adapter's matrices by target index; a view is made on first access."""

    def __init__(self, placement: DeviceLayout, memories: Sequence[torch.Tensor]) -> None:
        self._placement = placement
        self._memories = memories

    def __getitem__(self, target_index: int) -> PackedLora:
        return self._placement.views(target_index, self._memories)

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
    return aligned(rank * width * dtype.itemsize)


def own_bytes(num_rows: int, target: Target, dtype: torch.dtype) -> int:
    """Bytes of one target's own rows of tokens, likewise."""
    return rows_bytes(num_rows, target.row_features * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Device memory that adapters share with KV blocks."""

    memory: torch.Tensor  # uint8, all pages
    page_bytes: int
    max_rank: int  # the largest of any adapter; sizes the staging buffers of loads


def staging_bytes(layout: AdapterLayout, wanted: MatrixLayout, max_rank: int) -> int:
    """Device memory for the buffers of all lanes, if the device has pages."""
    return 0 if wanted is PACKED else _NUM_LANES * layout.max_region_bytes(max_rank)


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
        pages: DevicePages | None = None,
        section_bytes: int = sys.maxsize,
    ) -> None:
        """Make the streams. With pages, which CUDA requires, allocate the lanes' buffers.

        So loads never allocate from torch: it allocates and frees CUDA memory with calls that wait
        for the whole device, which may be waiting for the host.

        Args:
            device: The device that copies.
            where: The torch device of its memory.
            layout: The layout of the arena, packed.
            wanted: The layout that the device's kernels read.
            pages: None = memory is allocated for each adapter.
            section_bytes: Of the arena: a copy lies within a section, which is registered on its own.
        """
        assert layout.matrices is PACKED, layout.matrices.name
        assert pages is not None or where.type == "cpu", where
        self.device = device
        self.layout = layout
        self.wanted = wanted
        self._where = where
        self._lane = Lane(device.stream("load"))
        self._section_bytes = section_bytes
        self._prefetch_lane = Lane(device.stream("prefetch"))
        self._reader: Stream | None = None
        self._pages = pages
        self._kept: torch.Tensor | None = None  # memory of the adapter that was released last
        if pages is not None:
            buffer_bytes = staging_bytes(layout, wanted, pages.max_rank) // _NUM_LANES
            for lane in (self._lane, self._prefetch_lane):
                lane.staging = torch.empty(buffer_bytes, dtype=torch.uint8, device=where)

    @property
    def pages_bytes(self) -> int | None:
        """Bytes of all pages; None = there are no pages."""
        return None if self._pages is None else self._pages.memory.numel()

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
        """Return the stream for one more load. Those that requests wait for follow each other."""
        return self._prefetch_lane if is_prefetch else self._lane

    def place(self, plans: Sequence[GroupPlan], group_of_layer: Sequence[int]) -> DeviceLayout:
        """The layout of an adapter, the same for every load."""
        is_packed = self.wanted is PACKED
        page_bytes = None if self._pages is None else self._pages.page_bytes
        return DeviceLayout(self.layout, plans, group_of_layer, is_packed=is_packed, page_bytes=page_bytes)

    def memories(self, num_bytes: int, runs: Sequence[range]) -> tuple[torch.Tensor, ...]:
        """Device memory for an adapter, uint8: runs of pages, or allocated.

        The lane that writes it has waited for its readers. Earlier copies to it have ended: its
        previous owner has waited for them.
        """
        pages = self._pages
        if pages is None:
            kept, self._kept = self._kept, None
            if kept is None or kept.numel() != num_bytes:
                kept = torch.empty(num_bytes, dtype=torch.uint8, device=self._where)
            return (kept,)
        size = pages.page_bytes
        assert sum(map(len, runs)) * size == num_bytes, (runs, num_bytes)
        assert all(run.stop * size <= pages.memory.numel() for run in runs), runs
        return tuple(pages.memory[run.start * size : run.stop * size] for run in runs)

    def keep(self, memories: Sequence[torch.Tensor]) -> None:
        """Keep allocated memory, which nothing uses any more, for the next load of as many bytes.

        The first touches of fresh memory take longer than the copy.
        """
        if self._pages is None:
            (self._kept,) = memories

    def staging(self, lane: Lane, num_bytes: int) -> torch.Tensor:
        """The buffer that packed regions pass through, used in stream order.

        The caller holds a reference: without pages a larger buffer may replace this one.
        """
        if lane.staging is None or lane.staging.numel() < num_bytes:
            assert self._pages is None, f"a region of {num_bytes} bytes exceeds the rank limit"
            lane.staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._where)
        return lane.staging

    def close(self) -> None:
        """Release the memory; no operation may use it any more. Idempotent."""
        self._pages = self._kept = None
        for lane in (self._lane, self._prefetch_lane):
            lane.staging = None

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes of the arena, in chunks."""
        first, start, num_bytes = int(source.storage_offset()), 0, source.numel()
        while start < num_bytes:
            left_bytes = self._section_bytes - (first + start) % self._section_bytes
            end = min(num_bytes, start + min(_CHUNK_BYTES, left_bytes))
            if end - start == num_bytes:  # slices take as long as enqueuing
                self.device.copy(lane.stream, destination, source)
            else:
                self.device.copy(lane.stream, destination[start:end], source[start:end])
            start = end
