"""The host adapter arena: packed adapters in one segment that loader and workers both read.

Memory and bookkeeping only: it knows no files and no arithmetic. An adapter is entered once per
content, under its digest, and is a list of regions, one per (layer, input group), in the format of
``region``. The regions of a layer follow each other in one extent; extents of one adapter
are placed as one range where one is free and apart where not, so free memory is lost to
fragmentation only if no free range is as large as one *layer* of the adapter.

    reserve -> filling   one reference, the filler's; nobody finds it, but the filler may let
                         others refer to what it has filled already
    publish -> ready     found by its digest; may be referenced by loader, workers, device
    release of the last reference: stays until the room is wanted, the least valuable first

What is referenced is never moved and never evicted. All methods may be called by any thread.
"""

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Self

from .arena_entry import (
    PAGE_BYTES,
    ArenaEntry,
    ArenaFullError,
    EntryState,
    Rank,
    RegionSpec,
    extent_sizes,
    least_recently_used,
    place_regions,
)
from .arena_pages import ArenaPages
from .arena_ranges import RangeAllocator
from .backing import Backing
from .segment import Segment

KIND = "adapters"


class HostArena:
    """See the module. Owns its segment."""

    def __init__(
        self, segment: Segment, *, is_elastic: bool, hint: str,
        rank: Rank = least_recently_used,
    ) -> None:  # fmt: skip
        """``segment`` is sparse; ``is_elastic``: memory is taken and returned with the adapters.

        ``hint``: what to do about an arena that is full, for messages. Raises ``SpaceError``.
        """
        self.segment = segment
        self._hint = hint
        self._rank = rank
        self._pages = ArenaPages(segment, is_elastic=is_elastic)
        self._ranges = RangeAllocator(segment.num_bytes, PAGE_BYTES)
        self._entries: dict[str, ArenaEntry] = {}  # ready, by digest
        self._filling: list[ArenaEntry] = []
        self._unlisted: list[ArenaEntry] = []  # not to be found, and still referenced
        self._uses = itertools.count(1)
        self._keep_bytes: int | None = None
        self._num_evictions = 0
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        num_bytes: int,
        *,
        is_elastic: bool,
        hint: str,
        rank: Rank = least_recently_used,
        backing: Backing = "auto",
    ) -> Self:
        """Make an arena of ``num_bytes``: of memory, or if it is elastic of addresses.

        Raises ``SpaceError`` if the machine has too little.
        """
        rounded_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        segment = Segment.create(rounded_bytes, kind=KIND, backing=backing, is_sparse=True)
        try:
            return cls(segment, is_elastic=is_elastic, hint=hint, rank=rank)
        except BaseException:
            segment.close()
            raise

    @property
    def capacity_bytes(self) -> int:
        """Bytes that adapters together may take."""
        return self._ranges.capacity_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of all entries."""
        return self._ranges.capacity_bytes - self._ranges.free_bytes

    @property
    def referenced_bytes(self) -> int:
        """Bytes of the entries that are in use, which cannot be evicted."""
        return sum(entry.num_bytes for entry in self._all_entries() if entry.num_references)

    @property
    def num_evictions(self) -> int:
        """Entries that had to make room so far."""
        return self._num_evictions

    def reserve(self, regions: Sequence[RegionSpec], *, is_optional: bool = False) -> ArenaEntry:
        """Take room for an adapter, evicting what nothing refers to; the caller fills it.

        ``is_optional``: only if it could stay under the limit of ``keep_within`` afterwards.
        Raises ``ArenaFullError``, with nothing evicted, or ``SpaceError`` if the machine has too
        little memory for what is elastic.
        """
        sizes = extent_sizes(regions)
        with self._lock:
            self._check_room(sum(sizes), is_optional=is_optional)
            starts = self._place(sizes)
            extents = tuple(zip(starts, sizes, strict=True))
            entry = ArenaEntry(tuple(place_regions(regions, starts)), extents)
            self._filling.append(entry)
            self._trim()
        try:
            for start, size in entry.extents:
                self._pages.take(start, size)
        except BaseException:
            self.abandon(entry)
            raise
        return entry

    def share(self, entry: ArenaEntry) -> None:
        """Let one more refer to an entry that is being filled; ``release`` ends it."""
        with self._lock:
            assert entry.state is EntryState.FILLING, entry.state
            entry.num_references += 1

    def publish(self, entry: ArenaEntry, digest: str) -> ArenaEntry:
        """Enter a filled entry under its digest; return it, or the one that was there before.

        The caller's reference moves to what is returned.
        """
        with self._lock:
            assert entry.state is EntryState.FILLING, entry.state
            known = self._entries.get(digest)
            if known is not None:
                self._end_filling(entry, EntryState.READY)
                known.num_references += 1
                self._touch(known)
                return known
            self._filling.remove(entry)
            entry.state, entry.digest = EntryState.READY, digest
            self._entries[digest] = entry
            self._touch(entry)
            return entry

    def abandon(self, entry: ArenaEntry) -> None:
        """Give up an entry that was not published: it goes now, or with its last reference."""
        with self._lock:
            assert entry.state is EntryState.FILLING, entry.state
            self._end_filling(entry, EntryState.ABANDONED)

    def acquire(self, digest: str) -> ArenaEntry | None:
        """Refer to the adapter of this content; None if it is not in the arena."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is not None:
                entry.num_references += 1
                self._touch(entry)
            return entry

    def contains(self, digest: str) -> bool:
        """Whether the adapter of this content is in the arena; it may go in the next moment."""
        with self._lock:
            return digest in self._entries

    def release(self, entry: ArenaEntry) -> None:
        """End one reference."""
        with self._lock:
            assert entry.state is not EntryState.GONE, entry.state
            num_others = int(entry.state is EntryState.FILLING)  # the filler ends its own otherwise
            assert entry.num_references > num_others, "released more often than acquired"
            entry.num_references -= 1
            self._touch(entry)
            if entry.num_references:
                return
            if entry.is_discarded:
                self._unlisted.remove(entry)
                self._free(entry)
            self._trim()

    def discard(self, digest: str) -> None:
        """Nobody will ask for this content any more: it goes now, or with its last reference."""
        with self._lock:
            entry = self._entries.pop(digest, None)
            if entry is None:
                return
            if not entry.num_references:
                self._free(entry)
                return
            entry.is_discarded = True
            self._unlisted.append(entry)

    def keep_within(self, num_bytes: int | None) -> None:
        """Keep what nothing refers to only as long as all entries take no more than this.

        What is referenced, or reserved to be used, may take more: its bytes are accounted for
        elsewhere. None = no limit but the capacity.
        """
        with self._lock:
            self._keep_bytes = num_bytes
            self._trim()

    def close(self) -> None:
        """Forget everything and close the segment. Idempotent.

        Raises ``ShmError`` while views of regions are alive.
        """
        self.segment.close()

    def check_invariants(self) -> None:
        """Assert that entries do not overlap, and that nothing is lost."""
        with self._lock:
            self._ranges.check_invariants()
            end = 0
            for start, size in sorted(part for e in self._all_entries() for part in e.extents):
                assert start >= end, "extents overlap"
                end = start + size
            total = sum(entry.num_bytes for entry in self._all_entries())
            assert total == self.taken_bytes, (total, self.taken_bytes)
            for digest, entry in self._entries.items():
                assert entry.state is EntryState.READY and entry.digest == digest
                assert not entry.is_discarded
            for entry in self._unlisted:
                assert entry.is_discarded and entry.num_references
            for entry in self._filling:
                assert entry.state is EntryState.FILLING and entry.num_references

    def _all_entries(self) -> Iterable[ArenaEntry]:
        return itertools.chain(self._entries.values(), self._filling, self._unlisted)

    def _idle(self) -> list[ArenaEntry]:
        """Entries that nothing refers to, those to evict first in front."""
        idle = [entry for entry in self._entries.values() if not entry.num_references]
        return list(self._rank(idle)) if idle else []

    def _check_room(self, num_bytes: int, *, is_optional: bool) -> None:
        limit_bytes = self.capacity_bytes
        if is_optional and self._keep_bytes is not None:
            limit_bytes = min(limit_bytes, self._keep_bytes)
        referenced_bytes = self.referenced_bytes
        if num_bytes > limit_bytes - referenced_bytes:
            raise ArenaFullError(num_bytes, limit_bytes, referenced_bytes, hint=self._hint)

    def _place(self, sizes: Sequence[int]) -> list[int]:
        """Take ranges of these sizes, evicting as few as the ranking allows; their starts."""
        ranges = self._ranges.copy()
        victims: list[ArenaEntry] = []
        candidates = iter(self._idle())
        while (starts := _try_place(ranges, sizes)) is None:
            victim = next(candidates, None)
            if victim is None:
                raise ArenaFullError(
                    sum(sizes), self.capacity_bytes, self.referenced_bytes,
                    hint=self._hint, largest_free_bytes=ranges.largest_free_bytes,
                )  # fmt: skip
            victims.append(victim)
            for start, size in victim.extents:
                ranges.free(start, size)
        for victim in victims:
            self._evict(victim)
        placed = _try_place(self._ranges, sizes)
        assert placed == starts, (placed, starts)
        return starts

    def _trim(self) -> None:
        """Evict until the limit is kept, or nothing is left that may go."""
        if self._keep_bytes is None or self.taken_bytes <= self._keep_bytes:
            return
        for entry in self._idle():
            self._evict(entry)
            if self.taken_bytes <= self._keep_bytes:
                return

    def _evict(self, entry: ArenaEntry) -> None:
        assert not entry.num_references, "what is referenced stays"
        del self._entries[entry.digest]
        self._num_evictions += 1
        self._free(entry)

    def _end_filling(self, entry: ArenaEntry, state: EntryState) -> None:
        """End the filler's reference to an entry that nobody will find."""
        self._filling.remove(entry)
        entry.num_references -= 1
        if not entry.num_references:
            self._free(entry)
            return
        entry.state, entry.is_discarded = state, True
        self._unlisted.append(entry)

    def _free(self, entry: ArenaEntry) -> None:
        entry.state = EntryState.GONE
        for start, size in entry.extents:
            self._pages.give_back(start, size)
            self._ranges.free(start, size)

    def _touch(self, entry: ArenaEntry) -> None:
        entry.last_use = next(self._uses)


def _try_place(ranges: RangeAllocator, sizes: Sequence[int]) -> list[int] | None:
    """Take one range for all, or one for each; None, with nothing taken, if neither fits."""
    whole = ranges.allocate(sum(sizes))
    if whole is not None:
        return list(itertools.accumulate(sizes[:-1], initial=whole))
    if sum(sizes) > ranges.free_bytes:
        return None
    starts: list[int] = []
    for size in sizes:
        start = ranges.allocate(size)
        if start is None:
            for taken, taken_size in zip(starts, sizes, strict=False):
                ranges.free(taken, taken_size)
            return None
        starts.append(start)
    return starts
