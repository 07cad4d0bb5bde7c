"""Moves an adapter from the arena to the device, region by region, or lets it be read in place.

Copies run on their own stream, first layer first. Layers form groups with one event each, so the
first layers can be used before the last have arrived. CPU workers compute from the same regions,
so regions are always packed for them. Where the device's kernels want plain rows, each region is
copied to one staging buffer on the device and unpacked from there. This costs device bandwidth, but
neither link bandwidth nor a second copy on the host.

An adapter's files can be read while it is copied: a layer group is copied once its regions are
whole. A pass that needs a layer earlier waits for the files, for a limited time.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ...runtime.errors import AdapterUnavailableError
from ..coexec.cold_deltas import Arrival
from ..coexec.gateway import PlacedGroup
from ..device.base import DeviceError, DeviceTimeoutError, Event
from ..lora.adapter_layout import AdapterLayout
from ..lora.table import DeviceAdapter
from .copier import AdapterCopier, DeviceLayout, Lane, LayerSpan, PlacedMatrices, unpack_target
from .store import HostAdapter

_LOG = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 5.0
# A stream skips everything behind a failure, so it ends at once. If it does not end, the failure
# was already reported, and copies of other adapters are running.
_FAILED = "copying it to the device failed"
_FAILURE_TIMEOUT_S = 0.05
# A pass starts when its layers are expected in time. A layer that is later than this must not
# delay the other rows of the pass.
_READ_TIMEOUT_S = 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    """The number of layer groups that are on the host, and how long it took to read them."""

    num_groups: int
    duration_s: float


class AdapterLoad(Protocol):
    """An adapter on its way from the host to the device."""

    def start(self, *, is_gradual: bool, runs: Sequence[range] = ()) -> None:
        """Allocate memory; enqueue the first layers if ``is_gradual``, else none yet. Called once.

        ``runs``: the adapter's pages, if the device has pages.
        Called by the engine's thread, like all but ``read``, ``is_done`` and ``num_arrived``.
        """

    def read(self, on_progress: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Read the files, if necessary; calls ``on_progress`` when there is more to enqueue.

        Called once, by the fetching thread. Errors are raised by ``finish`` instead.
        """

    def is_read(self) -> bool:
        """Whether reading has ended, successfully or not; also after ``cancel``."""

    def reading(self) -> Reading | None:
        """How far its files have been read; None if the planner does not use this."""

    def advance(self) -> None:
        """Enqueue the next layers if they are on the host and those before have arrived."""

    def enqueue_all(self) -> None:
        """Enqueue all layers that are on the host and not enqueued yet."""

    def is_copying(self) -> bool:
        """Whether copies are enqueued that have not ended."""

    def num_arrived(self) -> int:
        """Layer groups, from the first on, that are on the device. Any thread, as ``is_done``."""

    def is_done(self) -> bool:
        """Whether it has arrived, or failed to. Called between ``start`` and ``finish``."""

    def finish(self) -> DeviceAdapter:
        """Return the adapter. Called once, when done; raises ``CorunError`` if the load failed."""

    def cancel(self) -> None:
        """Release the host's copy and stop reading; instead of ``finish``."""


@dataclass(slots=True, eq=False)
class _LayerGroup:
    """Neighbouring layers with regions that are copied together."""

    span: LayerSpan
    event: Event | None = None  # recorded after its copies; None = not placed yet
    memory: tuple[torch.Tensor, ...] = ()  # on the device, once placed
    is_enqueued: bool = False
    has_arrived: bool = False  # all copies are done; False after the event = one failed


def _release(copier: AdapterCopier, groups: Sequence[_LayerGroup], memories: Sequence[torch.Tensor]) -> None:
    """Called when an adapter has left the device. After a failure its copies may be late."""
    if all(group.has_arrived for group in groups):
        copier.keep(memories)


class Copied:
    """An adapter that is copied to the device; see also ``coexec.ArrivingAdapter``."""

    def __init__(self, host: HostAdapter, copier: AdapterCopier, placement: DeviceLayout) -> None:
        """Read ``host`` until the copies are done."""
        self._host = host
        self._copier = copier
        self._placement = placement
        self._groups = [_LayerGroup(span) for span in placement.layer_spans]
        self._lane: Lane | None = None
        self._memories: tuple[torch.Tensor, ...] = ()  # of its runs, after ``start``
        self._adapter = DeviceAdapter({})
        self._error: Exception | None = None
        self._is_late = False  # a pass continued without a layer
        offsets = (place.offset for place in host.places)
        self.groups = tuple(map(PlacedGroup, placement.keys, offsets, placement.shapes))
        """Where its matrices are in the arena; see ``coexec.ColdAdapter``."""

    @property
    def adapter(self) -> DeviceAdapter:
        """The matrices at their device addresses, after ``start``."""
        return self._adapter

    def start(self, *, is_gradual: bool, runs: Sequence[range] = ()) -> None:
        """Allocate memory, and enqueue the first layer group of a gradual load.

        Raises the error of a full device, with nothing enqueued. Copies that cannot be enqueued
        are reported by ``finish``.
        """
        self._lane = self._copier.take_lane(is_prefetch=is_gradual)
        self._copier.await_readers(self._lane)
        placement = self._placement
        self._memories = memories = self._copier.memories(placement.num_bytes, runs)
        self._adapter = DeviceAdapter(
            PlacedMatrices(placement, memories),
            partial(_release, self._copier, self._groups, memories),
            placement.entries(memories),
        )
        for group in self._groups:
            group.event = self._copier.device.event()
            group.memory = tuple(memories[run][first:end] for run, first, end in group.span.stretches)
        if is_gradual:
            self.advance()

    def is_copying(self) -> bool:
        enqueued = [group for group in self._groups if group.is_enqueued]
        return bool(enqueued) and not self._is_copied(enqueued[-1])  # they end in order

    def advance(self) -> None:
        for group in self._groups:
            if not group.is_enqueued:
                if self._may_enqueue(group):
                    self._enqueue(group)
                return
            if not self._is_copied(group):
                return

    def enqueue_all(self) -> None:
        for group in self._groups:
            if not group.is_enqueued:
                if not self._may_enqueue(group):
                    return
                self._enqueue(group)

    def read(self, on_progress: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        self._host.read(on_progress, is_wanted)

    def is_read(self) -> bool:
        return self._host.is_read

    def reading(self) -> Reading | None:
        if self._host.read_s is None:
            return None
        num_groups = sum(self._is_on_host(group) for group in self._groups)
        return Reading(num_groups, self._host.read_s)

    def is_done(self) -> bool:
        if not self._host.is_read:
            return False
        if self._host.error is None:
            return self._is_copied(self._groups[-1])
        return all(self._is_copied(group) for group in self._groups if group.is_enqueued)

    def num_arrived(self) -> int:
        for number, group in enumerate(self._groups):
            if not self._is_copied(group):
                return number
        return len(self._groups)

    def begin_pass(self) -> int:
        """Called when a pass is about to use it; returns how many first layers are on the host."""
        self._is_late = False
        if self._host.read_s is None:
            return len(self._placement.group_of_layer)
        self.enqueue_all()
        num_whole = self._host.num_whole
        if num_whole == len(self._host.places):
            return len(self._placement.group_of_layer)
        return self._host.places[num_whole].layer

    def await_read(self, layer: int) -> None:
        """See ``coexec.ArrivingAdapter``."""
        self._await_regions(bisect_right(self._host.places, layer, key=lambda place: place.layer))

    def has_failed(self) -> bool:
        """Whether a layer group has failed; results computed with it are void.

        Waits for the digest of the files if they are read to the end, so that the first token comes
        with it.
        """
        if self._host.num_whole == len(self._host.places) and not self._host.is_read:
            self._host.wait_read(_READ_TIMEOUT_S)
        return self._is_late or any(
            self._is_copied(group) and not group.has_arrived for group in self._groups
        )

    def arrival(self, layer: int) -> Arrival | None:
        """See ``coexec.ArrivingAdapter``."""
        group = self._groups[self._placement.group_of_layer[layer]]
        assert group.event is not None, "not started"
        if self._is_copied(group):
            return None
        return Arrival(group.event, group.memory, partial(self._enqueue_read, group))

    def finish(self) -> DeviceAdapter:
        """Release the reference to the host's copy.

        Raises ``AdapterUnavailableError`` if a copy failed, or the error of reading its files.
        """
        is_whole = all(group.has_arrived for group in self._groups)
        self._release_host()
        if is_whole:
            return self._adapter
        if self._host.error is not None:
            raise self._host.error
        if self._error is not None:
            raise AdapterUnavailableError(f"{_FAILED}: {self._error}") from self._error
        assert self._lane is not None
        try:
            self._copier.device.synchronize(self._lane.stream, timeout_s=_FAILURE_TIMEOUT_S)
        except DeviceTimeoutError as error:
            _LOG.debug("%s", error)
        except DeviceError as error:
            raise AdapterUnavailableError(f"{_FAILED}: {error}") from error
        raise AdapterUnavailableError(f"{_FAILED}: an earlier copy on the same stream failed")

    def cancel(self) -> None:
        """Release the reference once no copy is running.

        If the copies do not end in time the reference is kept, because they read its memory.
        """
        if self.is_copying():
            assert self._lane is not None
            try:
                self._copier.device.synchronize(self._lane.stream, timeout_s=_CANCEL_TIMEOUT_S)
            except DeviceTimeoutError as error:
                _LOG.error("cancelled load still copies; its host memory stays in use: %s", error)
                return
            except DeviceError as error:
                _LOG.debug("copy of a cancelled adapter load failed: %s", error)
        self._release_host()

    def _enqueue(self, group: _LayerGroup) -> None:
        """Copy the regions of a layer group and record its event, also after an error."""
        device, lane, event = self._copier.device, self._lane, group.event
        assert lane is not None and event is not None

        def arrive() -> None:
            group.has_arrived = True

        try:
            if self._placement.is_packed:
                self._copy_regions(group)
            else:
                for region in range(group.span.first, group.span.end):
                    self._copy_as_rows(region, group)
            # Skipped if an earlier operation of the stream failed.
            device.launch(lane.stream, arrive)
        except Exception as error:  # fails this adapter once the earlier groups are copied
            _LOG.exception("could not copy layers of an adapter; its load fails")
            self._error = error
        device.record(lane.stream, event)
        group.is_enqueued = True

    def _enqueue_read(self, group: _LayerGroup) -> bool:
        """Enqueue a layer group once its files are read; False if they are late."""
        if not group.is_enqueued:
            self._await_regions(group.span.end)
        self._is_late |= not group.is_enqueued
        return group.is_enqueued

    def _await_regions(self, num_regions: int) -> None:
        """Wait until they are whole, and copy them. A pass that has been late waits no more."""
        self._is_late = self._is_late or not self._host.wait_whole(num_regions, _READ_TIMEOUT_S)
        self.enqueue_all()

    def _is_copied(self, group: _LayerGroup) -> bool:
        """Whether the stream has completed its copies."""
        return group.event is not None and self._copier.device.is_done(group.event)

    def _may_enqueue(self, group: _LayerGroup) -> bool:
        """False if the rest cannot be read: on that error the caller waits for the copies' end."""
        return self._is_on_host(group) and self._host.error is None

    def _is_on_host(self, group: _LayerGroup) -> bool:
        """Whether its regions are whole on the host."""
        return self._host.num_whole >= group.span.end

    def _copy_regions(self, group: _LayerGroup) -> None:
        """Copy regions as they are; those adjacent in the arena in one copy."""
        assert self._lane is not None
        (memory,) = self._memories
        places, first = self._host.places, group.span.first
        for region in range(first + 1, group.span.end + 1):
            before = places[region - 1]
            follows = region < group.span.end and places[region].offset == before.offset + before.num_bytes
            if not follows:
                start = self._placement.start_bytes(first)
                source = self._host.bytes_of(first, region)
                self._copier.copy(self._lane, memory[start : start + source.numel()], source)
                first = region

    def _copy_as_rows(self, region: int, group: _LayerGroup) -> None:
        """Copy one region to the lane's buffer, and unpack it to rows."""
        copier, lane, placement, memories = self._copier, self._lane, self._placement, self._memories
        assert lane is not None
        part = self._host.bytes_of(region, region + 1)
        buffer = copier.staging(lane, placement.max_matrix_bytes)
        packed = buffer[: placement.matrix_bytes[region]]
        copier.copy(lane, packed, part[: packed.numel()])
        for one in placement.matrices[region]:
            if one.num_rows:
                of_tokens = placement.own_rows(one, memories)
                source = part[one.rows_offset :][: of_tokens.numel()]
                copier.copy(lane, of_tokens, source)
            if not one.rank:
                continue
            views = copier.layout.views(one.without_rows, packed)
            rows = placement.views(one.target.index, memories)
            to_rows = partial(unpack_target, views, rows)
            copier.device.launch(lane.stream, to_rows, reads=(buffer,), writes=group.memory)

    def _release_host(self) -> None:
        for group in self._groups:
            if group.event is not None:
                self._copier.device.release_event(group.event)
        self._host.release()


class InPlace:
    """An adapter that kernels read in the arena: on a CPU without a link."""

    def __init__(self, host: HostAdapter, layout: AdapterLayout) -> None:
        """Kernels read ``host`` until the adapter is evicted."""
        self._host = host
        self._layout = layout

    def start(self, *, is_gradual: bool, runs: Sequence[range] = ()) -> None:
        """Nothing is copied."""

    def is_copying(self) -> bool:
        return False

    def read(self, on_progress: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        self._host.read(on_progress, is_wanted)

    def is_read(self) -> bool:
        return self._host.is_read

    def reading(self) -> Reading | None:
        """None: the planner does not use it here."""
        return None

    def is_done(self) -> bool:
        return self._host.is_read

    def num_arrived(self) -> int:
        """One group, of all layers."""
        return int(self._host.is_read)

    def advance(self) -> None:
        """Do nothing: there are no copies."""

    def enqueue_all(self) -> None:
        """Do nothing: there are no copies."""

    def finish(self) -> DeviceAdapter:
        """Return views of the arena, which hold the reference until the adapter is released.

        Raises ``CorunError`` if its files could not be read.
        """
        if self._host.error is not None:
            self._host.release()
            raise self._host.error
        host, targets = self._host, {}
        for region, place in enumerate(host.places):
            part = host.bytes_of(region, region + 1)
            for found in self._layout.matrices_in(place, part):
                targets[found.target.index] = self._layout.views(found, part)
        return DeviceAdapter(targets, release=host.release)

    def cancel(self) -> None:
        self._host.release()
