"""The served adapters by name, and the life cycle of their versions.

name -> entry -> immutable ``AdapterVersion``. A reload makes a new version; the old one serves the
requests that hold it and is freed with the last of them. Pure bookkeeping: the caller reads files,
holds the bytes, frees the versions that this module returns, and reports when they have left the
device.

    begin_loading -> outlined it serves; the first request has it loaded again, completely
                  -> ready    the version serves; with other content it replaces the older one
                  -> failed   a first load is kept as "failed", a reload leaves the old one serving
    remove        -> draining no new request; freed at once, or with the last reference
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NewType

from ..adapter import AdapterFacts, AdapterOutline
from ..engine_state import Residency
from ..errors import UnknownModelError
from ..plan import AdapterId
from .content import AdapterContent, FileStamp
from .conventions import NO_CONVENTIONS, AdapterConventions
from .info import AdapterInfo, DrainingVersion
from .mix import LoRAMix
from .names import DRAINING, FAILED, LOADING, READY, check_adapter_name, unavailable_adapter, unknown_name
from .resolved import AdapterPath

LoadId = NewType("LoadId", int)  # one attempt to load; never reused


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable content under a name."""

    adapter_id: AdapterId
    name: str
    path: AdapterPath
    facts: AdapterFacts
    conventions: AdapterConventions = NO_CONVENTIONS
    weights_stamps: tuple[FileStamp, ...] | None = None  # of the files that it was read from
    # Digest of configuration and tensors, hexadecimal; "" = a load must read the values first.
    content: str = ""

    def has(self, content: AdapterContent | None) -> bool:
        """Whether the content that was read, if any, is this version's, as far as that is known."""
        if content is None or not self.content:
            return True
        return self.has_weights(content.facts) and content.conventions == self.conventions

    def has_weights(self, facts: AdapterFacts) -> bool:
        """Whether these facts are of its weights."""
        return facts in (self.facts, replace(self.facts, digest=self.content))

    @property
    def label(self) -> str:
        """Its content, and after a plus the digest of its conventions, if it has any.

        Empty if its values have not been read.
        """
        return "+".join(filter(None, (self.content, self.conventions.digest))) if self.content else ""

    @property
    def digest(self) -> str:
        """What stands for its content in memory; its digest, if it was read before any load."""
        return self.facts.digest

    @property
    def rank(self) -> int:
        """The largest rank of its targets."""
        return self.facts.rank

    @property
    def num_bytes(self) -> int:
        return self.facts.num_bytes

    @property
    def scale(self) -> float:
        """Factor on the whole adapter."""
        return self.facts.scale


@dataclass(frozen=True, slots=True)
class Registered:
    """The result of a load: the version in service, and versions to free."""

    version: AdapterVersion
    is_new: bool  # False: the weights are those of the version in service before
    freed: tuple[AdapterId, ...] = ()


@dataclass(slots=True)
class _Entry:
    """The state of a name."""

    path: AdapterPath
    version: AdapterVersion | None = None  # serves new requests
    outline: AdapterOutline | None = None  # of content not read yet; serves once it has been read
    load_id: LoadId | None = None  # the load that is running
    load_path: AdapterPath = ""  # and its path
    reason: str | None = None  # of the last load's failure
    is_pinned: bool = False  # applies to every version

    @property
    def state(self) -> str:
        if self.version is not None or self.outline is not None:
            return READY
        return LOADING if self.load_id is not None else FAILED


@dataclass(slots=True)
class _Held:
    """A version in memory, and the number of requests that refer to it."""

    version: AdapterVersion
    num_references: int = 0
    is_draining: bool = False


@dataclass(slots=True)
class AdapterRegistry:
    """Names, versions and references. Not thread-safe: the engine loop owns it."""

    next_adapter_id: Callable[[], AdapterId]  # never repeats, never BASE_ADAPTER
    base_names: Collection[str] = ()  # names of the base model, not allowed
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _held: dict[AdapterId, _Held] = field(default_factory=dict)
    _ids_of: dict[str, set[AdapterId]] = field(default_factory=dict)  # in memory, by content
    _draining: dict[str, dict[AdapterId, _Held]] = field(default_factory=dict)  # the oldest first
    _freed: dict[AdapterId, AdapterVersion] = field(default_factory=dict)  # and not yet removed
    _num_loads: int = 0

    def path_of(self, name: str) -> AdapterPath | None:
        """The path of ``name``; None if it is not registered."""
        entry = self._entries.get(name)
        return None if entry is None else entry.path

    def outlined_path(self, name: str) -> AdapterPath | None:
        """The path of ``name`` if it has no version before its first use, else None."""
        entry = self._entries.get(name)
        return None if entry is None or entry.outline is None else entry.path

    def unread_path(self, name: str) -> AdapterPath | None:
        """The path of ``name`` if its content has not been read yet, else None."""
        version = self.serving(name)
        return self.outlined_path(name) if version is None or version.content else version.path

    def is_loading(self, name: str) -> bool:
        """Whether a load of ``name`` has begun and not ended."""
        entry = self._entries.get(name)
        return entry is not None and entry.load_id is not None

    def begin_loading(self, name: str, path: AdapterPath) -> LoadId:
        """Start a load or reload; ``ready`` or ``failed`` ends it.

        Raises ``AdapterError`` if the name is not allowed, ``AdapterUnavailableError`` while it is
        already being loaded.
        """
        if isinstance(path, str):  # a mix has a name that no other adapter can have
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
        self, name: str, path: AdapterPath, load_id: LoadId, content: AdapterContent
    ) -> Registered | None:
        """End a load successfully; None if the name was removed meanwhile (free the bytes).

        If the weights equal those of the version in service, it stays, now with ``path``, and the
        bytes just read are not needed. New conventions apply to new requests; running requests
        already have what they need of the older ones.
        """
        entry = self._entry_of_load(name, load_id)
        if entry is None:
            return None
        entry.load_id, entry.reason, entry.path, entry.outline = None, None, path, None
        old = entry.version
        facts = content.facts
        if old is not None and old.has_weights(facts):
            entry.version = self._held[old.adapter_id].version = replace(
                old, path=path, conventions=content.conventions, weights_stamps=content.weights_stamps
            )
            return Registered(entry.version, is_new=False)
        version = AdapterVersion(
            self.next_adapter_id(),
            name,
            path,
            facts,
            content.conventions,
            content.weights_stamps,
            facts.digest if content.is_read else "",
        )
        taken = version.adapter_id in self._held or version.adapter_id in self._freed
        assert not taken, "adapter ids are never reused"
        self._held[version.adapter_id] = _Held(version)
        self._ids_of.setdefault(facts.digest, set()).add(version.adapter_id)
        entry.version = version
        return Registered(version, is_new=True, freed=self._drain(old))

    def outlined(self, name: str, load_id: LoadId, outline: AdapterOutline) -> None:
        """End a first load before everything is read: the first request has it loaded again."""
        entry = self._entry_of_load(name, load_id)
        if entry is not None and entry.version is None:
            entry.load_id, entry.outline, entry.reason = None, outline, None
            entry.path = entry.load_path

    def failed(self, name: str, load_id: LoadId, reason: str) -> None:
        """End a load with a failure; a version in service stays in service."""
        entry = self._entry_of_load(name, load_id)
        if entry is None:
            return
        entry.load_id, entry.reason = None, reason
        if entry.load_path == entry.path:
            entry.outline = None

    def has_read(self, digest: str, content: str) -> set[str]:
        """The first load of the versions of ``digest`` has read ``content``; return their names."""
        for adapter_id in self._ids_of.get(digest, ()):
            held = self._held[adapter_id]
            version, entry = held.version, self._entries.get(held.version.name)
            held.version = replace(version, content=content)
            if entry is not None and entry.version is version:
                entry.version = held.version
        return self.names_of((), (digest,))

    def unreadable(self, digest: str, reason: str | None) -> list[tuple[AdapterVersion, bool]]:
        """The files of the versions of ``digest`` are bad: new requests fail with ``reason``.

        None: they have changed, and the next request has them loaded again. Return those that were
        in service, and whether to free them now.
        """
        ended = []
        for adapter_id in tuple(self._ids_of.get(digest, ())):
            version = self._held[adapter_id].version
            entry = self._entries.get(version.name)
            if entry is not None and entry.version is version:
                entry.version, entry.reason = None, reason
                if reason is None:
                    entry.outline = AdapterOutline(version.rank, version.num_bytes, version.facts.left_out)
                ended.append((version, bool(self._drain(version))))
        return ended

    def remove(self, name: str) -> tuple[AdapterId, ...]:
        """Unregister ``name`` and return versions to free now. Raises ``UnknownModelError``."""
        entry = self._entries.pop(name, None)
        if entry is None:
            raise self._unknown(name)
        return self._drain(entry.version)

    def serving(self, name: str) -> AdapterVersion | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.version

    def is_idle(self, name: str) -> bool:
        """Whether no load of ``name`` is running and no request refers to its version."""
        entry = self._entries[name]
        held = None if entry.version is None else self._held[entry.version.adapter_id]
        return entry.load_id is None and (held is None or not held.num_references)

    def largest_unpinned_bytes(self, *, without: str) -> int:
        """The largest unpinned version in service: what requests may need beside pinned ones."""
        served = [
            entry.version or entry.outline
            for name, entry in self._entries.items()
            if not entry.is_pinned and name != without
        ]
        return max((one.num_bytes for one in served if one is not None), default=0)

    def set_pinned(self, name: str, *, is_pinned: bool) -> None:
        """Set it for a registered name and all its future versions."""
        self._entries[name].is_pinned = is_pinned

    def is_pinned(self, name: str) -> bool:
        """Whether the versions of ``name`` are pinned to the device."""
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
        """Take a reference; a version is not freed while it has references."""
        self._held[adapter_id].num_references += 1

    def release(self, adapter_id: AdapterId) -> bool:
        """Return a reference; True = the version must be freed now."""
        held = self._held[adapter_id]
        assert held.num_references > 0, f"adapter {adapter_id} is released more than acquired"
        held.num_references -= 1
        return self._free_if_drained(held)

    def label(self, adapter_id: AdapterId) -> str:
        """The label of a version that a request refers to."""
        return self._held[adapter_id].version.label

    def version(self, adapter_id: AdapterId) -> AdapterVersion:
        """A version in service or draining, or freed and still on the device."""
        held = self._held.get(adapter_id)
        return self._freed[adapter_id] if held is None else held.version

    def remove_version(self, adapter_id: AdapterId) -> AdapterVersion | None:
        """Remove a freed version that has left the device; return it, or None if it is unknown."""
        return self._freed.pop(adapter_id, None)

    def digests(self) -> set[str]:
        """Return the contents of all versions, including freed ones still on the device."""
        return self._ids_of.keys() | {version.digest for version in self._freed.values()}

    def names_of(self, adapter_ids: Iterable[AdapterId], digests: Collection[str]) -> set[str]:
        """Names with one of these versions or contents."""
        ids = set(adapter_ids).union(*(self._ids_of.get(digest, ()) for digest in digests))
        return {self._held[key].version.name for key in ids if key in self._held}

    def info(self, name: str, residency_of: Callable[[AdapterVersion], Residency]) -> AdapterInfo | None:
        """Return the published state of a name; None if no adapter has it any more.

        Mixes are not published.
        """
        if LoRAMix.named(name) is not None:
            return None
        entry = self._entries.get(name)
        draining = [
            DrainingVersion(
                held.version.content, held.version.rank, held.version.num_bytes, residency_of(held.version)
            )
            for held in self._draining.get(name, {}).values()
        ]
        if entry is None:
            return _draining_info(name, self._draining.get(name, {}), draining)
        version, served = entry.version, entry.version or entry.outline
        is_final = entry.state in (FAILED, READY)
        return AdapterInfo(
            name=name,
            path=str(entry.path if version is None else version.path),
            state=entry.state,
            reason=entry.reason if is_final else None,
            rank=0 if served is None else served.rank,
            num_bytes=0 if served is None else served.num_bytes,
            version="" if version is None else version.content,
            conventions=None if version is None else version.conventions,
            pinned=entry.is_pinned,
            residency=Residency() if version is None else residency_of(version),
            draining=tuple(draining),
            left_out=_left_out(entry),
        )

    def infos(self, residency_of: Callable[[AdapterVersion], Residency]) -> tuple[AdapterInfo, ...]:
        """Return the published state of all names, sorted."""
        names = sorted({*self._entries, *self._draining})
        infos = [self.info(name, residency_of) for name in names]
        return tuple(info for info in infos if info is not None)

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
    """The newest version of a removed name, and its other draining versions."""
    if not held:
        return None
    newest = [*held.values()][-1].version
    *older, last = draining
    return AdapterInfo(
        name,
        str(newest.path),
        DRAINING,
        None,
        newest.rank,
        newest.num_bytes,
        newest.content,
        residency=last.residency,
        draining=tuple(older),
    )
