"""How an adapter gets from the arena to the device: its regions are copied one by one.

First layer first, on a stream of their own; layers form groups with an event each, so that the
first layers can be used before the last are there. Workers on the host compute from the same
regions, so these are always packed for them; where the device's kernels want plain rows, each
region goes through one buffer on the device and is unpacked from there, which costs some of the
device's bandwidth and neither the link's nor a second copy on the host.

An adapter whose files are being read arrives as they are: a layer group is copied once its regions
are whole, and whoever needs it before waits for the file first, for a while.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ..runtime.errors import AdapterError
from ..shm.region import read_header
from .adapter_copier import AdapterCopier, Lane, row_bytes
from .adapter_store import HostAdapter
from .coexec.cold_deltas import Arrival, GroupKey
from .coexec.gateway import PlacedRegion
from .device.base import DeviceError, DeviceTimeoutError, Event
from .lora.adapter_layout import TargetMatrices
from .lora.base import PackedLora
from .lora.matrix_layout import PACKED, unpack_a, unpack_b
from .lora.table import DeviceAdapter

_LOG = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 5.0
# Behind a failure a stream leaves all out, so it is at its end at once; if it is not, the failure
# was told of before, and others' copies are under way.
_FAILURE_TIMEOUT_S = 0.05
# A pass is begun when its layer groups are expected in time; one that is later than this by far
# must not hold up whoever else is in the pass.
_READ_TIMEOUT_S = 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    """So many layer groups of an adapter are on the host, and how long it took to read them."""

    num_groups: int
    duration_s: float


@dataclass(slots=True, eq=False)
class _LayerGroup:
    """Regions of neighbouring layers, by their place in the host's list."""

    parts: list[int] = field(default_factory=list)
    memory: torch.Tensor | None = None  # on the device
    event: Event | None = None  # behind its copies; None = nothing was placed yet
    is_enqueued: bool = False
    has_arrived: bool = False  # all copies were made; False behind the event = one has failed


def _num_regions(group: _LayerGroup) -> int:
    """How many of an adapter's regions there are up to the group's last one."""
    return group.parts[-1] + 1 if group.parts else 0


class Copied:
    """An adapter that is copied; see ``adapter_fetcher.Arrival`` and ``coexec.ArrivingAdapter``."""

    def __init__(
        self, host: HostAdapter, copier: AdapterCopier, group_of_layer: Sequence[int]
    ) -> None:
        """Reads ``host`` until the copies are done. ``group_of_layer``: ascending, by layer."""
        self._host = host
        self._copier = copier
        self._group_of_layer = group_of_layer
        self._groups = [_LayerGroup() for _ in range(max(group_of_layer) + 1)]
        for index, place in enumerate(host.places):
            self._groups[group_of_layer[place.layer]].parts.append(index)
        self._lane: Lane | None = None
        self._memory: torch.Tensor | None = None
        self._copies: list[list[tuple[TargetMatrices, PackedLora]]] = []  # by region
        self._spans: list[torch.Tensor] = []  # by region, where packed ones are wanted
        self._adapter = DeviceAdapter({})
        self._regions: dict[GroupKey, PlacedRegion] = {}
        self._error: Exception | None = None
        self._is_late = False  # a pass has gone on without a layer group

    @property
    def adapter(self) -> DeviceAdapter:
        """The matrices where they will be, after ``start``."""
        return self._adapter

    def start(self, *, is_gradual: bool) -> None:
        """Take memory and enqueue the copies of what is on the host, or of the first layer group.

        Raises what a full device raises, with nothing enqueued; ``finish`` tells of copies that
        cannot be enqueued.
        """
        self._lane = self._copier.take_lane(is_prefetch=is_gradual)
        self._copier.await_readers(self._lane)
        self._place()
        for group in self._groups:
            group.event = self._copier.device.event()
        if is_gradual:
            self.advance()
        else:
            self.enqueue_all()

    def advance(self) -> None:
        """Enqueue the next layer group, if it is on the host and the last one has arrived."""
        for group in self._groups:
            if not group.is_enqueued:
                if self._may_enqueue(group):
                    self._enqueue(group)
                return
            if not self._is_there(group):
                return

    def enqueue_all(self) -> None:
        """Enqueue every layer group that is on the host and not enqueued yet."""
        for group in self._groups:
            if not group.is_enqueued:
                if not self._may_enqueue(group):
                    return
                self._enqueue(group)

    def read(self, on_progress: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Read its files, if they must be; by the fetching thread."""
        self._host.read(on_progress, is_wanted)

    def reading(self) -> Reading | None:
        """How far its files have been read; None if they need not be."""
        if self._host.read_s is None:
            return None
        num_groups = sum(self._is_on_host(group) for group in self._groups)
        return Reading(num_groups, self._host.read_s)

    def is_done(self) -> bool:
        """Whether all that will be copied has been."""
        if not self._host.is_read:
            return False
        if self._host.error is None:
            return self._is_there(self._groups[-1])
        return all(self._is_there(group) for group in self._groups if group.is_enqueued)

    def num_arrived(self) -> int:
        """Layer groups, from the first on, that have been copied."""
        for number, group in enumerate(self._groups):
            if not self._is_there(group):
                return number
        return len(self._groups)

    def begin_pass(self) -> int:
        """A pass is about to use it; how many layers, from the first on, workers may read."""
        self._is_late = False
        if self._host.read_s is None:
            return len(self._group_of_layer)
        self.enqueue_all()
        num_whole = self._host.num_whole
        if num_whole == len(self._host.places):
            return len(self._group_of_layer)
        return self._host.places[num_whole].layer

    def has_failed(self) -> bool:
        """Whether a layer group is known to have failed: what was computed with it is void."""
        return self._is_late or any(
            self._is_there(group) and not group.has_arrived for group in self._groups
        )

    def arrival(self, layer: int) -> Arrival | None:
        """See ``coexec.ArrivingAdapter``."""
        number = self._group_of_layer[layer]
        group = self._groups[number]
        assert group.event is not None and group.memory is not None, "not started"
        if self._is_there(group):
            return None
        return Arrival(group.event, group.memory, partial(self._bring, number))

    def region(self, key: GroupKey) -> PlacedRegion | None:
        """See ``coexec.ColdAdapter``."""
        return self._regions.get(key)

    def finish(self) -> DeviceAdapter:
        """Give the host's reference back.

        Raises ``AdapterError`` if a copy has failed, and what reading its files has raised.
        """
        is_whole = all(group.has_arrived for group in self._groups)
        self._let_go()
        if is_whole:
            return self._adapter
        if self._host.error is not None:
            raise self._host.error
        if self._error is not None:
            raise AdapterError(f"copying it to the device failed: {self._error}") from self._error
        assert self._lane is not None
        try:
            self._copier.device.synchronize(self._lane.stream, timeout_s=_FAILURE_TIMEOUT_S)
        except DeviceTimeoutError as error:
            _LOG.debug("%s", error)
        except DeviceError as error:
            raise AdapterError(f"copying it to the device failed: {error}") from error
        raise AdapterError("copying it to the device failed, with what was copied before it")

    def cancel(self) -> None:
        """Give the reference back once nothing is copied any more.

        It is kept if the copies do not come to their end: they read what it protects.
        """
        if any(group.is_enqueued and not self._is_there(group) for group in self._groups):
            assert self._lane is not None
            try:
                self._copier.device.synchronize(self._lane.stream, timeout_s=_CANCEL_TIMEOUT_S)
            except DeviceTimeoutError as error:
                _LOG.error("an adapter that nobody waits for keeps its host memory: %s", error)
                return
            except DeviceError as error:
                _LOG.debug("a copy that nobody waits for has failed: %s", error)
        self._let_go()

    def _place(self) -> None:
        """Decide where every matrix goes."""
        copier = self._copier
        assert self._lane is not None
        found = [
            copier.layout.matrices_in(place, part)
            for place, part in zip(self._host.places, self._host.parts, strict=True)
        ]
        for place, part in zip(self._host.places, self._host.parts, strict=True):
            region = read_header(part.numpy().data)
            key = (place.layer, place.input_group)
            self._regions[key] = PlacedRegion(place.offset, region)
        if copier.wanted is PACKED:
            self._memory = copier.empty(self._lane, sum(p.numel() for p in self._host.parts))
            self._place_packed(found)
        else:
            num_bytes = sum(self._rows_bytes(one) for group in found for one in group)
            self._memory = copier.empty(self._lane, num_bytes)
            self._place_rows(found)
        self._adapter = DeviceAdapter(
            {one.target.index: packed for copies in self._copies for one, packed in copies}
        )

    def _place_packed(self, found: Sequence[Sequence[TargetMatrices]]) -> None:
        """The regions as they are."""
        assert self._memory is not None
        position = 0
        ends = []
        for part, matrices in zip(self._host.parts, found, strict=True):
            span = self._memory[position : position + part.numel()]
            position += part.numel()
            ends.append(position)
            self._spans.append(span)
            self._copies.append([(one, self._copier.layout.views(one, span)) for one in matrices])
        self._share_memory(ends)

    def _place_rows(self, found: Sequence[Sequence[TargetMatrices]]) -> None:
        """Plain rows, matrix after matrix."""
        assert self._memory is not None
        position = 0
        ends = []
        for matrices in found:
            copies = []
            for one in matrices:
                num_bytes = self._rows_bytes(one)
                rows = self._rows(one, self._memory[position : position + num_bytes])
                position += num_bytes
                copies.append((one, rows))
            ends.append(position)
            self._copies.append(copies)
        self._share_memory(ends)

    def _share_memory(self, ends: Sequence[int]) -> None:
        """Name each layer group's part; ``ends``: where each region's ends. They are in order."""
        assert self._memory is not None
        start = 0
        for group in self._groups:
            end = ends[group.parts[-1]] if group.parts else start
            group.memory = self._memory[start:end]
            start = end

    def _enqueue(self, group: _LayerGroup) -> None:
        """Copy the regions of a layer group and record its event, whatever comes of it."""
        device, lane, event = self._copier.device, self._lane, group.event
        assert lane is not None and event is not None

        def arrive() -> None:
            group.has_arrived = True

        try:
            for index in group.parts:
                if self._copier.wanted is PACKED:
                    self._copier.copy(lane, self._spans[index], self._host.parts[index])
                else:
                    self._copy_as_rows(index, group)
            # Left out if anything before it has failed.
            device.launch(lane.stream, arrive)
        except Exception as error:  # fails this adapter, when those before it are copied
            _LOG.exception("layers of an adapter cannot be copied")
            self._error = error
        device.record(lane.stream, event)
        group.is_enqueued = True

    def _bring(self, number: int) -> bool:
        """Let a layer group be enqueued, when its files have been read; False if they are late."""
        group = self._groups[number]
        if not group.is_enqueued:
            self._host.wait_whole(_num_regions(group), _READ_TIMEOUT_S)
            self.enqueue_all()
        self._is_late |= not group.is_enqueued
        return group.is_enqueued

    def _is_there(self, group: _LayerGroup) -> bool:
        """Whether the stream has come past its copies."""
        return group.event is not None and self._copier.device.is_done(group.event)

    def _may_enqueue(self, group: _LayerGroup) -> bool:
        """Not when the rest will never come: who hears of that looks for the end of the copies."""
        return self._is_on_host(group) and self._host.error is None

    def _is_on_host(self, group: _LayerGroup) -> bool:
        """Whether its regions hold what was registered."""
        return self._host.num_whole >= _num_regions(group)

    def _copy_as_rows(self, index: int, group: _LayerGroup) -> None:
        """One region into the lane's buffer, and from there to rows."""
        copier, lane, memory = self._copier, self._lane, group.memory
        assert lane is not None and memory is not None
        part = self._host.parts[index]
        buffer = copier.staging(lane, max(part.numel() for part in self._host.parts))
        packed = buffer[: part.numel()]
        copier.copy(lane, packed, part)
        for one, rows in self._copies[index]:
            views = copier.layout.views(one, packed)

            def unpack(views: PackedLora = views, rows: PackedLora = rows) -> None:
                rows.a.copy_(unpack_a(views.a, *rows.a.shape))
                rows.b.copy_(unpack_b(views.b, *rows.b.shape))

            copier.device.launch(lane.stream, unpack, reads=(buffer,), writes=(memory,))

    def _let_go(self) -> None:
        for group in self._groups:
            if group.event is not None:
                self._copier.device.release_event(group.event)
        self._host.release()

    def _rows_bytes(self, one: TargetMatrices) -> int:
        dtype = self._copier.layout.dtype
        widths = (one.target.in_features, one.target.out_features)
        return sum(row_bytes(one.rank, width, dtype) for width in widths)

    def _rows(self, one: TargetMatrices, memory: torch.Tensor) -> PackedLora:
        """Room for A and B as rows in ``memory``."""
        dtype, target = self._copier.layout.dtype, one.target
        b_offset = row_bytes(one.rank, target.in_features, dtype)
        a_bytes = one.rank * target.in_features * dtype.itemsize
        b_bytes = one.rank * target.out_features * dtype.itemsize
        return PackedLora(
            a=memory[:a_bytes].view(dtype).view(one.rank, target.in_features),
            b=memory[b_offset : b_offset + b_bytes].view(dtype).view(target.out_features, one.rank),
            rank=one.rank,
            scaling=one.scaling,
        )
