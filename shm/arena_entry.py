"""What the arena hands out: entries with their regions, and the error when there is no room."""

import enum
import itertools
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .errors import ShmError
from .region import ALIGNMENT_BYTES

PAGE_BYTES = mmap.PAGESIZE  # what extents are rounded to, so that their memory can be returned
assert PAGE_BYTES % ALIGNMENT_BYTES == 0


class ArenaFullError(ShmError):
    """There is no room for an adapter: what it needs, and what is in the way."""

    def __init__(
        self, needed_bytes: int, limit_bytes: int, referenced_bytes: int,
        *, hint: str, largest_free_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """``limit_bytes``: of the arena; ``referenced_bytes``: of it, what is in use now.

        ``hint``: what can be done about it.
        ``largest_free_bytes``: the longest free range, if there is room but not in one piece.
        """
        pieces = (
            "" if largest_free_bytes is None
            else f", with {largest_free_bytes} bytes at most free in one piece"
        )  # fmt: skip
        super().__init__(
            f"an adapter of {needed_bytes} bytes does not fit the host adapter arena of "
            f"{limit_bytes} bytes, {referenced_bytes} of which are in use now{pieces}; {hint}"
        )
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.referenced_bytes = referenced_bytes

    @property
    def is_for_good(self) -> bool:
        """Whether it would not fit the empty arena either."""
        return self.needed_bytes > self.limit_bytes


class EntryState(enum.Enum):
    """Where an entry stands."""

    FILLING = "filling"
    READY = "ready"
    ABANDONED = "abandoned"  # never published, and still referenced
    GONE = "gone"  # a handle kept too long


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A region that is wanted; regions of a layer come one after the other, layers ascending."""

    layer: int
    input_group: int
    num_bytes: int  # a multiple of 64


@dataclass(frozen=True, slots=True)
class Region:
    """A region that has its place."""

    layer: int
    input_group: int
    offset: int  # in the arena, a multiple of 64
    num_bytes: int


@dataclass(slots=True, eq=False)
class ArenaEntry:
    """One adapter in the arena. The arena alone writes its fields."""

    regions: tuple[Region, ...]
    extents: tuple[tuple[int, int], ...]  # (offset, bytes), whole pages
    state: EntryState = EntryState.FILLING
    digest: str = ""
    num_references: int = 1
    last_use: int = 0  # logical time
    is_discarded: bool = False  # goes with its last reference
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(size for _, size in self.extents)


Rank = Callable[[Sequence[ArenaEntry]], Iterable[ArenaEntry]]
"""Orders entries that nothing refers to, those to evict first in front. Must not change them."""


def least_recently_used(entries: Sequence[ArenaEntry]) -> Iterable[ArenaEntry]:
    """The order of their last uses."""
    return sorted(entries, key=lambda entry: entry.last_use)


def entry_bytes(regions: Sequence[RegionSpec]) -> int:
    """What an adapter with these regions takes: each layer is rounded up to whole pages."""
    return sum(extent_sizes(regions))


def extent_sizes(regions: Sequence[RegionSpec]) -> list[int]:
    """Bytes of each layer's extent, in whole pages."""
    sizes = []
    for _, members in itertools.groupby(regions, key=lambda region: region.layer):
        num_bytes = sum(member.num_bytes for member in members)
        sizes.append(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return sizes


def place_regions(regions: Sequence[RegionSpec], starts: Sequence[int]) -> Iterable[Region]:
    """Place regions one after the other in the extents of their layers."""
    layers = itertools.groupby(regions, key=lambda region: region.layer)
    for (_, members), start in zip(layers, starts, strict=True):
        position = start
        for spec in members:
            yield Region(spec.layer, spec.input_group, position, spec.num_bytes)
            position += spec.num_bytes
