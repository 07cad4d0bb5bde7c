"""How an adapter gets from the arena to where the kernels read it: in place, or by copies.

On a CPU without a link the kernels read the arena itself. Otherwise its regions are copied one by
one, first layer first, on a stream of their own; layers form groups with an event each, so that
the first layers can be used before the last are there. Workers on the host compute from the same
regions, so these are always packed for them; where the device's kernels want plain rows, each
region goes through one buffer on the device and is unpacked from there, which costs some of the
device's bandwidth and neither the link's nor a second copy on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..runtime.errors import AdapterError
from ..shm.region import ALIGNMENT_BYTES, read_header
from .adapter_store import HostAdapter
from .coexec.cold_deltas import Arrival, GroupKey
from .coexec.gateway import PlacedRegion
from .device.base import DeviceError, Event, Stream
from .device.host_memory import TorchDevice
from .lora.adapter_layout import AdapterLayout, GroupPlan, TargetMatrices
from .lora.base import PackedLora
from .lora.matrix_layout import PACKED, MatrixLayout, unpack_a, unpack_b
from .lora.table import DeviceAdapter

_ERROR_TIMEOUT_S = 5.0
# Demand loads that share the link at the same time; more follow each other.
_NUM_LOAD_STREAMS = 3
# A copy holds the copy engine up no longer than this many bytes take: activations pass between.
_CHUNK_BYTES = 4 << 20


class InPlace:
    """An adapter that is where it is needed; see ``adapter_loader.Arrival``."""

    def __init__(self, host: HostAdapter, layout: AdapterLayout) -> None:
        """The kernels read ``host`` until the adapter is evicted."""
        self._host = host
        self._layout = layout

    def start(self, *, is_gradual: bool) -> None:
        """Nothing is copied."""

    def is_done(self) -> bool:
        """From the start."""
        return True

    def num_arrived(self) -> int:
        """One group, of all layers."""
        return 1

    def advance(self) -> None:
        """Nothing is left to enqueue."""

    def finish(self) -> DeviceAdapter:
        """Views of the arena, which keep the reference until the adapter is released."""
        host, targets = self._host, {}
        for place, part in zip(host.places, host.parts, strict=True):
            for found in self._layout.matrices_in(place, part):
                targets[found.target.index] = self._layout.views(found, part)
        return DeviceAdapter(targets, release=host.release)

    def cancel(self) -> None:
        """Give the reference back."""
        self._host.release()


class AdapterCopier:
    """Where and how adapters are copied; its calls belong to the thread that owns the device."""

    def __init__(
        self, device: TorchDevice, where: torch.device, layout: AdapterLayout, wanted: MatrixLayout
    ) -> None:
        """``layout``: of the arena, packed; ``wanted``: how the device's kernels read matrices."""
        assert layout.matrices is PACKED, layout.matrices.name
        self.device = device
        self.layout = layout
        self.wanted = wanted
        self._where = where
        self._lanes = [_Lane(device.stream(f"load {n}")) for n in range(_NUM_LOAD_STREAMS)]
        self._prefetch_lane = _Lane(device.stream("prefetch"))
        self._num_taken = 0

    def take_lane(self, *, is_prefetch: bool) -> "_Lane":
        """The stream for one more load: demand loads take turns, so that they share the link."""
        if is_prefetch:
            return self._prefetch_lane
        self._num_taken += 1
        return self._lanes[self._num_taken % len(self._lanes)]

    def device_bytes(self, plans: Sequence[GroupPlan]) -> int:
        """What an adapter takes on the device."""
        if self.wanted is PACKED:
            return sum(plan.region.num_bytes for plan in plans)
        loras = [lora for plan in plans for lora in plan.loras if lora is not None]
        return sum(
            _row_bytes(lora.rank, width, self.layout.dtype)
            for lora in loras
            for width in (lora.target.in_features, lora.target.out_features)
        )

    def empty(self, lane: "_Lane", num_bytes: int) -> torch.Tensor:
        """Memory of the device, uint8, that the lane's stream may write at once.

        torch keeps CUDA memory per stream: what another one gave back may still be read there.
        """
        made: list[torch.Tensor] = []

        def allocate() -> None:
            made.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._where))

        if self._where.type == "cuda":
            self.device.launch(lane.stream, allocate)
        else:
            allocate()
        return made[0]

    def staging(self, lane: "_Lane", num_bytes: int) -> torch.Tensor:
        """The buffer that packed regions go through, used in the stream's order.

        Whoever enqueues its use holds it: a larger one may take its place.
        """
        if lane.staging is None or lane.staging.numel() < num_bytes:
            lane.staging = self.empty(lane, num_bytes)
        return lane.staging

    def copy(self, lane: "_Lane", destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the bytes of one region, in chunks."""
        for start in range(0, source.numel(), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            self.device.copy(lane.stream, destination[start:end], source[start:end])


@dataclass(slots=True, eq=False)
class _Lane:
    """A stream for loads, and the buffer of those that go through one."""

    stream: Stream
    staging: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _LayerGroup:
    """Regions of neighbouring layers, by their place in the host's list."""

    parts: list[int] = field(default_factory=list)
    event: Event | None = None  # None = not enqueued yet
    has_arrived: bool = False  # all copies were made; False behind the event = one has failed


class Copied:
    """An adapter that is copied; see ``adapter_loader.Arrival`` and ``coexec.ArrivingAdapter``."""

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
        self._lane: _Lane | None = None
        self._memory: torch.Tensor | None = None
        self._copies: list[list[tuple[TargetMatrices, PackedLora]]] = []  # by region
        self._spans: list[torch.Tensor] = []  # by region, where packed ones are wanted
        self._adapter = DeviceAdapter({})
        self._regions: dict[GroupKey, PlacedRegion] = {}

    @property
    def adapter(self) -> DeviceAdapter:
        """The matrices where they will be, after ``start``."""
        return self._adapter

    def start(self, *, is_gradual: bool) -> None:
        """Take memory and enqueue the copies of all layer groups, or of the first.

        Raises ``DeviceError``, or what a full device raises.
        """
        self._lane = self._copier.take_lane(is_prefetch=is_gradual)
        self._place()
        if is_gradual:
            self.advance()
        else:
            self.enqueue_all()

    def advance(self) -> None:
        """Enqueue the next layer group, if the last one has arrived and one is left."""
        waiting = [group for group in self._groups if group.event is None]
        is_busy = any(
            group.event is not None and not self._copier.device.is_done(group.event)
            for group in self._groups
        )
        if waiting and not is_busy:
            self._enqueue(waiting[0])

    def enqueue_all(self) -> None:
        """Enqueue every layer group that is not yet."""
        for group in self._groups:
            if group.event is None:
                self._enqueue(group)

    def is_done(self) -> bool:
        """Whether the stream has come past the last copy."""
        last = self._groups[-1].event
        return last is not None and self._copier.device.is_done(last)

    def num_arrived(self) -> int:
        """Layer groups, from the first on, that have been copied."""
        for number, group in enumerate(self._groups):
            if group.event is None or not self._copier.device.is_done(group.event):
                return number
        return len(self._groups)

    def has_failed(self) -> bool:
        """Whether a copy is known to have failed: what was computed with it is void."""
        return any(
            group.event is not None
            and self._copier.device.is_done(group.event)
            and not group.has_arrived
            for group in self._groups
        )

    def arrival(self, layer: int) -> Arrival | None:
        """See ``coexec.ArrivingAdapter``. All layer groups must be enqueued."""
        group = self._groups[self._group_of_layer[layer]]
        assert group.event is not None and self._memory is not None, "not enqueued"
        if self._copier.device.is_done(group.event):
            return None
        return Arrival(group.event, self._memory)

    def region(self, key: GroupKey) -> PlacedRegion | None:
        """See ``coexec.ColdAdapter``."""
        return self._regions.get(key)

    def finish(self) -> DeviceAdapter:
        """Give the host's reference back. Raises ``AdapterError`` if a copy has failed."""
        is_whole = all(group.has_arrived for group in self._groups)
        self._let_go()
        if is_whole:
            return self._adapter
        assert self._lane is not None
        try:
            self._copier.device.synchronize(self._lane.stream, timeout_s=_ERROR_TIMEOUT_S)
        except DeviceError as error:
            raise AdapterError(f"copying it to the device failed: {error}") from error
        raise AdapterError("copying it to the device failed, with what was copied before it")

    def cancel(self) -> None:
        """Give the reference back once nothing is copied any more."""
        enqueued = [group.event for group in self._groups if group.event is not None]
        if enqueued and not self._copier.device.is_done(enqueued[-1]):
            assert self._lane is not None
            self._copier.device.synchronize(self._lane.stream, timeout_s=_ERROR_TIMEOUT_S)
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
        for part, matrices in zip(self._host.parts, found, strict=True):
            span = self._memory[position : position + part.numel()]
            position += part.numel()
            self._spans.append(span)
            self._copies.append([(one, self._copier.layout.views(one, span)) for one in matrices])

    def _place_rows(self, found: Sequence[Sequence[TargetMatrices]]) -> None:
        """Plain rows, matrix after matrix."""
        assert self._memory is not None
        position = 0
        for matrices in found:
            copies = []
            for one in matrices:
                num_bytes = self._rows_bytes(one)
                rows = self._rows(one, self._memory[position : position + num_bytes])
                position += num_bytes
                copies.append((one, rows))
            self._copies.append(copies)

    def _enqueue(self, group: _LayerGroup) -> None:
        """Copy the regions of a layer group and record its event."""
        device, lane = self._copier.device, self._lane
        assert lane is not None
        event = device.event()

        def arrive() -> None:
            group.has_arrived = True

        try:
            for index in group.parts:
                if self._copier.wanted is PACKED:
                    self._copier.copy(lane, self._spans[index], self._host.parts[index])
                else:
                    self._copy_as_rows(index)
            # Left out if anything before it has failed.
            device.launch(lane.stream, arrive)
        finally:
            device.record(lane.stream, event)
            group.event = event

    def _copy_as_rows(self, index: int) -> None:
        """One region into the lane's buffer, and from there to rows."""
        copier, lane, memory = self._copier, self._lane, self._memory
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
        return sum(_row_bytes(one.rank, width, dtype) for width in widths)

    def _rows(self, one: TargetMatrices, memory: torch.Tensor) -> PackedLora:
        """Room for A and B as rows in ``memory``."""
        dtype, target = self._copier.layout.dtype, one.target
        b_offset = _row_bytes(one.rank, target.in_features, dtype)
        a_bytes = one.rank * target.in_features * dtype.itemsize
        b_bytes = one.rank * target.out_features * dtype.itemsize
        return PackedLora(
            a=memory[:a_bytes].view(dtype).view(one.rank, target.in_features),
            b=memory[b_offset : b_offset + b_bytes].view(dtype).view(target.out_features, one.rank),
            rank=one.rank,
            scaling=one.scaling,
        )


def _row_bytes(rank: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of one matrix as rows, rounded up so that the next one is aligned."""
    num_bytes = rank * width * dtype.itemsize
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
