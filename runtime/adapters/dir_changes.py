"""Finds adapters of a directory that were added, changed or removed, once their files are stable.

Pure: observations and the time are passed in. An unreadable entry does not count as removed: its
known state stays. Time alone does not distinguish a writer that pauses from one that has finished,
so a file must also have the length in its header. A file that stays incomplete is reported in the
end, so that its adapter fails with a reason.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .content import FileStamp

SETTLE_S = 2.0
# After this, an incomplete file is reported, and a missing directory counts as removed.
GIVE_UP_S = 30.0


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """The state of an adapter's directory, without its contents."""

    path: str
    stamps: tuple[FileStamp | None, ...]  # of each file; None = it does not exist
    is_complete: bool = True  # the weights have the length in their header


@dataclass(frozen=True, slots=True)
class DirChanges:
    """Stable changes. Paths by name."""

    changed: Mapping[str, str]  # new, or other content
    removed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WatchState:
    """What metrics show of the watched directory."""

    num_unreadable: int = 0  # entries that cannot be read now; the directory itself counts as one
    unseen_s: int = 0  # since the directory was looked at last, if that is 30 s or more


@dataclass(slots=True)
class DirState:
    """The known state of one directory."""

    known: dict[str, FoundAdapter]  # as reported
    _unsettled: dict[str, tuple[FoundAdapter, float]] = field(default_factory=dict)
    _missing_since_s: float | None = None  # the directory itself

    @property
    def is_settled(self) -> bool:
        """Whether the last observation leaves no pending change."""
        return not self._unsettled

    def see(
        self,
        found: Mapping[str, FoundAdapter],
        now_s: float,
        unreadable: Collection[str] = (),
        *,
        is_missing: bool = False,
    ) -> DirChanges:
        """Add an observation; return the changes that have been stable for long enough.

        ``unreadable``: names of entries that cannot be read, with all below them; "" is the whole
        directory. ``is_missing``: the directory does not exist; it may be about to be replaced.
        """
        if is_missing:
            since_s = now_s if self._missing_since_s is None else self._missing_since_s
            self._missing_since_s = since_s
            if now_s - since_s < GIVE_UP_S:
                return DirChanges({}, {})
            unreadable = ()
        else:
            self._missing_since_s = None
        changed: dict[str, str] = {}
        for name, adapter in found.items():
            if is_same(self.known.get(name), adapter):
                self._unsettled.pop(name, None)
                continue
            before, since_s = self._unsettled.get(name, (None, now_s))
            if not is_same(before, adapter):
                since_s = now_s
            self._unsettled[name] = adapter, since_s
            if now_s - since_s >= (SETTLE_S if adapter.is_complete else GIVE_UP_S):
                changed[name] = adapter.path
                self.known[name] = self._unsettled.pop(name)[0]
        for name in self._unsettled.keys() - found.keys():
            del self._unsettled[name]
        lost = self.known.keys() - found.keys()
        gone = sorted(name for name in lost if not any(_is_at(name, one) for one in unreadable))
        return DirChanges(changed, {name: self.known.pop(name).path for name in gone})


def _is_at(name: str, entry: str) -> bool:
    return entry in ("", name) or name.startswith(f"{entry}/")


def is_same(before: FoundAdapter | None, now: FoundAdapter) -> bool:
    """Whether nothing was written in between."""
    return before is not None and (before.path, before.stamps) == (now.path, now.stamps)
