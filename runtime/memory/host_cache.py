"""Which adapters are kept in the host's memory, and where they lie. Pure account keeping.

It hands out the ranges itself, so that a load finds room whenever the account says so. The owner of
the memory only follows commands: it makes a place where a load or a registration was given one, and
carries out evictions before anything that is commanded with or after them.

An adapter is kept once per content. The extents of its layers lie in one range where one is free
and apart where not, so memory is lost to fragmentation only if no free range is as large as one
*layer*. Nothing moves, and nothing that is in use is evicted.
"""

import itertools
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...shm.arena_ranges import RangeAllocator
from ..plan import HostPlace, HostPlaceId
from .adapter_log import EvictionReason


@dataclass(slots=True, eq=False)
class _Kept:
    """An adapter in the host's memory, or on its way there."""

    place_id: HostPlaceId
    extents: tuple[tuple[int, int], ...]
    digest: str = ""  # of its content, once it is there
    is_findable: bool = False  # by its content
    num_users: int = 1  # loads and registrations under way, device copies that are read in place
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(size for _, size in self.extents)


class HostCache:
    """Contents, uses and least-recently-used order of the adapters in the host's memory."""

    def __init__(
        self, capacity_bytes: int, *, is_device_memory: bool = False, idle_bytes: int | None = None
    ) -> None:
        """Nothing is kept yet.

        Args:
            capacity_bytes: Of memory, or of addresses where memory is taken with the adapters.
            is_device_memory: The device's kernels read the adapters here.
            idle_bytes: What all adapters may take while there is one that nothing uses.
        """
        self.is_device_memory = is_device_memory
        self._ranges = RangeAllocator(capacity_bytes, mmap.PAGESIZE)
        self._idle_bytes = self._ranges.capacity_bytes if idle_bytes is None else idle_bytes
        self._limit_bytes = self._idle_bytes
        self._kept: dict[HostPlaceId, _Kept] = {}
        self._by_digest: dict[str, _Kept] = {}
        self._idle: dict[HostPlaceId, _Kept] = {}  # nothing uses them; oldest use first
        self._evictions: list[HostPlaceId] = []  # not yet commanded
        self._ids = itertools.count(1)
        self.changed: set[str] = set()  # contents, until they are taken
        self.evictions: Counter[EvictionReason] = Counter()
        self._evictions_of: dict[str, Counter[EvictionReason]] = {}  # by content

    @property
    def capacity_bytes(self) -> int:
        """What all adapters together may take."""
        return self._ranges.capacity_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of all adapters."""
        return self._ranges.capacity_bytes - self._ranges.free_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of adapters that nothing uses. O(such adapters)."""
        return sum(kept.num_bytes for kept in self._idle.values())

    @property
    def has_evictions(self) -> bool:
        """Whether evictions wait to be commanded."""
        return bool(self._evictions)

    @property
    def place_ids(self) -> frozenset[HostPlaceId]:
        """All places that are in use or kept."""
        return frozenset(self._kept)

    @property
    def num_used(self) -> int:
        """Adapters that something uses."""
        return len(self._kept) - len(self._idle)

    def contains(self, digest: str) -> bool:
        """Whether the adapter of this content can be loaded without reading files."""
        return digest in self._by_digest

    def num_bytes_of(self, digest: str) -> int:
        """What the adapter of this content takes; 0 if it is not here as a whole."""
        kept = self._by_digest.get(digest)
        return 0 if kept is None else kept.num_bytes

    def evictions_of(self, digest: str) -> Mapping[EvictionReason, int]:
        """Why and how often this content had to go."""
        return self._evictions_of.get(digest, {})

    def begin_load(self, digest: str, layer_bytes: Sequence[int]) -> HostPlace | None:
        """Use the adapter of this content until ``end_use``; where it is, or is to be read to.

        ``layer_bytes``: of its layers, in whole pages. It may take more than is left; what nothing
        uses goes with the next ``keep_within``. None if there is no room now; it comes when other
        uses end.
        """
        kept = self._by_digest.get(digest)
        if kept is None:
            return self._place(layer_bytes)
        kept.num_users += 1
        self._idle.pop(kept.place_id, None)
        return HostPlace(kept.place_id, kept.extents, is_filled=True)

    def begin_registration(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        """A place for an adapter that is being read for the first time, until ``end_use``.

        None if it could not stay there when nothing used it.
        """
        if sum(layer_bytes) > self._limit_bytes - self._used_bytes():
            return None
        place = self._place(layer_bytes)
        self._trim()
        return place

    def filled(self, place_id: HostPlaceId, digest: str) -> None:
        """The content of a place that is in use is whole, and may be found."""
        kept = self._kept[place_id]
        assert kept.num_users and not kept.digest, kept
        kept.digest = digest
        self.changed.add(digest)
        known = self._by_digest.get(digest)
        if known is None:
            kept.is_findable, self._by_digest[digest] = True, kept
        elif self._idle.pop(known.place_id, None) is not None:  # it was asked for just now
            self._idle[known.place_id] = known

    def end_use(self, place_id: HostPlaceId) -> None:
        """A load, a registration or a device copy that is read in place has ended.

        With the last use the adapter is kept while there is room, if it can be found.
        """
        kept = self._kept[place_id]
        assert kept.num_users > 0, f"place {place_id} is let go more often than it is used"
        kept.num_users -= 1
        if kept.num_users:
            return
        if kept.is_findable:
            self._idle[place_id] = kept
            self._trim()
        else:
            self._evict(kept)

    def drop(self, digest: str) -> None:
        """This content is not needed any more: it is evicted now, or with its last use."""
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
        """Keep adapters that nothing uses only while all take no more than this."""
        self._limit_bytes = min(num_bytes, self._idle_bytes)
        self._trim(EvictionReason.KV)

    def take_evictions(self) -> tuple[HostPlaceId, ...]:
        """Return the evictions to be carried out before what is commanded next."""
        evictions, self._evictions = tuple(self._evictions), []
        return evictions

    def evict_again(self, place_ids: Sequence[HostPlaceId]) -> None:
        """It is unknown whether these evictions were carried out: command them again."""
        self._evictions = [*place_ids, *self._evictions]

    def check_invariants(self) -> None:
        """Assert that places do not overlap, that nothing is lost, and that uses add up."""
        self._ranges.check_invariants()
        end = 0
        for start, size in sorted(part for kept in self._kept.values() for part in kept.extents):
            assert start >= end, "two places overlap"
            end = start + size
        assert sum(kept.num_bytes for kept in self._kept.values()) == self.taken_bytes
        assert not self._kept.keys() & set(self._evictions)
        for kept in self._kept.values():
            is_idle = kept.place_id in self._idle
            assert is_idle == (kept.num_users == 0), kept
            assert kept.is_findable == (self._by_digest.get(kept.digest) is kept), kept
            assert kept.is_findable or not is_idle, kept

    def _place(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        starts = self._make_room(layer_bytes)
        if starts is None:
            return None
        extents = tuple(zip(starts, layer_bytes, strict=True))
        place_id = HostPlaceId(next(self._ids))
        self._kept[place_id] = _Kept(place_id, extents)
        return HostPlace(place_id, extents, is_filled=False)

    def _make_room(self, sizes: Sequence[int]) -> list[int] | None:
        """Take ranges, evicting as few as the order allows; None, and no eviction, if none fits."""
        starts = _take(self._ranges, sizes)
        if starts is not None or sum(sizes) > self._ranges.capacity_bytes - self._used_bytes():
            return starts
        ranges = self._ranges.copy()
        victims: list[_Kept] = []
        for victim in self._idle.values():
            victims.append(victim)
            for start, size in victim.extents:
                ranges.free(start, size)
            if (starts := _take(ranges, sizes)) is not None:
                break
        else:
            return None
        for victim in victims:
            self._evict(victim, EvictionReason.ADAPTER)
        taken = _take(self._ranges, sizes)
        assert taken == starts, (taken, starts)
        return starts

    def _trim(self, reason: EvictionReason = EvictionReason.ADAPTER) -> None:
        """Evict until the limit is kept, or nothing is left that may go."""
        while self._idle and self.taken_bytes > self._limit_bytes:
            self._evict(next(iter(self._idle.values())), reason)

    def _evict(self, kept: _Kept, reason: EvictionReason | None = None) -> None:
        """``reason``: None = it could not be found (any more)."""
        assert not kept.num_users, "what is in use stays"
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
