"""Adapters in host memory, and their places. Pure account keeping.

A load that gets a place here is sure to fit. The owner of the memory carries out the commands of
plans: it creates the places of loads and registrations, and evicts before it carries out any other
command of the same or a later plan.

Each content is stored once. The layers of an adapter lie in one range if one is free, else in
separate ranges. So memory is lost to fragmentation only if no free range is as large as one
*layer*. Places never move, and adapters in use are never evicted.
"""

import itertools
import mmap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from ...shm.arena_ranges import RangeAllocator
from ..plan import HostPlace, HostPlaceId
from .adapter_log import EvictionReason


@dataclass(slots=True, eq=False)
class _Kept:
    """An adapter in host memory, or on its way there."""

    place_id: HostPlaceId
    extents: tuple[tuple[int, int], ...]
    section_bytes: InitVar[int]
    digest: str = ""  # of its content, once it is there
    is_findable: bool = False  # in the index by content
    num_users: int = 1  # loads and registrations under way, and device copies read in place
    last_use: int = 0  # number of the last use, with sections
    num_bytes: int = field(init=False)
    sections: Mapping[int, int] = field(init=False)  # bytes in each section of its extents

    def __post_init__(self, section_bytes: int) -> None:
        self.num_bytes = sum(size for _, size in self.extents)
        self.sections = sections = Counter[int]()
        for start, size in self.extents:
            for section in range(start // section_bytes, -(-(start + size) // section_bytes)):
                first = section * section_bytes
                sections[section] += min(start + size, first + section_bytes) - max(start, first)


class HostCache:
    """Contents, uses and least-recently-used order of the adapters in host memory."""

    def __init__(
        self, capacity_bytes: int, *, is_device_memory: bool = False, idle_bytes: int | None = None
    ) -> None:
        """Start without adapters.

        Args:
            capacity_bytes: Of memory, or of address space if memory is committed on use.
            is_device_memory: Whether the device's kernels read the adapters here.
            idle_bytes: Idle adapters stay while all adapters together have at most these bytes;
                None = the capacity.
        """
        self.is_device_memory = is_device_memory
        self._ranges = RangeAllocator(capacity_bytes, mmap.PAGESIZE)
        self._max_bytes = self._ranges.capacity_bytes if idle_bytes is None else idle_bytes
        self._limit_bytes = self._max_bytes
        self.section_bytes = self._ranges.capacity_bytes
        self.away: set[int] = set()  # sections of the addresses without memory
        self._next_use: Callable[[], int] = lambda: 0
        self.is_short = False  # in this plan, a load that something waits for has found no room
        self.lost_use: int | None = None  # the last use of what was evicted for room since then
        self._kept: dict[HostPlaceId, _Kept] = {}
        self._by_digest: dict[str, _Kept] = {}
        self._idle: dict[HostPlaceId, _Kept] = {}  # without users; oldest use first
        self._evictions: list[HostPlaceId] = []  # for the next plan
        self._ids = itertools.count(1)
        self.changed: set[str] = set()  # contents, until they are taken
        self.evictions: Counter[EvictionReason] = Counter()
        self._evictions_of: dict[str, Counter[EvictionReason]] = {}  # by content

    def divide(self, section_bytes: int, away: range, next_use: Callable[[], int]) -> None:
        """Divide the addresses into sections, of which those ``away`` have no memory yet.

        Call it at the start. ``next_use`` numbers the uses of adapters and of KV.
        """
        self.section_bytes, self._next_use = section_bytes, next_use
        for section in away:
            self.give_section(section)

    def coldest_section(self, since: int) -> tuple[float, int] | None:
        """Return the idle section least used after ``since``, behind the share that was used.

        None if all are in use, or one is left: without memory on the host no adapter is loaded.
        """
        num_sections = self._ranges.capacity_bytes // self.section_bytes
        warm = dict.fromkeys(set(range(num_sections)) - self.away, 0)
        if len(warm) == 1:
            return None
        for kept in self._kept.values():
            for section, num_bytes in kept.sections.items():
                if kept.num_users:
                    warm.pop(section, None)
                elif kept.last_use > since and section in warm:
                    warm[section] += num_bytes
        coldest = min(warm, key=lambda section: (warm[section], -section), default=None)
        return None if coldest is None else (warm[coldest] / self.section_bytes, coldest)

    def give_section(self, section: int) -> None:
        """Evict what lies in an idle section, and use its memory no more."""
        for kept in tuple(self._idle.values()):
            if section in kept.sections:
                self._evict(kept, EvictionReason.KV)
        self._ranges.withhold(section * self.section_bytes, self.section_bytes)
        self.away.add(section)

    def take_section(self, section: int) -> None:
        """Use the memory that a section has got."""
        self.away.remove(section)
        self._ranges.free(section * self.section_bytes, self.section_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Limit of all adapters together."""
        return self._ranges.capacity_bytes - len(self.away) * self.section_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of all adapters."""
        return self.capacity_bytes - self._ranges.free_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle adapters. O(idle adapters)."""
        return sum(kept.num_bytes for kept in self._idle.values())

    @property
    def oldest_use(self) -> int:
        """Number of the last use of the idle adapter that is evicted next; 0 = none is idle."""
        return next((kept.last_use for kept in self._idle.values()), 0)

    @property
    def has_evictions(self) -> bool:
        """Whether evictions wait for a plan."""
        return bool(self._evictions)

    @property
    def place_ids(self) -> frozenset[HostPlaceId]:
        """All places in use or kept."""
        return frozenset(self._kept)

    @property
    def num_used(self) -> int:
        """Number of adapters in use."""
        return len(self._kept) - len(self._idle)

    def contains(self, digest: str) -> bool:
        """Whether the adapter of this content can be loaded without reading files."""
        return digest in self._by_digest

    def num_bytes_of(self, digest: str) -> int:
        """Return the bytes of the adapter of this content; 0 if it is not complete here."""
        kept = self._by_digest.get(digest)
        return 0 if kept is None else kept.num_bytes

    def evictions_of(self, digest: str) -> Mapping[EvictionReason, int]:
        """Return how often this content was evicted, by reason."""
        return self._evictions_of.get(digest, {})

    def has_place(self, digest: str, layer_bytes: Sequence[int]) -> bool:
        """Whether ``begin_load`` would return a place."""
        return digest in self._by_digest or self._victims(layer_bytes) is not None

    def begin_load(self, digest: str, layer_bytes: Sequence[int]) -> HostPlace | None:
        """Use the adapter of this content until ``end_use``. Return its place, filled or new.

        ``layer_bytes``: sizes of its layers, in whole pages. The limit may be exceeded until the
        next ``keep_within`` evicts idle adapters. Returns None if there is no room before other
        uses end.
        """
        kept = self._by_digest.get(digest)
        if kept is None:
            return self._place(layer_bytes)
        kept.num_users += 1
        self._idle.pop(kept.place_id, None)
        return HostPlace(kept.place_id, kept.extents, is_filled=True)

    def begin_registration(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        """Return a place for an adapter that is read for the first time, until ``end_use``.

        Returns None if the adapter could not be kept there afterwards.
        """
        if sum(layer_bytes) > min(self._limit_bytes, self.capacity_bytes) - self._used_bytes():
            return None
        place = self._place(layer_bytes)
        self._trim()
        return place

    def filled(self, place_id: HostPlaceId, digest: str) -> None:
        """Mark the content of a place in use as complete, and index it."""
        kept = self._kept[place_id]
        assert kept.num_users and not kept.digest, kept
        kept.digest = digest
        self.changed.add(digest)
        known = self._by_digest.get(digest)
        if known is None:
            kept.is_findable, self._by_digest[digest] = True, kept
        elif self._idle.pop(known.place_id, None) is not None:  # now the newest use
            self._idle[known.place_id] = known
            known.last_use = self._next_use()

    def end_use(self, place_id: HostPlaceId) -> None:
        """End one use: a load, a registration or a device copy that is read in place.

        After the last use an indexed adapter is kept if it fits the limit. Any other is evicted.
        """
        kept = self._kept[place_id]
        assert kept.num_users > 0, f"place {place_id} is released more often than used"
        kept.num_users -= 1
        if kept.num_users:
            return
        if kept.is_findable:
            self._idle[place_id] = kept
            kept.last_use = self._next_use()
            self._trim()
        else:
            self._evict(kept)

    def drop(self, digest: str) -> None:
        """Evict a content that is not needed any more, now or after its last use."""
        self._evictions_of.pop(digest, None)
        kept = self._by_digest.pop(digest, None)
        if kept is None:
            return
        kept.is_findable = False
        self.changed.add(digest)
        self.evictions[EvictionReason.DROPPED] += 1
        if not kept.num_users:
            self._evict(kept)

    def keep_within(self, num_bytes: int) -> None:
        """Limit all adapters to ``num_bytes`` from now on, by evicting idle ones."""
        self._limit_bytes = min(num_bytes, self._max_bytes)
        self._trim(EvictionReason.KV)

    def take_evictions(self) -> tuple[HostPlaceId, ...]:
        """Return the evictions for the next plan."""
        evictions, self._evictions = tuple(self._evictions), []
        return evictions

    def evict_again(self, place_ids: Sequence[HostPlaceId]) -> None:
        """Repeat evictions of a plan that was lost."""
        self._evictions = [*place_ids, *self._evictions]

    def _place(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        starts = self._make_room(layer_bytes)
        if starts is None:
            return None
        extents = tuple(zip(starts, layer_bytes, strict=True))
        place_id = HostPlaceId(next(self._ids))
        self._kept[place_id] = _Kept(place_id, extents, self.section_bytes)
        return HostPlace(place_id, extents, is_filled=False)

    def _make_room(self, sizes: Sequence[int]) -> list[int] | None:
        """Take ranges with as few evictions as possible. None, without evictions, if none fit."""
        starts = _take(self._ranges, sizes)
        if starts is not None:
            return starts
        victims = self._victims(sizes)
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim, EvictionReason.ADAPTER)
            self.lost_use = max(victim.last_use, self.lost_use or 0)
        starts = _take(self._ranges, sizes)
        assert starts is not None, sizes
        return starts

    def _victims(self, sizes: Sequence[int]) -> list[_Kept] | None:
        """Return the idle adapters to evict for ranges of these sizes. None if none fit then."""
        if sum(sizes) > self.capacity_bytes - self._used_bytes():
            return None
        ranges = self._ranges.copy()
        victims: list[_Kept] = []
        idle = iter(self._idle.values())
        while _take(ranges, sizes) is None:
            victim = next(idle, None)
            if victim is None:
                return None
            victims.append(victim)
            for start, size in victim.extents:
                ranges.free(start, size)
        return victims

    def _trim(self, reason: EvictionReason = EvictionReason.ADAPTER) -> None:
        """Evict idle adapters while the limit is exceeded."""
        while self._idle and self.taken_bytes > self._limit_bytes:
            self._evict(next(iter(self._idle.values())), reason)

    def _evict(self, kept: _Kept, reason: EvictionReason | None = None) -> None:
        """Evict an adapter. ``reason``: None = it was not indexed."""
        assert not kept.num_users, "an adapter in use is evicted"
        if reason is not None:
            self.evictions[reason] += 1
            self._evictions_of.setdefault(kept.digest, Counter())[reason] += 1
            self.changed.add(kept.digest)
        self._idle.pop(kept.place_id, None)
        del self._kept[kept.place_id]
        if kept.is_findable:
            del self._by_digest[kept.digest]
        for start, size in kept.extents:
            self._ranges.free(start, size)
        self._evictions.append(kept.place_id)

    def _used_bytes(self) -> int:
        return self.taken_bytes - self.idle_bytes


def _take(ranges: RangeAllocator, sizes: Sequence[int]) -> list[int] | None:
    """Take one range for all sizes, or one for each. None, without taking any, if neither fits."""
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
