"""The host adapter arena: packed adapters in one segment that loader and workers both read.

Manages memory only: it knows no files and no arithmetic, and makes no decisions. The caller chooses
the place of an adapter and which one to evict. An adapter is a list of regions, one per (layer,
input group), in the format of ``region``. The regions of a layer are adjacent in one extent.

    place -> one reference, the filler's; other references may use what it has already filled
    evict -> removed now, or with the last reference

A referenced adapter is never moved or removed. Any thread may call all methods.
"""

import itertools
import logging
import mmap
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from .backing import Backing, available_memory_bytes
from .errors import ShmError
from .huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, MADV_NOHUGEPAGE, advise, fill
from .region import ALIGNMENT_BYTES
from .segment import Segment

KIND = "adapters"
PAGE_BYTES = mmap.PAGESIZE  # extents are rounded to pages, so that their memory can be returned
assert PAGE_BYTES % ALIGNMENT_BYTES == 0


_LOG = logging.getLogger(__name__)

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_GIVEN = ("always", "within_size", "advise")  # settings that give huge pages


# With pages of 4 KiB a product over matrices spends part of its time on address translation, so
# huge pages are requested before the first touch, if the kernel offers them for shared memory.
def huge_page_setting(path: Path = _SETTING) -> str:
    """The kernel's setting for huge pages in shared memory; "never" if it does not support them."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return "never"
    chosen = [word[1:-1] for word in words if word.startswith("[")]
    return chosen[0] if chosen else "never"


class ArenaPages:
    """Allocates and returns the memory of ranges of a sparse segment.

    An elastic segment has memory only for allocated ranges. Huge pages are then requested inside
    a range, because one that reached beyond it would hold memory that is not accounted for. A
    segment that is not elastic allocates all memory at once, or in sections; ``take`` and
    ``give_back`` do nothing.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        is_elastic: bool,
        in_sections: bool = False,
        fill_cpus: tuple[int, ...] = (),
        setting: str | None = None,
    ) -> None:
        """``fill_cpus``: see ``HostArena.create``.

        ``setting`` overrides the kernel's; None = read it. Raises ``SpaceError``.
        """
        assert segment.is_sparse, "its memory was allocated before requesting huge pages"
        self._segment = segment
        self._is_elastic = is_elastic
        self._fill_cpus = fill_cpus
        setting = huge_page_setting() if setting is None else setting
        self._wants_huge = setting in _GIVEN
        _LOG.debug(
            "huge pages in shared memory: %s; %s",
            setting,
            "requested" if self._wants_huge else "not requested",
        )
        if not (is_elastic or in_sections):
            self._take(0, segment.num_bytes)
        elif self._wants_huge:
            self._advise(0, segment.num_bytes, MADV_NOHUGEPAGE)

    def take(self, offset: int, num_bytes: int) -> None:
        """Allocate memory for a range; its contents are kept. Raises ``SpaceError``."""
        if self._is_elastic:
            self._take(offset, num_bytes)

    @property
    def come_by_writes(self) -> bool:
        """Whether to write allocates pages, so that ``take`` is not needed: small ones, one by one."""
        return self._is_elastic and not (self._wants_huge or self._fill_cpus)

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Return the memory of an allocated range."""
        if self._is_elastic:
            self._give_back(offset, num_bytes)

    def take_section(self, offset: int, num_bytes: int) -> None:
        """Allocate memory for a section of a segment that is not elastic. Raises ``SpaceError``."""
        if not self._is_elastic:
            self._take(offset, num_bytes)

    def give_section(self, offset: int, num_bytes: int) -> None:
        """Return the memory of a section, likewise."""
        if not self._is_elastic:
            self._give_back(offset, num_bytes)

    def _give_back(self, offset: int, num_bytes: int) -> None:
        start, end = self._huge_interior(offset, num_bytes)
        if self._wants_huge and end > start:
            self._advise(start, end - start, MADV_NOHUGEPAGE)
        self._segment.give_back(offset, num_bytes)

    def _take(self, offset: int, num_bytes: int) -> None:
        start, end = self._huge_interior(offset, num_bytes)
        # Only a touch makes huge pages, allocation does not. It is not tried on a machine with too
        # little memory, where a process would be killed for it: ``allocate`` raises an error.
        held_bytes = 0
        if not self._wants_huge:
            start, end = offset, offset + num_bytes if self._fill_cpus else offset
        if end > start and num_bytes <= available_memory_bytes():
            if self._wants_huge:
                self._advise(start, end - start, MADV_HUGEPAGE)
            fill(self._segment.address + start, end - start, self._fill_cpus)
            held_bytes = end - start  # or a little less: this is only what need not be free now
        self._segment.allocate(offset, num_bytes, held_bytes=held_bytes)

    def _huge_interior(self, offset: int, num_bytes: int) -> tuple[int, int]:
        """The whole huge pages inside a range, as offsets; aligned by address."""
        base = self._segment.address
        start = -(-(base + offset) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES - base
        end = (base + offset + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - base
        return start, end

    def _advise(self, offset: int, num_bytes: int, advice: int) -> None:
        # A segment's payload starts with a page.
        advise(self._segment.address + offset, num_bytes, advice)


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A requested region; regions of a layer are consecutive, layers ascending."""

    layer: int
    input_group: int
    num_bytes: int  # a multiple of 64


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """A placed region."""

    layer: int
    input_group: int
    offset: int  # in the arena, a multiple of 64
    num_bytes: int


@dataclass(slots=True, eq=False)
class ArenaEntry:
    """One adapter in the arena. Only the arena writes its fields."""

    regions: tuple[RegionPlace, ...]
    extents: tuple[tuple[int, int], ...]  # (offset, bytes), whole pages
    num_references: int = 1
    num_bytes: int = field(init=False)
    unwritten_bytes: int = 0  # of memory that ``HostArena.write`` will allocate

    def __post_init__(self) -> None:
        self.num_bytes = sum(size for _, size in self.extents)


class HostArena:
    """See the module. Owns its segment."""

    def __init__(
        self,
        segment: Segment,
        *,
        is_elastic: bool,
        in_sections: bool = False,
        fill_cpus: tuple[int, ...] = (),
    ) -> None:
        """``segment`` is sparse; ``is_elastic``: memory is allocated and returned per adapter.

        ``in_sections``: there is no place before ``take_section``. Raises ``SpaceError``.
        """
        self.segment = segment
        self._pages = ArenaPages(segment, is_elastic=is_elastic, in_sections=in_sections, fill_cpus=fill_cpus)
        self._entries: dict[int, ArenaEntry] = {}
        self._leaving: list[ArenaEntry] = []  # evicted, and still referenced
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        num_bytes: int,
        *,
        is_elastic: bool,
        in_sections: bool = False,
        fill_cpus: tuple[int, ...] = (),
        backing: Backing = "auto",
    ) -> Self:
        """Make an arena of ``num_bytes`` of memory, or of addresses if it is elastic or in sections.

        ``fill_cpus``: of threads that share the allocation of large ranges; () = there are none.
        Raises ``SpaceError`` if the machine has too little memory.
        """
        rounded_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        segment = Segment.create(rounded_bytes, kind=KIND, backing=backing, is_sparse=True)
        try:
            return cls(segment, is_elastic=is_elastic, in_sections=in_sections, fill_cpus=fill_cpus)
        except BaseException:
            segment.close()
            raise

    @property
    def capacity_bytes(self) -> int:
        """Bytes for all adapters together."""
        return self.segment.num_bytes

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return sum(entry.num_bytes for entry in self._all_entries())

    @property
    def place_ids(self) -> frozenset[int]:
        """Places that were made and not evicted."""
        with self._lock:
            return frozenset(self._entries)

    @property
    def num_references(self) -> int:
        """References to all entries together."""
        with self._lock:
            return sum(entry.num_references for entry in self._all_entries())

    @property
    def writes_allocate(self) -> bool:
        """Whether ``write`` may allocate the memory of a place."""
        return self._pages.come_by_writes

    def place(
        self,
        place_id: int,
        extents: Sequence[tuple[int, int]],
        regions: Sequence[RegionSpec],
        *,
        by_writes: bool = False,
    ) -> ArenaEntry:
        """Make a place for an adapter, which the caller fills and releases.

        Args:
            place_id: An unused id.
            extents: (offset, bytes) of each layer.
            regions: The regions of the layers.
            by_writes: The caller fills it with ``write`` alone, if ``writes_allocate``, which
                allocates its memory. So no layer waits for the memory of others.

        Raises ``SpaceError`` if the machine has too little memory for an elastic arena,
        ``ShmError`` if the previous contents are still referenced.
        """
        assert [size for _, size in extents] == extent_sizes(regions), (extents, regions)
        placed = _place_regions(regions, [start for start, _ in extents])
        entry = ArenaEntry(tuple(placed), tuple(extents))
        with self._lock:
            assert place_id not in self._entries, place_id
            self._check_free(entry)
            promised_bytes = sum(one.unwritten_bytes for one in self._all_entries())
            self._entries[place_id] = entry
            if by_writes and self.writes_allocate:
                entry.unwritten_bytes = sum(region.num_bytes for region in regions)
        try:
            if entry.unwritten_bytes:
                self.segment.check_space(promised_bytes + entry.num_bytes)
            else:
                for start, size in _joined(entry.extents):
                    self._pages.take(start, size)
        except BaseException:
            self.evict([place_id])
            self.release(entry)
            raise
        return entry

    def write(self, entry: ArenaEntry, offset: int, data: memoryview) -> None:
        """Write to a place that was made ``by_writes``. Raises ``SpaceError``."""
        self.segment.write(offset, data)
        with self._lock:
            entry.unwritten_bytes = max(0, entry.unwritten_bytes - data.nbytes)

    def acquire(self, place_id: int) -> ArenaEntry:
        with self._lock:
            entry = self._entries[place_id]
            entry.num_references += 1
            return entry

    def release(self, entry: ArenaEntry) -> None:
        with self._lock:
            assert entry.num_references > 0, "released more often than acquired"
            entry.num_references -= 1
            if entry in self._leaving and not entry.num_references:
                self._leaving.remove(entry)
                self._give_back(entry)

    def evict(self, place_ids: Iterable[int]) -> None:
        """Remove adapters, now or with their last reference; unknown places are ignored."""
        with self._lock:
            for place_id in place_ids:
                entry = self._entries.pop(place_id, None)
                if entry is None:
                    continue
                if entry.num_references:
                    self._leaving.append(entry)
                else:
                    self._give_back(entry)

    def take_section(self, offset: int, num_bytes: int) -> None:
        """Allocate memory for a section. Raises ``SpaceError``."""
        self._pages.take_section(offset, num_bytes)

    def check_unused(self, offset: int, num_bytes: int) -> None:
        """Raise ``ShmError`` while an adapter, evicted or not, lies in this range."""
        with self._lock:
            if any(_overlap(entry.extents, [(offset, num_bytes)]) for entry in self._all_entries()):
                raise ShmError("an adapter in this part of the host adapter arena is still in use")

    def give_section(self, offset: int, num_bytes: int) -> None:
        """Return the memory of an unused section to the system."""
        self._pages.give_section(offset, num_bytes)

    def close(self) -> None:
        """Close the segment. Idempotent.

        Raises ``ShmError`` while views of regions are alive.
        """
        self.segment.close()

    def _all_entries(self) -> list[ArenaEntry]:
        return [*self._entries.values(), *self._leaving]

    def _check_free(self, entry: ArenaEntry) -> None:
        if any(_overlap(entry.extents, other.extents) for other in self._leaving):
            raise ShmError("an evicted adapter in the host adapter arena is still in use")

    def _give_back(self, entry: ArenaEntry) -> None:
        for start, size in _joined(entry.extents):
            self._pages.give_back(start, size)


def extent_sizes(regions: Sequence[RegionSpec]) -> list[int]:
    """Bytes of each layer's extent, in whole pages."""
    sizes = []
    for _, members in itertools.groupby(regions, key=lambda region: region.layer):
        num_bytes = sum(member.num_bytes for member in members)
        sizes.append(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return sizes


def _place_regions(regions: Sequence[RegionSpec], starts: Sequence[int]) -> Iterable[RegionPlace]:
    """Place regions consecutively in the extents of their layers."""
    layers = itertools.groupby(regions, key=lambda region: region.layer)
    for (_, members), start in zip(layers, starts, strict=True):
        position = start
        for spec in members:
            yield RegionPlace(spec.layer, spec.input_group, position, spec.num_bytes)
            position += spec.num_bytes


def _joined(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extents, adjacent ones as one: each costs a look at the machine's free memory."""
    joined: list[tuple[int, int]] = []
    for start, size in extents:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((start, size))
    return joined


def _overlap(extents: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(
        start < other_start + other_size and other_start < start + size
        for start, size in extents
        for other_start, other_size in others
    )
