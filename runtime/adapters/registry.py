"""The adapters that are served by name, and the life of their versions.

name -> entry -> immutable ``AdapterVersion``. A reload makes a new version; the old one serves the
requests that hold it and is freed with the last of them. Pure bookkeeping: the caller reads files,
holds the bytes, frees what this module says may be freed, and says when it has left the device.

    begin_loading -> outlined it serves, and who asks for it first has it loaded again, to the end
                  -> ready    the version serves; with other content it replaces the older one
                  -> failed   a first load is kept as "failed", a reload leaves the old one serving
    remove        -> draining no new request; freed at once, or with the last reference
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NewType

from ..adapter import AdapterFacts, AdapterOutline
from ..errors import UnknownModelError
from ..plan import AdapterId
from .content import AdapterContent, FileStamp
from .conventions import NO_CONVENTIONS, AdapterConventions
from .info import AdapterInfo, DrainingVersion, Residency
from .names import (
    DRAINING,
    FAILED,
    LOADING,
    READY,
    check_adapter_name,
    unavailable_adapter,
    unknown_name,
)

LoadId = NewType("LoadId", int)  # one attempt to load; never reused


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable content under a name."""

    adapter_id: AdapterId
    name: str
    path: str
    facts: AdapterFacts
    conventions: AdapterConventions = NO_CONVENTIONS
    weights_stamps: tuple[FileStamp, ...] | None = None  # of the files that hold its facts

    @property
    def label(self) -> str:
        """Its digest, and behind a plus that of its conventions if it has any."""
        return "+".join(filter(None, (self.digest, self.conventions.digest)))

    @property
    def digest(self) -> str:
        """Digest of configuration and tensors, hexadecimal."""
        return self.facts.digest

    @property
    def rank(self) -> int:
        """The largest rank of its targets."""
        return self.facts.rank

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.facts.num_bytes

    @property
    def scale(self) -> float:
        """Factor on the adapter as a whole."""
        return self.facts.scale


@dataclass(frozen=True, slots=True)
class Registered:
    """The end of a load: the version that serves now, and versions to free."""

    version: AdapterVersion
    is_new: bool  # False: the weights are those of the version that served before
    freed: tuple[AdapterId, ...] = ()


@dataclass(slots=True)
class _Entry:
    """What a name stands for."""

    path: str
    version: AdapterVersion | None = None  # serves new requests
    outline: AdapterOutline | None = None  # of what was never read; serves when it has been
    load_id: LoadId | None = None  # the load that is running
    load_path: str = ""  # and from where
    reason: str | None = None  # why the last load failed
    is_pinned: bool = False  # whatever version it is

    @property
    def state(self) -> str:
        if self.version is not None or self.outline is not None:
            return READY
        return LOADING if self.load_id is not None else FAILED


@dataclass(slots=True)
class _Held:
    """A version whose bytes exist, and how many requests refer to it."""

    version: AdapterVersion
    num_references: int = 0
    is_draining: bool = False


@dataclass(slots=True)
class AdapterRegistry:
    """Names, versions and references. Not thread-safe: the engine loop owns it."""

    next_adapter_id: Callable[[], AdapterId]  # never repeats, never BASE_ADAPTER
    base_names: Collection[str] = ()  # names of the base model, taken
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _held: dict[AdapterId, _Held] = field(default_factory=dict)
    _ids_of: dict[str, set[AdapterId]] = field(default_factory=dict)  # held ones, by content
    _draining: dict[str, dict[AdapterId, _Held]] = field(default_factory=dict)  # the oldest first
    _freed: dict[AdapterId, AdapterVersion] = field(default_factory=dict)  # and not yet gone
    _num_loads: int = 0

    def path_of(self, name: str) -> str | None:
        """Where ``name`` comes from; None if it is not registered."""
        entry = self._entries.get(name)
        return None if entry is None else entry.path

    def unread_path(self, name: str) -> str | None:
        """Where the content of ``name`` lies if nobody has read it; None if somebody has."""
        entry = self._entries.get(name)
        return None if entry is None or entry.outline is None else entry.path

    def is_loading(self, name: str) -> bool:
        """Whether a load of ``name`` has begun and not ended."""
        entry = self._entries.get(name)
        return entry is not None and entry.load_id is not None

    def begin_loading(self, name: str, path: str) -> LoadId:
        """Start a load or reload; ``ready`` or ``failed`` ends it.

        Raises ``AdapterError`` if the name is not allowed, ``AdapterUnavailableError`` while it is
        being loaded already.
        """
        check_adapter_name(name, self.base_names)
        entry = self._entries.setdefault(name, _Entry(path))
        if entry.load_id is not None:
            raise unavailable_adapter(name, LOADING, None)
        self._num_loads += 1
        entry.load_id, entry.load_path = LoadId(self._num_loads), path
        if entry.version is None and entry.outline is None:
            entry.path = path
        return entry.load_id

    def ready(
        self, name: str, path: str, load_id: LoadId, content: AdapterContent
    ) -> Registered | None:
        """End a load with success; None if the name was removed meanwhile (free the bytes).

        If the weights are those of the version that serves, they stay, found at ``path`` from now
        on, and the bytes just read are not needed. Other conventions are for requests to come:
        what those that run need of the older ones, they have.
        """
        entry = self._entry_of_load(name, load_id)
        if entry is None:
            return None
        entry.load_id, entry.reason, entry.path, entry.outline = None, None, path, None
        old = entry.version
        facts = content.facts
        if old is not None and old.facts == facts:
            entry.version = self._held[old.adapter_id].version = replace(
                old, path=path, conventions=content.conventions,
                weights_stamps=content.weights_stamps,
            )  # fmt: skip
            return Registered(entry.version, is_new=False)
        version = AdapterVersion(
            self.next_adapter_id(), name, path, facts, content.conventions, content.weights_stamps
        )
        taken = version.adapter_id in self._held or version.adapter_id in self._freed
        assert not taken, "adapter ids are never reused"
        self._held[version.adapter_id] = _Held(version)
        self._ids_of.setdefault(facts.digest, set()).add(version.adapter_id)
        entry.version = version
        return Registered(version, is_new=True, freed=self._drain(old))

    def outlined(self, name: str, load_id: LoadId, outline: AdapterOutline) -> None:
        """End a first load before it has read all: the first request has it loaded again."""
        entry = self._entry_of_load(name, load_id)
        if entry is not None and entry.version is None:
            entry.load_id, entry.outline, entry.reason = None, outline, None
            entry.path = entry.load_path

    def failed(self, name: str, load_id: LoadId, reason: str) -> None:
        """End a load without success; a version that served before goes on serving."""
        entry = self._entry_of_load(name, load_id)
        if entry is None:
            return
        entry.load_id, entry.reason = None, reason
        if entry.load_path == entry.path:
            entry.outline = None

    def remove(self, name: str) -> tuple[AdapterId, ...]:
        """Unregister ``name`` and return versions to free now. Raises ``UnknownModelError``."""
        entry = self._entries.pop(name, None)
        if entry is None:
            raise self._unknown(name)
        return self._drain(entry.version)

    def serving(self, name: str) -> AdapterVersion | None:
        """The version that serves new requests for ``name``, if one does."""
        entry = self._entries.get(name)
        return None if entry is None else entry.version

    def largest_unpinned_bytes(self, *, without: str) -> int:
        """Of the versions that serve: what requests may need beside all that is pinned."""
        served = [
            entry.version or entry.outline
            for name, entry in self._entries.items()
            if not entry.is_pinned and name != without
        ]
        return max((one.num_bytes for one in served if one is not None), default=0)

    def set_pinned(self, name: str, *, is_pinned: bool) -> None:
        """Note it of a name that is registered, for all versions to come."""
        self._entries[name].is_pinned = is_pinned

    def is_pinned(self, name: str) -> bool:
        """Whether the versions of ``name`` are to stay on the device."""
        entry = self._entries.get(name)
        return entry is not None and entry.is_pinned

    def resolve(self, name: str) -> AdapterVersion:
        """The version that serves new requests for ``name``.

        Raises ``UnknownModelError`` with near names, or ``AdapterUnavailableError`` with the state.
        """
        entry = self._entries.get(name)
        if entry is not None and entry.version is not None:
            return entry.version
        if entry is not None:
            state = LOADING if entry.outline is not None else entry.state
            raise unavailable_adapter(name, state, entry.reason)
        if name in self._draining:
            raise unavailable_adapter(name, DRAINING, None)
        raise self._unknown(name)

    def acquire(self, adapter_id: AdapterId) -> None:
        """Take a reference; a version is not freed while one is held."""
        self._held[adapter_id].num_references += 1

    def release(self, adapter_id: AdapterId) -> bool:
        """Give a reference back; True = the version is gone and must be freed now."""
        held = self._held[adapter_id]
        assert held.num_references > 0, f"adapter {adapter_id} is released more than acquired"
        held.num_references -= 1
        return self._free_if_drained(held)

    def version(self, adapter_id: AdapterId) -> AdapterVersion:
        """A version that is served or draining, or was and has not yet left the device."""
        held = self._held.get(adapter_id)
        return self._freed[adapter_id] if held is None else held.version

    def remove_version(self, adapter_id: AdapterId) -> AdapterVersion | None:
        """A freed version has left the device; returns it, None if it is not known."""
        return self._freed.pop(adapter_id, None)

    def digests(self) -> set[str]:
        """Return the contents that some version has, those that have not yet left included."""
        return self._ids_of.keys() | {version.digest for version in self._freed.values()}

    def names_of(self, adapter_ids: Iterable[AdapterId], digests: Collection[str]) -> set[str]:
        """Names with one of these versions or contents."""
        ids = set(adapter_ids).union(*(self._ids_of.get(digest, ()) for digest in digests))
        return {self._held[key].version.name for key in ids if key in self._held}

    def info(
        self, name: str, residency_of: Callable[[AdapterVersion], Residency]
    ) -> AdapterInfo | None:
        """What is to be told of a name; None if nothing has it any more."""
        entry = self._entries.get(name)
        draining = [
            DrainingVersion(
                held.version.digest, held.version.rank, held.version.num_bytes,
                residency_of(held.version),
            )
            for held in self._draining.get(name, {}).values()
        ]  # fmt: skip
        if entry is None:
            return _draining_info(name, self._draining.get(name, {}), draining)
        version, served = entry.version, entry.version or entry.outline
        is_final = entry.state in (FAILED, READY)
        return AdapterInfo(
            name=name,
            path=entry.path if version is None else version.path,
            state=entry.state,
            reason=entry.reason if is_final else None,
            rank=0 if served is None else served.rank,
            num_bytes=0 if served is None else served.num_bytes,
            version="" if version is None else version.digest,
            conventions=None if version is None else version.conventions,
            pinned=entry.is_pinned,
            residency=Residency() if version is None else residency_of(version),
            draining=tuple(draining),
            left_out=_left_out(entry),
        )

    def infos(self, residency_of: Callable[[AdapterVersion], Residency]) -> tuple[AdapterInfo, ...]:
        """What is to be told of all names, sorted."""
        names = sorted({*self._entries, *self._draining})
        infos = [self.info(name, residency_of) for name in names]
        return tuple(info for info in infos if info is not None)

    def check_invariants(self) -> None:
        """Assert that every version is either served or draining with references."""
        served = {
            entry.version.adapter_id: name
            for name, entry in self._entries.items()
            if entry.version is not None
        }
        for adapter_id, held in self._held.items():
            assert held.version.adapter_id == adapter_id
            assert held.num_references >= 0
            assert held.is_draining == (adapter_id not in served)
            assert held.num_references > 0 or not held.is_draining
        for adapter_id, name in served.items():
            assert self._held[adapter_id].version.name == name
        digests = {(one.version.digest, key) for key, one in self._held.items()}
        assert digests == {(digest, key) for digest, ids in self._ids_of.items() for key in ids}
        assert all(self._ids_of.values())
        draining = {key: held for held in self._draining.values() for key in held}
        assert draining.keys() == {key for key, held in self._held.items() if held.is_draining}

    def _entry_of_load(self, name: str, load_id: LoadId) -> _Entry | None:
        entry = self._entries.get(name)
        return entry if entry is not None and entry.load_id == load_id else None

    def _drain(self, version: AdapterVersion | None) -> tuple[AdapterId, ...]:
        if version is None:
            return ()
        held = self._held[version.adapter_id]
        held.is_draining = True
        self._draining.setdefault(version.name, {})[version.adapter_id] = held
        return (version.adapter_id,) if self._free_if_drained(held) else ()

    def _free_if_drained(self, held: _Held) -> bool:
        if held.num_references > 0 or not held.is_draining:
            return False
        adapter_id, name = held.version.adapter_id, held.version.name
        version = self._freed[adapter_id] = self._held.pop(adapter_id).version
        self._ids_of[version.digest].remove(adapter_id)
        if not self._ids_of[version.digest]:
            del self._ids_of[version.digest]
        del self._draining[name][adapter_id]
        if not self._draining[name]:
            del self._draining[name]
        return True

    def _unknown(self, name: str) -> UnknownModelError:
        return unknown_name(name, [*self.base_names, *self._entries])


def _left_out(entry: _Entry) -> tuple[str, ...]:
    if entry.version is not None:
        return entry.version.facts.left_out
    return () if entry.outline is None else entry.outline.left_out


def _draining_info(
    name: str, held: Mapping[AdapterId, _Held], draining: Sequence[DrainingVersion]
) -> AdapterInfo | None:
    """Of a name that was removed: its newest version, and those beside it."""
    if not held:
        return None
    newest = [*held.values()][-1].version
    *older, last = draining
    return AdapterInfo(
        name, newest.path, DRAINING, None, newest.rank, newest.num_bytes, newest.digest,
        residency=last.residency, draining=tuple(older),
    )  # fmt: skip
