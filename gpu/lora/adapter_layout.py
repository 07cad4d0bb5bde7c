"""Places an adapter's matrices in the host arena, and reads them back as tensors.

There is one region per (layer, input group) that the adapter changes, with all targets of the
group. Targets that the adapter does not change have rank 0, so the deltas of a group have the same
columns for every adapter. Independent of files and of free memory in the arena.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch

from ...cpu_workers.kernels.lora.pack import STORED_BYTES, pack_stored
from ...cpu_workers.kernels.simd.layout import padded_features
from ...runtime.adapters.resolved import (
    FACTOR_BYTES,
    RawTensor,
    ResolvedAdapter,
    StoredTensor,
    TargetLora,
    TargetRows,
)
from ...runtime.adapters.target_map import Target, TargetMap
from ...runtime.adapters.values import REFUSED_IN_BFLOAT16
from ...shm.arena import PAGE_BYTES, RegionPlace, RegionSpec
from ...shm.huge_pages import fill
from ...shm.region import TOKEN_BYTES, Region, TargetSize, plan_region, read_header, row_start, write_header
from .base import OwnRows, PackedLora
from .convert import to_tensor
from .factors import FactorMaker, ReadBase
from .matrix_layout import PACKED, MatrixLayout, bits_of

GroupKey = tuple[int, int]  # layer, input group
WriteMatrix = Callable[[np.ndarray], object]  # to its place
PackedPlace = tuple[int, ...]  # a row of the argument of ``pack_stored``, without the source

_MAX_KEPT = 32  # cached plans


@dataclass(frozen=True, slots=True, eq=False)  # adapters of one recipe share it
class GroupPlan:
    """One region to be made."""

    key: GroupKey
    region: Region
    loras: tuple[TargetLora | None, ...]  # by position in the group
    rows: tuple[TargetRows | None, ...] = ()  # likewise: rows of tokens of its own

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors that are written to the region."""
        of_loras = [raw.name for lora in self.loras if lora is not None for raw in lora.tensors]
        return of_loras + [run.tensor.name for own in self.rows if own is not None for run in own.runs]

    @property
    def spec(self) -> RegionSpec:
        """The specification of the region for the arena."""
        return RegionSpec(*self.key, self.region.num_bytes)


@dataclass(frozen=True, slots=True)
class TargetMatrices:
    """The places of one target's matrices in a region, in bytes from its start.

    ``factor_offset``: of its factors, float32 [2, out_features]; 0 = it has none. ``rows_offset``:
    of its own rows of tokens, ``num_rows``; ``num_tokens``: of its vocabulary, 0 = the base's.
    """

    target: Target
    rank: int
    scaling: float
    a_offset: int
    b_offset: int
    factor_offset: int = 0
    rows_offset: int = 0
    num_rows: int = 0
    num_tokens: int = 0

    @property
    def without_rows(self) -> "TargetMatrices":
        return replace(self, rows_offset=0, num_rows=0, num_tokens=0)


class AdapterLayout:
    """The layout of all adapters of one model; ``matrices`` defines the layout of A and B."""

    def __init__(self, target_map: TargetMap, matrices: MatrixLayout, dtype: torch.dtype) -> None:
        """``dtype``: of the matrices; the model's."""
        self.matrices = matrices
        self.dtype = dtype
        self.read_base: ReadBase | None = None  # needed by adapters with factors
        self._is_packed = matrices is PACKED and dtype == torch.bfloat16
        groups: dict[GroupKey, list[Target]] = defaultdict(list)
        for target in target_map.targets:
            groups[target.layer, target.input_group].append(target)
        self._groups = {key: tuple(groups[key]) for key in sorted(groups)}
        self._plan_once = lru_cache(_MAX_KEPT)(self._plan)

    def plan(self, adapter: ResolvedAdapter) -> tuple[GroupPlan, ...]:
        """The regions of an adapter, layers ascending; adapters of one recipe share the plan."""
        return self._plan_once(adapter)

    def _plan(self, adapter: ResolvedAdapter) -> tuple[GroupPlan, ...]:
        by_index = {lora.target.index: lora for lora in adapter.targets}
        rows_by_index = {rows.target.index: rows for rows in adapter.rows if rows.changes_base}
        plans = []
        for key, targets in self._groups.items():
            loras = tuple(by_index.get(target.index) for target in targets)
            rows = tuple(rows_by_index.get(target.index) for target in targets)
            if any(one is not None for one in (*loras, *rows)):
                sizes = [
                    self._with_rows(self._size_of(target, lora), own)
                    for target, lora, own in zip(targets, loras, rows, strict=True)
                ]
                plans.append(GroupPlan(key, self._region(targets, sizes), loras, rows))
        return tuple(plans)

    def max_region_bytes(self, rank: int) -> int:
        return max(
            self._region(targets, [self._size(one, rank, 1.0, has_factors=True) for one in targets]).num_bytes
            for targets in self._groups.values()
        )

    def writer(self, plans: Sequence[GroupPlan], parts: Sequence[torch.Tensor]) -> "RegionWriter":
        """A writer of regions. ``parts``: the bytes of each plan's region, uint8.

        Regions of different layers may have the same bytes, if their tensors are written in turn.
        """
        return RegionWriter(self, plans, parts)

    def prepare(
        self,
        plan: GroupPlan,
        part: torch.Tensor,
        packed: dict[str, PackedPlace],
        places: dict[str, WriteMatrix],
        makers: dict[str, FactorMaker],
    ) -> None:
        """Add to the places and ``makers`` those of a region; see ``RegionWriter``."""
        self._places_of(plan, part, packed, places)
        if any(own is not None for own in plan.rows):
            self._row_places_of(plan, part, places)
        self._makers_of(plan, part, makers)

    def check(self, tensors: Sequence[StoredTensor]) -> None:
        """Check everything that the writer checks, without writing."""
        for raw, data in tensors:
            self.convert(raw, data)

    def convert(self, raw: RawTensor, data: memoryview) -> torch.Tensor:
        """A tensor in the type that it is used in. Raises ``AdapterError``; see ``to_tensor``."""
        is_matrix = len(raw.shape) == 2  # magnitudes are not
        return to_tensor(raw, data, self.dtype if is_matrix else torch.float32)

    def matrices_in(self, place: RegionPlace, part: torch.Tensor) -> tuple[TargetMatrices, ...]:
        """The contents of a filled region (``part``: its bytes on the CPU), by its own header."""
        return self.matrices_of((place.layer, place.input_group), read_header(part.numpy().data))

    def matrices_of(self, key: GroupKey, region: Region) -> tuple[TargetMatrices, ...]:
        """The contents of a region of an input group."""
        targets = self._groups[key]
        return tuple(
            TargetMatrices(
                target,
                at.rank,
                at.scaling,
                at.a_offset,
                at.b_offset,
                at.factor_offset,
                at.rows_offset,
                at.num_rows,
                at.num_tokens,
            )
            for target, at in zip(targets, region.targets, strict=True)
            if not at.is_empty
        )

    def views(self, found: TargetMatrices, part: torch.Tensor) -> PackedLora:
        """One target's matrices as views of a region, or of its copy on a device."""
        target, rank = found.target, found.rank
        return PackedLora(
            a=self._view(part, found.a_offset, self._a_shape(target, rank)),
            b=self._view(part, found.b_offset, self._b_shape(target, rank)),
            rank=rank,
            scaling=found.scaling,
            factors=self._factors(part, found.factor_offset, target) if found.factor_offset else None,
            own=self.own_rows(found, part, found.rows_offset),
        )

    def own_rows(self, found: TargetMatrices, part: torch.Tensor, offset: int) -> OwnRows | None:
        """One target's own rows of tokens, as views of ``part`` at ``offset``."""
        if not found.num_tokens:
            return None
        start = offset + row_start(found.num_rows)
        shape = found.num_rows, found.target.row_features
        token_ids = part[offset : offset + TOKEN_BYTES * found.num_rows].view(torch.int32)
        return OwnRows(token_ids, self._view(part, start, shape), found.num_tokens)

    def _region(self, targets: Sequence[Target], sizes: Sequence[TargetSize]) -> Region:
        return plan_region(targets[0].in_features, self.dtype.itemsize, sizes)

    def _size_of(self, target: Target, lora: TargetLora | None) -> TargetSize:
        if lora is None:
            return self._size(target, 0, 0.0)
        has_factors = lora.magnitudes is not None
        return self._size(target, lora.rank, lora.scaling, has_factors=has_factors)

    def _with_rows(self, size: TargetSize, own: TargetRows | None) -> TargetSize:
        if own is None:
            return size
        row_bytes = own.target.row_features * self.dtype.itemsize
        return replace(size, row_bytes=row_bytes, num_rows=own.num_rows, num_tokens=own.num_tokens)

    def _size(self, target: Target, rank: int, scaling: float, *, has_factors: bool = False) -> TargetSize:
        itemsize = self.dtype.itemsize
        _, columns = padded_features(0, target.out_features, itemsize)
        if not rank:
            return TargetSize(0, columns, 0.0, 0, 0)
        a_bytes = math.prod(self._a_shape(target, rank)) * itemsize
        b_bytes = math.prod(self._b_shape(target, rank)) * itemsize
        factor_bytes = FACTOR_BYTES * target.out_features if has_factors else 0
        # Stored in the header's form, so that reading it back gives an equal value.
        return TargetSize(rank, columns, float(np.float32(scaling)), a_bytes, b_bytes, factor_bytes)

    def _places_of(
        self,
        plan: GroupPlan,
        part: torch.Tensor,
        packed: dict[str, PackedPlace],
        places: dict[str, WriteMatrix],
    ) -> None:
        start, item_bytes = part.data_ptr(), self.dtype.itemsize
        for lora, at in zip(plan.loras, plan.region.targets, strict=True):
            if lora is None:
                continue
            is_packed = self._is_packed and lora.magnitudes is None
            for raw, offset, shape, write in (
                (lora.a, at.a_offset, self._a_shape(lora.target, at.rank), self.matrices.write_a),
                (lora.b, at.b_offset, self._b_shape(lora.target, at.rank), self.matrices.write_b),
            ):
                if is_packed and raw.dtype in STORED_BYTES:
                    _, steps, height, unit = shape
                    sizes = *raw.shape, steps * unit, start + offset, height, unit * item_bytes
                    packed[raw.name] = STORED_BYTES[raw.dtype], *sizes
                else:
                    places[raw.name] = partial(write, place=bits_of(self._view(part, offset, shape)))

    def _row_places_of(self, plan: GroupPlan, part: torch.Tensor, places: dict[str, WriteMatrix]) -> None:
        """Write the tokens of rows, and add the places of the rows."""
        rows_of = {own.target.index: own for own in plan.rows if own is not None}
        for found in self.matrices_of(plan.key, plan.region):
            own = self.own_rows(found, part, found.rows_offset)
            if own is None:
                continue
            start = 0
            for run in rows_of[found.target.index].runs:
                end = start + run.end - run.first
                own.token_ids[start:end] = torch.arange(run.first, run.end, dtype=torch.int32)
                places[run.tensor.name] = partial(np.copyto, bits_of(own.rows[start:end]))
                start = end

    def _makers_of(self, plan: GroupPlan, part: torch.Tensor, makers: dict[str, FactorMaker]) -> None:
        for lora, at in zip(plan.loras, plan.region.targets, strict=True):
            if lora is not None and lora.magnitudes is not None:
                assert self.read_base is not None, "the base's weights are not set"
                place = self._factors(part, at.factor_offset, lora.target)
                maker = FactorMaker(lora, at.scaling, self.read_base, place)
                makers |= {raw.name: maker for raw in lora.tensors}

    def _factors(self, part: torch.Tensor, offset: int, target: Target) -> torch.Tensor:
        num_bytes = FACTOR_BYTES * target.out_features
        return part[offset : offset + num_bytes].view(torch.float32).view(2, target.out_features)

    def _view(self, part: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return part[offset : offset + num_bytes].view(self.dtype).view(shape)

    def _a_shape(self, target: Target, rank: int) -> tuple[int, ...]:
        return self.matrices.a_shape(rank, target.in_features, self.dtype.itemsize)

    def _b_shape(self, target: Target, rank: int) -> tuple[int, ...]:
        return self.matrices.b_shape(target.out_features, rank, self.dtype.itemsize)


class RegionWriter:
    """Writes an adapter's tensors to their places in regions, in any order."""

    def __init__(
        self, layout: AdapterLayout, plans: Sequence[GroupPlan], parts: Sequence[torch.Tensor]
    ) -> None:
        """See ``AdapterLayout.writer``. A region is prepared with its first tensor.

        Headers are written at once, because workers read them while they wait for values.
        """
        self._layout = layout
        self._parts = parts  # held, because packed places are addresses
        # By the names of tensors of regions that are not prepared.
        self._unprepared: dict[str, tuple[GroupPlan, torch.Tensor]] = {}
        self._packed: dict[str, PackedPlace] = {}  # by tensor name, of those written in one call
        self._places: dict[str, WriteMatrix] = {}  # likewise what writes the bits of a matrix
        self._makers: dict[str, FactorMaker] = {}  # by the names of all tensors of targets with factors
        for plan, part in zip(plans, parts, strict=True):
            write_header(plan.region, part.numpy().data)
            self._unprepared |= dict.fromkeys(plan.tensor_names, (plan, part))
            if not plan.tensor_names:
                self._prepare(plan, part)

    def write(self, tensors: Sequence[StoredTensor]) -> None:
        """Check, convert and write some tensors.

        Raises ``AdapterError`` naming one if a value is not finite, or overflows the type, or if a
        factor cannot be made.
        """
        packed: list[StoredTensor] = []
        rows: list[tuple[int, ...]] = []
        for raw, data in tensors:
            if raw.name in self._unprepared:
                plan, part = self._unprepared[raw.name]
                self._prepare(plan, part)
                for name in plan.tensor_names:
                    del self._unprepared[name]
            place = self._packed.pop(raw.name, None)
            if place is None:
                self._write_one(raw, data)
            else:
                packed.append((raw, data))
                rows.append((addressof(c_char.from_buffer(data)), *place))
        if not packed:
            return
        largest = np.empty(len(packed), np.uint32)
        pack_stored(np.array(rows, np.int64), largest)
        for (raw, data), bits in zip(packed, largest.tolist(), strict=True):
            if bits >= REFUSED_IN_BFLOAT16[raw.dtype]:
                self._layout.convert(raw, data)  # raises the error

    def _prepare(self, plan: GroupPlan, part: torch.Tensor) -> None:
        # In one call: to write fresh pages otherwise takes a fault for each.
        start = part.data_ptr() & -PAGE_BYTES
        fill(start, part.data_ptr() + part.numel() - start, ())
        self._layout.prepare(plan, part, self._packed, self._places, self._makers)

    def _write_one(self, raw: RawTensor, data: memoryview) -> None:
        tensor = self._layout.convert(raw, data)
        maker = self._makers.pop(raw.name, None)
        if maker is not None:
            maker.add(raw.name, tensor)
        if raw.name not in self._places:
            return  # magnitudes
        self._places.pop(raw.name)(bits_of(tensor))

    @property
    def missing(self) -> list[str]:
        """Tensors that have not been written."""
        return sorted({*self._unprepared, *self._packed, *self._places, *self._makers})
