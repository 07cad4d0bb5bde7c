"""Adapters on the host: read once, digested while they are read, and stored packed in the arena.

Combines the arena, which manages memory, with readers of adapter directories and with the layout of
matrices. On a CPU without a link the arena is also the device's memory; otherwise loads copy from
it. Knows nothing of requests or of the device.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...runtime.adapters.digest import ContentDigest
from ...runtime.adapters.resolved import (
    AdapterPath,
    AdapterReader,
    FileHeader,
    ResolvedAdapter,
    StoredTensor,
    TakeTensors,
)
from ...runtime.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterUnavailableError,
    CorunError,
    ResourceError,
)
from ...runtime.memory.host_budget import HostSections
from ...runtime.plan import HostPlace, HostPlaceId
from ...shm.arena import ArenaEntry, HostArena, extent_sizes
from ...shm.errors import ShmError
from ...shm.region import header_bytes
from ..device.host_memory import TorchDevice
from ..lora.adapter_layout import AdapterLayout, GroupPlan, RegionWriter

_LOG = logging.getLogger(__name__)


class AdapterReading:
    """Reads one adapter, layer by layer. ``run`` must be called, and ends it."""

    def __init__(
        self,
        source: AdapterReader,
        writer: RegionWriter,
        arena: HostArena,
        entry: ArenaEntry,
        on_read: Callable[[ContentDigest | CorunError], None],
        staged: "_StagedLayers | None" = None,
    ) -> None:
        """Takes ownership of ``source`` and of the filler's reference to ``entry``.

        ``on_read`` is called once before the end: with the digest, or with the error. ``staged``:
        what ``writer`` writes to; None = the arena.
        """
        self._source = source
        self._writer = writer
        self._arena = arena
        self._entry = entry
        self._on_read = on_read
        self._staged = staged
        self._region_ends = _region_ends([region.layer for region in entry.regions])
        self._is_wanted = True
        self._num_regions = 0
        self._read_s = 0.0
        self._error: CorunError | None = None
        self._is_over = False
        self._changed = threading.Condition()

    @property
    def num_regions(self) -> int:
        """Regions, from the first on, that are whole and may be used; never decreases."""
        return self._num_regions

    @property
    def read_s(self) -> float:
        """How long it took to read the whole regions."""
        return self._read_s

    @property
    def error(self) -> CorunError | None:
        """Why the other regions will never be whole; None while they may be, or once they are."""
        return self._error

    @property
    def is_over(self) -> bool:
        """Whether no more regions will become whole."""
        return self._is_over

    def run(self, on_layer: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Read to the end. Called by one thread, once; errors are returned by ``error``.

        ``on_layer`` is called whenever more regions are whole, and at the end. ``is_wanted`` is
        called before some tensors are written and says whether to continue.
        """

        def take(tensors: Sequence[StoredTensor]) -> None:
            if not (self._is_wanted and is_wanted()):
                raise AdapterUnavailableError("the load was cancelled")
            self._writer.write(tensors)

        begin_s = time.monotonic()
        try:
            with self._source:
                for layer in self._source.read_layers(take):
                    if self._staged is not None:
                        self._staged.store(layer)
                    self._advance(self._region_ends[layer], time.monotonic() - begin_s)
                    on_layer()  # may read files of other adapters
                    begin_s = time.monotonic()
                assert not self._writer.missing, self._writer.missing
                self._on_read(self._source.digest)
        except CorunError as error:
            self._end(error)
        except ShmError as error:
            self._end(ResourceError(f"its layers cannot be stored: {error}"))
        except Exception as error:  # a bug fails one adapter, not the thread
            _LOG.exception("reading an adapter's files failed; its load fails")
            self._end(AdapterUnavailableError(f"{type(error).__name__}: {error}"))
        else:
            self._end(None)
        on_layer()

    def stop(self) -> None:
        """Cancel: ``run`` ends at the next tensors."""
        self._is_wanted = False

    def wait(self, num_regions: int, timeout_s: float) -> bool:
        """Wait until this many regions are whole; False if they cannot be, or on time-out."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_regions >= num_regions or self._is_over, timeout_s)
            return self._num_regions >= num_regions

    def wait_over(self, timeout_s: float) -> None:
        """Wait until no more regions will become whole, for a limited time."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, timeout_s)

    def _advance(self, num_regions: int, duration_s: float) -> None:
        with self._changed:
            self._read_s += duration_s
            self._num_regions = num_regions
            self._changed.notify_all()

    def _end(self, error: CorunError | None) -> None:
        """Release the filler's reference, and wake all waiting threads."""
        self._arena.release(self._entry)
        if error is not None:
            self._on_read(error)
        with self._changed:
            self._error = error
            self._is_over = True
            self._changed.notify_all()


class _StagedLayers:
    """Memory in which one layer at a time is packed, and is then written to its place in the arena.

    To write allocates memory; to allocate and map it, and to write through the mapping, takes half
    as long again.
    """

    def __init__(self, arena: HostArena, entry: ArenaEntry, plans: Sequence[GroupPlan]) -> None:
        """Write the headers, which workers read while they wait for values. Raises ``ShmError``."""
        self._arena = arena
        self._entry = entry
        memory = torch.empty(max(size for _, size in entry.extents), dtype=torch.uint8)
        self._bytes: memoryview = memory.numpy().data
        self._spans: dict[int, tuple[int, int]] = {}  # in the arena, by layer
        self._headers: dict[int, list[tuple[int, bytes]]] = {}  # with their places, by layer
        self.parts: list[torch.Tensor] = []  # of all regions; those of a layer begin at its first byte
        for region, plan in zip(entry.regions, plans, strict=True):
            start, _ = self._spans.get(region.layer, (region.offset, 0))
            end = region.offset + region.num_bytes
            self._spans[region.layer] = start, end
            self.parts.append(memory[region.offset - start : end - start])
            header = header_bytes(plan.region)
            self._headers.setdefault(region.layer, []).append((region.offset - start, header))
            arena.write(entry, region.offset, memoryview(header))

    def store(self, layer: int) -> None:
        """Write a layer to the arena, after all of its parts have been packed. Raises ``ShmError``."""
        start, end = self._spans[layer]
        for first, header in self._headers[layer]:  # other layers have been here
            self._bytes[first : first + len(header)] = header
        self._arena.write(self._entry, start, self._bytes[: end - start])


def _region_ends(layers: Sequence[int]) -> dict[int, int]:
    """By layer: the number of regions up to its last one."""
    return {layer: number for number, layer in enumerate(layers, start=1)}


# Opens a PEFT directory, or those of a mix; raises ``AdapterError``.
OpenSource = Callable[[AdapterPath], AdapterReader]
# Called with the digest of an adapter whose values had not been read, and with that of its content,
# hexadecimal, or with the error: of bad files, or ``AdapterChangedError``. By the thread that reads.
OnFirstRead = Callable[[str, str | CorunError], None]
# Returns a place for an adapter with these bytes per layer, in whole pages; None = no room.
MakeRoom = Callable[[Sequence[int]], HostPlace | None]


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """Facts of an adapter once it has been read, or begun."""

    digest: str  # of its content; begun: stands for it
    rank: int  # the largest of its targets
    plans: tuple[GroupPlan, ...]
    host_bytes: tuple[int, ...]  # in the arena, by layer
    left_out: tuple[str, ...]  # phrases: parts of its file that change no text answer, and why
    is_kept: bool  # stored in the place reserved for it


class HostAdapter:
    """One adapter in the arena, or being read into it; referenced until ``release``."""

    def __init__(
        self, arena: HostArena, entry: ArenaEntry, memory: torch.Tensor, reading: AdapterReading | None = None
    ) -> None:
        """``memory``: the arena's bytes, uint8. ``reading``: what fills the entry, if anything."""
        self._arena = arena
        self._entry = entry
        self.places = entry.regions
        self._memory: torch.Tensor | None = memory
        self._reading = reading
        self._is_released = False

    def bytes_of(self, first: int, end: int) -> torch.Tensor:
        """Regions [first, end), adjacent in the arena, uint8; only before ``release``."""
        assert self._memory is not None, "released"
        last = self.places[end - 1]
        return self._memory[self.places[first].offset : last.offset + last.num_bytes]

    @property
    def num_whole(self) -> int:
        """Regions, from the first on, that may be read; never decreases."""
        return len(self.places) if self._reading is None else self._reading.num_regions

    @property
    def read_s(self) -> float | None:
        """How long it took to read the whole regions; None if it was in the arena already."""
        return None if self._reading is None else self._reading.read_s

    @property
    def error(self) -> CorunError | None:
        """Why the other regions will never be whole, once that is known."""
        return None if self._reading is None else self._reading.error

    @property
    def is_read(self) -> bool:
        """Whether no more regions will become whole."""
        return self._reading is None or self._reading.is_over

    def read(self, on_layer: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Read the files, if necessary; see ``AdapterReading.run``."""
        if self._reading is not None:
            self._reading.run(on_layer, is_wanted)

    def wait_whole(self, num_regions: int, timeout_s: float) -> bool:
        """Wait until this many regions are whole; False if they cannot be, or on time-out."""
        return self._reading is None or self._reading.wait(num_regions, timeout_s)

    def wait_read(self, timeout_s: float) -> None:
        """Wait until reading has ended, for a limited time."""
        if self._reading is not None:
            self._reading.wait_over(timeout_s)

    def release(self) -> None:
        """Release the reference: the caller reads the regions no more. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._memory = None
            if self._reading is not None:
                self._reading.stop()
            self._arena.release(self._entry)


class AdapterStore:
    """Owns the arena. ``register`` and ``fetch`` may run in different threads."""

    def __init__(
        self,
        arena: HostArena,
        layout: AdapterLayout,
        open_source: OpenSource,
        device: TorchDevice,
        sections: HostSections | None = None,
        *,
        is_read_in_place: bool,
    ) -> None:
        """Takes ownership of ``arena``. ``sections``: shared with KV; None = all have memory.

        ``is_read_in_place``: by kernels of this process, which would have to map what is written.
        """
        self.layout = layout
        self._arena = arena
        self._open = open_source
        self._memory = device.register(arena.segment.pages, name="adapters", in_parts=sections is not None)
        self._is_staged = arena.writes_allocate and not is_read_in_place
        self._section_bytes = 0 if sections is None else sections.section_bytes
        if sections is not None:
            # Allocated at once, which threads share, and pinned one by one.
            arena.take_section(0, sections.num_adapter_sections * self._section_bytes)
            for section in range(sections.num_adapter_sections):
                self._memory.pin(section * self._section_bytes, self._section_bytes)
        self._bytes: torch.Tensor | None = self._memory.tensor(0, (arena.segment.num_bytes,), torch.uint8)
        self._contents: dict[str, ContentDigest] = {}  # of adapters that were read
        self._headers: dict[str, FileHeader] = {}  # of adapters that no load has read yet
        self._lock = threading.Lock()  # contents are removed while first loads end
        self.on_first_read: OnFirstRead = lambda digest, end: None

    def outline(self, path: AdapterPath) -> tuple[ResolvedAdapter, tuple[GroupPlan, ...]]:
        """The facts of its header, and its regions. Raises ``AdapterError``."""
        with self._open(path) as source:
            return source.outline, self.layout.plan(source.outline)

    def register(self, path: AdapterPath, make_room: MakeRoom) -> StoredFacts:
        """Read and check an adapter, and store it in the arena if there is room.

        Raises ``AdapterError`` naming what is wrong.
        """
        with self._open(path) as source:
            plans = self.layout.plan(source.adapter)
            host_bytes = tuple(extent_sizes([plan.spec for plan in plans]))
            entry = self._place(plans, make_room(host_bytes))
            if entry is None:
                _LOG.debug("%s is valid, but not stored: the host arena has no room", path)
                _read_all(source, self.layout.check)
            else:
                self._keep(entry, plans, source)
            digest = source.digest
            self._contents[digest.hexadecimal] = digest
            adapter = source.adapter
            return StoredFacts(
                digest.hexadecimal, adapter.max_rank, plans, host_bytes, adapter.left_out, entry is not None
            )

    def begin(self, path: AdapterPath) -> StoredFacts | None:
        """Check all of an adapter but its values, which its first load reads and checks.

        None if values are needed before. Raises ``AdapterError``.
        """
        with self._open(path) as source:
            header = source.begin()
            if header is None:
                return None
            plans = self.layout.plan(source.adapter)
            host_bytes = tuple(extent_sizes([plan.spec for plan in plans]))
            digest = secrets.token_hex(32)
            self._headers[digest] = header
            rank, left_out = source.adapter.max_rank, source.adapter.left_out
            return StoredFacts(digest, rank, plans, host_bytes, left_out, is_kept=False)

    def fetch(self, digest: str, path: AdapterPath, place: HostPlace) -> HostAdapter:
        """Refer to the adapter that was registered or begun with this digest.

        If its place is not filled the caller must fill it with ``HostAdapter.read``. Raises
        ``AdapterError`` if the files have changed, ``AdapterChangedError`` if they have before
        their first load, ``ResourceError`` if the machine has too little memory.
        """
        if place.is_filled:
            return HostAdapter(self._arena, self._arena.acquire(place.place_id), self._whole)
        try:
            return self._read_again(digest, path, place)
        except CorunError as error:
            self._end_first_read(digest, error)
            raise

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None:
        """Remove adapters from the arena."""
        self._arena.evict(place_ids)

    def take_section(self, section: int) -> None:
        """Allocate and register a section. Raises ``ShmError`` and ``DeviceError``."""
        start, num_bytes = section * self._section_bytes, self._section_bytes
        self._arena.take_section(start, num_bytes)
        try:
            self._memory.pin(start, num_bytes)
        except BaseException:
            self._arena.give_section(start, num_bytes)
            raise

    def give_section(self, section: int) -> None:
        """Unregister a section, and return its memory to the system.

        Raises ``ShmError`` while an evicted adapter there is still read, and ``DeviceError``.
        """
        start, num_bytes = section * self._section_bytes, self._section_bytes
        self._arena.check_unused(start, num_bytes)
        self._memory.unpin(start, num_bytes)
        self._arena.give_section(start, num_bytes)

    def remove_content(self, digest: str) -> None:
        """Remove what is stored for this content; it is not fetched again."""
        with self._lock:
            self._contents.pop(digest, None)
            self._headers.pop(digest, None)

    def close(self) -> None:
        """Release the arena; no operation may use it any more. Idempotent.

        Its memory is freed with the last tensor over it.
        """
        if self._bytes is None:
            return
        self._bytes = None
        self._memory.close()
        try:
            self._arena.close()
        except ShmError as error:
            _LOG.warning("%s", error)

    def _read_again(self, digest: str, path: AdapterPath, place: HostPlace) -> HostAdapter:
        source = self._open(path)
        try:
            header = self._headers.get(digest)
            if header is None:
                source.expect(self._contents[digest])
            else:
                source.resume(header)
            plans = self.layout.plan(source.adapter)
            specs = [plan.spec for plan in plans]
            entry = self._arena.place(place.place_id, place.extents, specs, by_writes=self._is_staged)
            staged = _StagedLayers(self._arena, entry, plans) if self._is_staged else None
        except BaseException as error:
            source.close()
            if isinstance(error, ShmError):
                raise ResourceError(f"{path}: {error}") from error
            raise
        writer = self.layout.writer(plans, self._parts(entry) if staged is None else staged.parts)
        on_read = partial(self._end_first_read, digest)
        reading = AdapterReading(source, writer, self._arena, entry, on_read, staged)
        return HostAdapter(self._arena, self._arena.acquire(place.place_id), self._whole, reading)

    def _end_first_read(self, digest: str, end: ContentDigest | CorunError) -> None:
        """A load has read the files; tells the first time. They are read again after other errors."""
        if isinstance(end, ContentDigest):
            with self._lock:
                if digest not in self._headers:
                    return
                self._contents[digest] = end
                del self._headers[digest]
            self.on_first_read(digest, end.hexadecimal)
        elif (
            isinstance(end, AdapterError | AdapterChangedError)
            and not isinstance(end.__cause__, TimeoutError)
            and digest in self._headers
        ):
            self.on_first_read(digest, end)

    def _place(self, plans: Sequence[GroupPlan], place: HostPlace | None) -> ArenaEntry | None:
        """The place of a registered adapter; None if there is no room for it."""
        if place is None:
            return None
        try:
            return self._arena.place(place.place_id, place.extents, [plan.spec for plan in plans])
        except ShmError as error:
            _LOG.debug("%s", error)
            return None

    def _keep(self, entry: ArenaEntry, plans: Sequence[GroupPlan], source: AdapterReader) -> None:
        try:
            _read_all(source, self.layout.writer(plans, self._parts(entry)).write)
        finally:
            self._arena.release(entry)

    @property
    def _whole(self) -> torch.Tensor:
        """The arena's bytes."""
        assert self._bytes is not None, "the store is closed"
        return self._bytes

    def _parts(self, entry: ArenaEntry) -> list[torch.Tensor]:
        return [self._whole[r.offset : r.offset + r.num_bytes] for r in entry.regions]


def _read_all(source: AdapterReader, take: TakeTensors) -> None:
    for _ in source.read_layers(take):
        pass
