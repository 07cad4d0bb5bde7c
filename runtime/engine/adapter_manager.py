"""Adapter operations: reads and checks files in a thread beside the steps, keeps the registry.

Connects three independent parts: the registry (names and versions), the engine core
(references and evictions) and the device side (which reads a directory into packed matrices).
"""

import itertools
import logging
import queue
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ..adapter import AdapterFacts
from ..adapters.dir_changes import WatchState
from ..adapters.dir_watch import LoraDirWatch
from ..adapters.info import AdapterInfo
from ..adapters.mix import LoRAMix
from ..adapters.names import DRAINING, READY, taken_name
from ..adapters.registry import AdapterRegistry, AdapterVersion, Registered
from ..adapters.state_file import AdapterStateFile, RememberedAdapter
from ..engine_state import Residency
from ..errors import AdapterChangedError, AdapterError, CorunError, RequestError
from ..memory.loads import HostRoom
from ..memory.report import Changed
from ..plan import AdapterId, HostPlace, HostPlaceId
from .adapter_mixes import AdapterMixes
from .adapter_reading import AdapterFiles, AdapterReaderThread, ReadDone, ReadJob
from .messages import AdapterOperation, AdaptersChanged, AddAdapter, OperationDone, ReadAdapter, RemoveAdapter

_logger = logging.getLogger(__name__)


class AdapterHost(Protocol):
    """The host's memory, as the manager uses it; see ``HostAdapters``."""

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None: ...

    def remove_content(self, digest: str) -> None: ...


class AdapterResidency(Protocol):
    """The engine core, as the manager uses it; see ``EngineCore``."""

    def drop_adapter(self, adapter_id: AdapterId) -> None: ...

    def adapter_ready(self, adapter_id: AdapterId, facts: AdapterFacts) -> None: ...

    def check_pin(self, num_bytes: int, other_bytes: int, replaced: AdapterId | None) -> None: ...

    def pin_adapter(self, adapter_id: AdapterId, facts: AdapterFacts) -> None: ...

    def unpin_adapter(self, adapter_id: AdapterId) -> None: ...

    def take_changed_adapters(self) -> Changed: ...

    def residency(self, version: AdapterVersion) -> Residency: ...

    def place_registration(self, layer_bytes: Sequence[int]) -> HostRoom: ...

    def end_registration(self, place_id: HostPlaceId, digest: str | None) -> None: ...

    def drop_content(self, digest: str) -> None: ...


class AdapterPublisher:
    """Owned by the adapter manager."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._published: dict[str, AdapterInfo] = {}  # as front ends know them
        self._marked: set[str] = set()  # names of adapters that may have changed
        self.must_publish = False  # new requests depend on a change

    def mark(self, names: Iterable[str], *, must_publish: bool = False) -> None:
        """Mark adapters that may have changed; ``must_publish``: new requests depend on it."""
        self._marked.update(names)
        self.must_publish |= must_publish

    def publish_all(self, device: AdapterResidency) -> tuple[AdapterInfo, ...]:
        """Return all registered adapters; later changes are returned by ``publish``."""
        infos = self._registry.infos(device.residency)
        before, self._published = self._published, {info.name: info for info in infos}
        for info in infos:
            _log_change(info.name, before.get(info.name), info)
        return infos

    def publish(self, device: AdapterResidency) -> AdaptersChanged | None:
        """Return changes since the last publication, or None. O(marked adapters)."""
        changed = device.take_changed_adapters()
        self._marked |= self._registry.names_of(changed.adapter_ids, changed.digests)
        infos, removed = list[AdapterInfo](), list[str]()
        for name in sorted(self._marked):
            before, info = self._published.get(name), self._registry.info(name, device.residency)
            if info == before:
                continue
            _log_change(name, before, info)
            if info is None:
                del self._published[name]
                removed.append(name)
            else:
                self._published[name] = info
                infos.append(info)
        self._marked.clear()
        self.must_publish = False
        return AdaptersChanged(tuple(infos), tuple(removed)) if infos or removed else None


def _log_change(name: str, before: AdapterInfo | None, now: AdapterInfo | None) -> None:
    """Log an adapter's new level, and parts of its file that are not used, if they have changed."""
    if now is not None and now.left_out and (before is None or before.left_out != now.left_out):
        _logger.info(
            "adapter %r is served without %s, which do not affect text answers", name, "; ".join(now.left_out)
        )
    if _logger.isEnabledFor(logging.DEBUG) and (place := _place(now)) != _place(before):
        _logger.debug("adapter %r: %s -> %s", name, _place(before), place)


def _place(info: AdapterInfo | None) -> str:
    """Return the state and level as text."""
    if info is None:
        return "not registered"
    if info.state not in (READY, DRAINING):
        return info.state
    residency = info.residency
    if residency.level == "partial":
        groups = f"{residency.num_groups_loaded}/{residency.num_groups}"
        return f"{info.state}, partial {groups}"
    return f"{info.state}, {residency.level}"


class AdapterManager:
    """Adds, reloads and removes adapters, and resolves versions for the core.

    All methods except those that say otherwise belong to the engine's thread.
    """

    def __init__(
        self,
        files: AdapterFiles,
        base_names: Collection[str],
        host: AdapterHost,
        state_file: AdapterStateFile | None = None,
        background_cpus: tuple[int, ...] = (),
    ) -> None:
        """``host``: stores adapters as the core of ``attach`` decides.

        ``state_file``: stores adapters loaded by operations. ``background_cpus``: cores of the
        reading thread; () = the caller's.
        """
        self._state_file = state_file
        if state_file is not None:
            state_file.on_written = self.notify
        ids = itertools.count(1)
        self._registry = AdapterRegistry(lambda: AdapterId(next(ids)), base_names)
        self._files = files
        self._host = host
        self._device: AdapterResidency  # of ``attach``
        self._reader = AdapterReaderThread(files, self._make_room, background_cpus)
        self._maybe_unused: set[str] = set()  # digests that may have no version any more
        self._done: list[OperationDone] = []
        self._publisher = AdapterPublisher(self._registry)
        self._watch: LoraDirWatch | None = None
        self._outlining: set[str] = set()  # names with headers being read
        # Operations that wait for a read of the same name.
        self._postponed: dict[str, list[AddAdapter | ReadAdapter]] = {}
        # The ends of first loads: what stands for the content, and its digest or the error.
        self._first_reads: queue.SimpleQueue[tuple[str, str | CorunError]] = queue.SimpleQueue()
        self._mixes = AdapterMixes(self._registry, self._must_read, self._begin_reading, self._unregister)

    def attach(self, device: AdapterResidency) -> None:
        """Set the engine core, which removals need."""
        self._device = device

    @property
    def remembered(self) -> tuple[RememberedAdapter, ...]:
        """Adapters loaded by operations of this engine and of earlier ones."""
        return () if self._state_file is None else self._state_file.adapters

    # Versions, for the core.

    def resolve(self, name: str) -> AdapterVersion:
        """Return the version for new requests; raises ``RequestError``."""
        self._mixes.use(name)
        return self._registry.resolve(name)

    def label(self, adapter_id: AdapterId) -> str:
        """Return the label of a request's version, whose first load may just have ended."""
        self._apply_first_reads()
        return self._registry.label(adapter_id)

    def acquire(self, adapter_id: AdapterId) -> None:
        """Take a reference for a request."""
        self._registry.acquire(adapter_id)

    def release(self, adapter_id: AdapterId) -> bool:
        """Return a request's reference; True = drop the version, which has no name any more."""
        self._publisher.mark((self._registry.version(adapter_id).name,))
        return self._registry.release(adapter_id)

    def version(self, adapter_id: AdapterId) -> AdapterVersion:
        """Return a version that may still be loaded. Called by the loader's thread."""
        return self._registry.version(adapter_id)

    def remove_version(self, adapter_id: AdapterId) -> None:
        """Remove a dropped version that has left the device."""
        version = self._registry.remove_version(adapter_id)
        if version is not None:
            self._publisher.mark((version.name,))
            self._maybe_unused.add(version.digest)
            self._remove_unused_contents()

    # Operations.

    def handle(self, message: AdapterOperation) -> None:
        """Begin an operation; ``poll`` returns its result. Raises ``CorunError`` if refused."""
        if isinstance(message, RemoveAdapter):
            self._remove(message)
            return
        if isinstance(message, AddAdapter | ReadAdapter):
            self._begin(message)
            return
        unread_path = self._registry.unread_path(message.name) if message.pinned else None
        if unread_path is not None:
            self._begin_reading(ReadJob(message.operation_id, message.name, unread_path, pinned=True))
            return
        self.pin_now(message.name, is_pinned=message.pinned)
        if self._state_file is not None:
            self._state_file.pin(message.name, is_pinned=message.pinned)
        self._done.append(OperationDone(message.operation_id))

    def must_wait(self, name: str) -> bool:
        """Whether requests for ``name`` must wait for its files to be read; starts the read."""
        if name in self._outlining:
            return True
        mix = LoRAMix.named(name)
        if mix is not None:
            return self._mixes.must_wait(name, mix)
        path = self._registry.outlined_path(name)
        if path is not None and not self._registry.is_loading(name):
            self._begin_reading(ReadJob(None, name, path, is_first_use=True))
        return path is not None

    def _must_read(self, name: str) -> bool:
        """Whether a mix must wait for the values of ``name`` to be read; starts the read."""
        path = self._registry.unread_path(name)
        if path is not None and not self._registry.is_loading(name):
            self._begin_reading(ReadJob(None, name, path))
        return path is not None

    def add_unread(self, name: str, path: str) -> None:
        """Serve an adapter and read its files on first use.

        Raises ``CorunError`` for problems that show before.
        """
        load_id = self._registry.begin_loading(name, path)
        try:
            outline = self._files.outline(path)
        except CorunError as error:
            self._registry.failed(name, load_id, str(error))
            raise AdapterError(f"adapter {name!r}: {error}") from error
        self._registry.outlined(name, load_id, outline)
        self._publisher.mark((name,))

    def follow(self, watch: LoraDirWatch) -> None:
        """Add, reload and remove adapters as the watched directory changes."""
        self._watch = watch

    @property
    def watch_state(self) -> WatchState:
        return WatchState() if self._watch is None else self._watch.state

    def _follow_changes(self) -> None:
        while self._watch is not None and (changes := self._watch.take()) is not None:
            for name, path in changes.changed.items():
                self._follow_change(name, path)
            for name, path in changes.removed.items():
                if self._registry.path_of(name) == path:
                    _logger.info("adapter %r was removed from its directory", name)
                    self._unregister(name)
        for name, path in self._reader.answered():
            if self._registry.path_of(name) == path:
                self._follow_change(name, path)

    def _follow_change(self, name: str, path: str) -> None:
        """Load an adapter that was added or changed at ``path``."""
        if self._registry.path_of(name) not in (None, path):
            _logger.warning("%s is not served: adapter %r is served from another path", path, name)
            return
        _logger.info("adapter %r was added or changed: %s", name, path)
        try:
            is_new = self._registry.serving(name) is None
            self._begin_reading(ReadJob(None, name, path, outline_only=is_new))
        except CorunError as error:
            _logger.error("cannot serve adapter %r: %s", name, error)

    def add_now(self, name: str, path: str) -> None:
        """Register an adapter and wait for it. Raises ``CorunError`` with the reason."""
        load_id = self._registry.begin_loading(name, path)
        self._complete_read(self._reader.read_now(ReadJob(0, name, path, load_id)))
        done = self._done.pop()
        if done.error is not None:
            raise AdapterError(f"adapter {name!r}: {done.error}")

    def pin_now(self, name: str, *, is_pinned: bool) -> None:
        """Pin ``name`` to the device, or unpin it.

        Raises ``RequestError`` if the adapter is unknown or not ready, or if there is no room.
        """
        version = self._registry.resolve(name)
        if is_pinned:
            self._check_pin(name, version.facts, version)
            self._device.pin_adapter(version.adapter_id, version.facts)
        else:
            self._device.unpin_adapter(version.adapter_id)
        self._registry.set_pinned(name, is_pinned=is_pinned)
        self._publisher.mark((name,))

    def poll(self, *, is_due: bool = True) -> list[OperationDone | AdaptersChanged]:
        """Return changes of adapters, then the results of ended operations.

        Unless ``is_due``, changes are returned only with results or if requests need them.
        """
        self._mixes.drop_unused()
        self._follow_changes()
        self._apply_first_reads()
        for read in self._reader.take():
            self._complete_read(read)
            self._begin_postponed(read.job.name)
        self._remove_unused_contents()
        done: list[OperationDone] = []
        if self._state_file is None or self._state_file.is_written:
            done, self._done = self._done, []
        must_publish = is_due or done or self._publisher.must_publish
        changes = self._publisher.publish(self._device) if must_publish else None
        return [*done] if changes is None else [changes, *done]

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return all registered adapters; later changes are returned by ``poll``."""
        return self._publisher.publish_all(self._device)

    def fileno(self) -> int:
        """A descriptor that is readable while ``poll`` would return a result."""
        return self._reader.fileno()

    def close(self) -> None:
        """Stop the threads after the current read; drop waiting reads. Idempotent."""
        if self._watch is not None:
            self._watch.close()
        if self._state_file is not None:
            self._state_file.close()
        self._reader.close()

    def notify(self) -> None:
        """Wake the engine's thread to ``poll``. Called by any thread."""
        self._reader.notify()

    def first_read_ended(self, digest: str, end: str | CorunError) -> None:
        """The first load of a version has read its files; see ``OnFirstRead``. Any thread."""
        self._first_reads.put((digest, end))
        self.notify()

    def _apply_first_reads(self) -> None:
        while not self._first_reads.empty():
            digest, end = self._first_reads.get()
            if isinstance(end, str):
                self._publisher.mark(self._registry.has_read(digest, end))
                continue
            is_bad = not isinstance(end, AdapterChangedError)
            for name in self._end_unread(digest, str(end) if is_bad else None):
                level = logging.ERROR if is_bad else logging.INFO
                _logger.log(level, "cannot serve adapter %r: %s", name, end)

    def _end_unread(self, digest: str, reason: str | None) -> list[str]:
        """End the versions in service of unread values; return their names. See ``unreadable``."""
        self._publisher.mark(self._registry.names_of((), (digest,)), must_publish=True)
        ended = self._registry.unreadable(digest, reason)
        for version, is_free in ended:
            self._device.unpin_adapter(version.adapter_id)
            self._drop((version.adapter_id,) if is_free else ())
        return [version.name for version, _ in ended]

    def _begin(self, message: AddAdapter | ReadAdapter) -> None:
        if self._registry.is_loading(message.name):  # for requests, or for another operation
            self._postponed.setdefault(message.name, []).append(message)
            return
        if isinstance(message, ReadAdapter):
            path = self._registry.outlined_path(message.name)
            if path is None:
                self._done.append(OperationDone(message.operation_id))
            else:
                self._begin_reading(ReadJob(message.operation_id, message.name, path, is_first_use=True))
            return
        unread_path = self._registry.unread_path(message.name)
        if not message.replaces and unread_path not in (None, message.path):
            raise taken_name(message.name)  # its content is unknown
        job = ReadJob(message.operation_id, message.name, message.path, pinned=message.pinned)
        self._begin_reading(replace(job, replaces=message.replaces, is_kept=True))

    def _begin_postponed(self, name: str) -> None:
        """Begin the operations that waited for the read of ``name``."""
        waiting = self._postponed.get(name)
        while waiting and not self._registry.is_loading(name):
            message = waiting.pop(0)
            try:
                self._begin(message)
            except CorunError as error:
                self._done.append(OperationDone(message.operation_id, str(error), error.kind))
        if not waiting:
            self._postponed.pop(name, None)

    def _begin_reading(self, job: ReadJob) -> None:
        """Begin a load for the reading thread. Raises ``RequestError`` if it cannot begin."""
        load_id = self._registry.begin_loading(job.name, job.path)
        self._publisher.mark((job.name,))
        if job.outline_only:
            self._outlining.add(job.name)
        old = self._registry.serving(job.name)
        known = old if old is not None and old.content and old.path == job.path else None
        self._reader.put(replace(job, load_id=load_id, known=known))

    def _remove(self, message: RemoveAdapter) -> None:
        self._unregister(message.name)
        if self._state_file is not None:
            self._state_file.remove(message.name)
        self._done.append(OperationDone(message.operation_id))

    def _unregister(self, name: str) -> None:
        old = self._registry.serving(name)
        freed = self._registry.remove(name)
        if old is not None:  # running requests do not keep it pinned
            self._device.unpin_adapter(old.adapter_id)
        self._drop(freed)
        self._publisher.mark((name,))
        self._mixes.drop_with(name)

    def _complete_read(self, read: ReadDone) -> None:
        """Apply the result of reading a directory."""
        job = read.job
        self._publisher.mark((job.name,))
        self._outlining.discard(job.name)
        if self._mixes.note_read(job.name):
            self.notify()
        if read.outline is not None:
            self._registry.outlined(job.name, job.load_id, read.outline)
            return
        content = read.content
        facts = None if content is None else content.facts
        if read.place_id is not None:
            digest = content.facts.digest if content is not None and content.is_kept else None
            self._device.end_registration(read.place_id, digest)
        old = self._registry.serving(job.name)
        is_pinned = self._registry.is_pinned(job.name) if job.pinned is None else job.pinned
        error = read.error or self._pin_error(job.name, facts if is_pinned else None, old)
        if error is None and old is not None and not job.replaces and not old.has(content):
            error = taken_name(job.name)
        if content is None or error is not None:
            assert error is not None
            self._fail(job, error, old)
            if facts is not None:
                self._maybe_unused.add(facts.digest)
            return
        registered = self._registry.ready(job.name, job.path, job.load_id, content)
        if registered is None:
            self._end(job, AdapterError(f"adapter {job.name!r} was removed while it was loading"))
            self._maybe_unused.add(content.facts.digest)
            return
        self._publisher.mark((job.name,), must_publish=True)
        self._device.adapter_ready(registered.version.adapter_id, content.facts)
        if old is not None:
            self._replaced(old, registered, content.facts.digest)
        self.pin_now(job.name, is_pinned=is_pinned)
        if self._state_file is not None and job.is_kept:
            self._state_file.put(RememberedAdapter(job.name, str(job.path), is_pinned))
        self._end(job)

    def _fail(self, job: ReadJob, error: CorunError, old: AdapterVersion | None) -> None:
        self._registry.failed(job.name, job.load_id, str(error))
        # Else requests for a mix would have the version read again and again.
        is_needed = job.operation_id is None or isinstance(error, AdapterError)
        if is_needed and old is not None and not old.content and old.path == job.path:
            self._end_unread(old.digest, str(error))
        self._end(job, error)

    def _replaced(self, old: AdapterVersion, registered: Registered, digest: str) -> None:
        """Another load of an adapter that was in service has ended, and has read ``digest``."""
        if registered.version.digest != digest:  # a stand-in, with which loads find the content
            self._maybe_unused.add(digest)
        if registered.is_new:
            self._device.unpin_adapter(old.adapter_id)
        if registered.version is not old:
            self._mixes.drop_with(old.name)
        self._drop(registered.freed)

    def _end(self, job: ReadJob, error: CorunError | None = None) -> None:
        """Report the end of a read, to its operation or to the log."""
        if job.operation_id is None:
            if error is not None and isinstance(job.path, str):  # requests name the faults of mixes
                _logger.error("cannot serve adapter %r: %s", job.name, error)
            return
        failure = () if error is None else (str(error), error.kind)
        self._done.append(OperationDone(job.operation_id, *failure))

    def _pin_error(
        self, name: str, facts: AdapterFacts | None, old: AdapterVersion | None
    ) -> RequestError | None:
        """Return why ``facts``, if any, cannot be pinned."""
        try:
            if facts is not None:
                self._check_pin(name, facts, old)
        except RequestError as error:
            return error
        return None

    def _check_pin(self, name: str, facts: AdapterFacts, old: AdapterVersion | None) -> None:
        """Raise ``RequestError`` unless ``name`` can be pinned with this content."""
        other_bytes = self._registry.largest_unpinned_bytes(without=name)
        replaced = None if old is None else old.adapter_id
        self._device.check_pin(facts.num_bytes, other_bytes, replaced)

    def _remove_unused_contents(self) -> None:
        """Remove contents that no version has any more; none while a read may still need one."""
        if self._reader.num_reading or not self._maybe_unused:
            return
        unused = self._maybe_unused - self._registry.digests()
        self._maybe_unused.clear()
        for digest in sorted(unused):
            self._device.drop_content(digest)
            self._host.remove_content(digest)

    def _drop(self, adapter_ids: Iterable[AdapterId]) -> None:
        """Evict versions without references."""
        for adapter_id in adapter_ids:
            self._device.drop_adapter(adapter_id)

    def _make_room(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        """Ask the core for a place, and evict what it names before the place is written."""
        room = self._device.place_registration(layer_bytes)
        self._host.evict(room.evictions)
        return room.place
