"""Which adapters of a directory have come, changed and gone, once nobody writes them any more.

Pure: what is found, and the time, are passed in. What cannot be read is not gone: what is known of
it stays as it is. A writer that stops halfway is not told from one
that has ended by time alone, so a file must also have the length that its header says; one that
never gets it is told after all, for its adapter to fail with a reason.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .content import FileStamp

SETTLE_S = 2.0
GIVE_UP_S = 30.0  # what is incomplete for so long is no copy under way; no directory is replaced


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """What is seen of an adapter's directory without reading it."""

    path: str
    stamps: tuple[FileStamp | None, ...]  # of each file that is read; None = there is none
    is_complete: bool = True  # the weights are as long as their header says


@dataclass(frozen=True, slots=True)
class DirChanges:
    """What has settled. Paths by name."""

    changed: Mapping[str, str]  # new, or other content
    removed: Mapping[str, str]


@dataclass(slots=True)
class DirState:
    """What is known of one directory."""

    known: dict[str, FoundAdapter]  # as they were told
    _unsettled: dict[str, tuple[FoundAdapter, float]] = field(default_factory=dict)
    _missing_since_s: float | None = None  # the directory itself

    @property
    def is_settled(self) -> bool:
        """Whether nothing may come of what was seen last."""
        return not self._unsettled

    def see(
        self, found: Mapping[str, FoundAdapter], now_s: float, unreadable: Collection[str] = (),
        *, is_missing: bool = False,
    ) -> DirChanges:  # fmt: skip
        """Take what is there now; return what has been so for long enough.

        ``unreadable``: names of what cannot be read, of which nothing below is known either; ""
        stands for all. ``is_missing``: there is no directory, which may be about to be replaced.
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
    """Whether ``name`` is that of ``entry``, or of something below it."""
    return entry in ("", name) or name.startswith(f"{entry}/")


def is_same(before: FoundAdapter | None, now: FoundAdapter) -> bool:
    """Whether nothing has been written in between."""
    return before is not None and (before.path, before.stamps) == (now.path, now.stamps)
