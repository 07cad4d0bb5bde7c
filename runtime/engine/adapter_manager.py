"""Adapter operations beside the step: reads and checks files in a thread, keeps the registry.

Joins three parts that do not know each other: the registry (names and versions), the engine core
(references and evictions) and the device half (which reads a directory into packed matrices).
"""

import itertools
import logging
from collections.abc import Collection, Iterable, Sequence

from ..adapter import AdapterFacts
from ..adapters.content import AdapterContent
from ..adapters.dir_watch import LoraDirWatch
from ..adapters.info import AdapterInfo
from ..adapters.names import taken_name
from ..adapters.registry import AdapterRegistry, AdapterVersion
from ..adapters.state_file import AdapterStateFile, RememberedAdapter
from ..errors import AdapterError, CorunError, RequestError
from ..plan import AdapterId, HostPlace
from .adapter_changes import AdapterChanges
from .adapter_ports import AdapterHost, AdapterResidency
from .adapter_reading import AdapterFiles, AdapterReaderThread, ReadDone, ReadJob
from .messages import (
    AdapterOperation,
    AdaptersChanged,
    AddAdapter,
    OperationDone,
    ReadAdapter,
    RemoveAdapter,
)

_LOG = logging.getLogger(__name__)


class AdapterManager:
    """Adds, reloads and removes adapters; also the core's source of versions.

    All methods but the reading thread's belong to the engine's thread.
    """

    def __init__(
        self,
        files: AdapterFiles,
        base_names: Collection[str],
        host: AdapterHost,
        state_file: AdapterStateFile | None = None,
        background_cpus: tuple[int, ...] = (),
    ) -> None:
        """``host``: where adapters are kept as ``attach``'s core says.

        ``state_file``: notes what is loaded by operations. ``background_cpus``: where files are
        read beside the steps; () = where the caller runs.
        """
        self._state_file = state_file
        ids = itertools.count(1)
        self._registry = AdapterRegistry(lambda: AdapterId(next(ids)), base_names)
        self._files = files
        self._host = host
        self._device: AdapterResidency | None = None
        self._reader = AdapterReaderThread(files, self._make_room, background_cpus)
        self._maybe_unused: set[str] = set()  # digests that a version was the last to have
        self._done: list[OperationDone] = []
        self._changes = AdapterChanges(self._registry)
        self._watch: LoraDirWatch | None = None
        self._outlining: set[str] = set()  # names of which headers are being read
        # By names that are being read.
        self._postponed: dict[str, list[AddAdapter | ReadAdapter]] = {}

    def attach(self, device: AdapterResidency) -> None:
        """Name the engine core; before that nothing can be removed."""
        self._device = device

    @property
    def remembered(self) -> tuple[RememberedAdapter, ...]:
        """What was loaded by operations of engines before this one, and of this one."""
        return () if self._state_file is None else self._state_file.adapters

    # The core's source of versions.

    def resolve(self, name: str) -> AdapterVersion:
        """The version new requests for ``name`` use; raises ``RequestError``."""
        return self._registry.resolve(name)

    def acquire(self, adapter_id: AdapterId) -> None:
        """A request uses this version from now on."""
        self._registry.acquire(adapter_id)

    def release(self, adapter_id: AdapterId) -> bool:
        """A request that used this version has ended; True = drop it, nobody can name it now."""
        self._changes.mark((self._registry.version(adapter_id).name,))
        return self._registry.release(adapter_id)

    def version(self, adapter_id: AdapterId) -> AdapterVersion:
        """A version that may still be loaded. Called by the loader's thread."""
        return self._registry.version(adapter_id)

    def remove_version(self, adapter_id: AdapterId) -> None:
        """A dropped version has left the device."""
        version = self._registry.remove_version(adapter_id)
        if version is not None:
            self._changes.mark((version.name,))
            self._maybe_unused.add(version.digest)
            self._remove_unused_contents()

    # Operations.

    def handle(self, message: AdapterOperation) -> None:
        """Begin an operation; ``poll`` tells how it ended. Raises ``CorunError`` if refused."""
        if isinstance(message, RemoveAdapter):
            self._remove(message)
            return
        if isinstance(message, AddAdapter | ReadAdapter):
            self._begin(message)
            return
        unread_path = self._registry.unread_path(message.name) if message.pinned else None
        if unread_path is not None:
            self._begin_reading(message.operation_id, message.name, unread_path, True)
            return
        self.pin_now(message.name, is_pinned=message.pinned)
        if self._state_file is not None:
            self._state_file.pin(message.name, is_pinned=message.pinned)
        self._done.append(OperationDone(message.operation_id))

    def must_wait(self, name: str) -> bool:
        """Whether requests for ``name`` wait until its files have been read, which then begins."""
        if name in self._outlining:
            return True
        path = self._registry.unread_path(name)
        if path is not None and not self._registry.is_loading(name):
            self._begin_reading(None, name, path, None)
        return path is not None

    def add_unread(self, name: str, path: str) -> None:
        """Serve an adapter whose files are read when it is first asked for.

        Raises ``CorunError`` with what can be seen to be wrong until then.
        """
        load_id = self._registry.begin_loading(name, path)
        try:
            outline = self._files.outline(path)
        except CorunError as error:
            self._registry.failed(name, load_id, str(error))
            raise AdapterError(f"adapter {name!r}: {error}") from error
        self._registry.outlined(name, load_id, outline)
        self._changes.mark((name,))

    def follow(self, watch: LoraDirWatch) -> None:
        """Serve what comes into a directory, as it is there."""
        self._watch = watch

    @property
    def num_unreadable(self) -> int:
        """Entries of a directory that is followed which cannot be read now."""
        return 0 if self._watch is None else self._watch.num_unreadable

    def _follow_changes(self) -> None:
        while self._watch is not None and (changes := self._watch.take()) is not None:
            for name, path in changes.changed.items():
                self._follow_change(name, path)
            for name, path in changes.removed.items():
                if self._registry.path_of(name) == path:
                    _LOG.info("adapter %r has left its directory", name)
                    self._unregister(name)

    def _follow_change(self, name: str, path: str) -> None:
        """Something new, or other content, lies at ``path``."""
        if self._registry.path_of(name) not in (None, path):
            _LOG.warning("%s is not served: adapter %r is served from elsewhere", path, name)
            return
        _LOG.info("adapter %r has come or changed: %s", name, path)
        try:
            is_new = self._registry.serving(name) is None
            self._begin_reading(None, name, path, None, outline_only=is_new)
        except CorunError as error:
            _LOG.error("not served: adapter %r: %s", name, error)

    def add_now(self, name: str, path: str) -> None:
        """Register an adapter and wait for it. Raises ``CorunError`` with the reason."""
        load_id = self._registry.begin_loading(name, path)
        self._complete_read(self._reader.read_now(ReadJob(0, name, path, load_id)))
        done = self._done.pop()
        if done.error is not None:
            raise AdapterError(f"adapter {name!r}: {done.error}")

    def pin_now(self, name: str, *, is_pinned: bool) -> None:
        """Keep ``name`` on the device, or no longer.

        Raises ``RequestError`` if there is no such adapter, it is not ready, or there is no room.
        """
        assert self._device is not None
        version = self._registry.resolve(name)
        if is_pinned:
            self._check_pin(name, version.facts, version)
            self._device.pin_adapter(version.adapter_id, version.facts)
        else:
            self._device.unpin_adapter(version.adapter_id)
        self._registry.set_pinned(name, is_pinned=is_pinned)
        self._changes.mark((name,))

    def poll(self, *, is_due: bool = True) -> list[OperationDone | AdaptersChanged]:
        """Return operations that have ended, and before them what is new of adapters.

        Unless it ``is_due``, that is told only if an operation has ended. O(what has changed).
        """
        self._follow_changes()
        for read in self._reader.take():
            self._complete_read(read)
            self._begin_postponed(read.job.name)
        self._remove_unused_contents()
        done, self._done = self._done, []
        assert self._device is not None
        must_publish = is_due or done or self._changes.must_publish
        changes = self._changes.publish(self._device) if must_publish else None
        return [*done] if changes is None else [changes, *done]

    def infos(self) -> tuple[AdapterInfo, ...]:
        """All registered adapters; what becomes of them from now on is told by ``poll``."""
        assert self._device is not None
        return self._changes.publish_all(self._device)

    def fileno(self) -> int:
        """Readable while ``poll`` would return the end of an operation."""
        return self._reader.fileno()

    def close(self) -> None:
        """Stop the threads, after the adapter that is being read; drop what waits. Idempotent."""
        if self._watch is not None:
            self._watch.close()
        self._reader.close()

    def notify(self) -> None:
        """There is something to take for ``poll``. Called by any thread."""
        self._reader.notify()

    def _begin(self, message: AddAdapter | ReadAdapter) -> None:
        if self._registry.is_loading(message.name):  # for requests, or for somebody else
            self._postponed.setdefault(message.name, []).append(message)
            return
        unread_path = self._registry.unread_path(message.name)
        if isinstance(message, ReadAdapter):
            if unread_path is None:
                self._done.append(OperationDone(message.operation_id))
            else:
                self._begin_reading(message.operation_id, message.name, unread_path, None)
            return
        if not message.replaces and unread_path not in (None, message.path):
            raise taken_name(message.name)  # whose content nobody knows
        self._begin_reading(
            message.operation_id, message.name, message.path, message.pinned,
            replaces=message.replaces, is_kept=True,
        )  # fmt: skip

    def _begin_postponed(self, name: str) -> None:
        """Begin what was asked for while ``name`` was being read."""
        waiting = self._postponed.get(name)
        while waiting and not self._registry.is_loading(name):
            message = waiting.pop(0)
            try:
                self._begin(message)
            except CorunError as error:
                failure = str(error), error.kind
                self._done.append(OperationDone(message.operation_id, *failure))
        if not waiting:
            self._postponed.pop(name, None)

    def _begin_reading(
        self, operation_id: int | None, name: str, path: str, pinned: bool | None,
        *, replaces: bool = True, is_kept: bool = False, outline_only: bool = False,
    ) -> None:  # fmt: skip
        """Let the thread read and check a directory. Raises ``RequestError`` if it cannot begin."""
        load_id = self._registry.begin_loading(name, path)
        self._changes.mark((name,))
        if outline_only:
            self._outlining.add(name)
        known = self._registry.serving(name)
        if known is not None and known.path != path:
            known = None
        self._reader.put(
            ReadJob(
                operation_id, name, path, load_id, pinned, replaces, is_kept, outline_only, known
            )
        )

    def _remove(self, message: RemoveAdapter) -> None:
        self._unregister(message.name)
        if self._state_file is not None:
            self._state_file.remove(message.name)
        self._done.append(OperationDone(message.operation_id))

    def _unregister(self, name: str) -> None:
        old = self._registry.serving(name)
        freed = self._registry.remove(name)
        if old is not None:  # it may have requests left, which do not keep it from leaving
            assert self._device is not None
            self._device.unpin_adapter(old.adapter_id)
        self._drop(freed)
        self._changes.mark((name,))

    def _complete_read(self, read: ReadDone) -> None:
        """Enter what reading a directory has brought."""
        job = read.job
        self._changes.mark((job.name,))
        self._outlining.discard(job.name)
        if read.outline is not None:
            self._registry.outlined(job.name, job.load_id, read.outline)
            return
        content = read.content
        facts = None if content is None else content.facts
        if read.place_id is not None:
            assert self._device is not None
            digest = content.facts.digest if content is not None and content.is_kept else None
            self._device.end_registration(read.place_id, digest)
        old = self._registry.serving(job.name)
        is_pinned = self._registry.is_pinned(job.name) if job.pinned is None else job.pinned
        error = read.error or self._pin_error(job.name, facts, old, is_pinned=is_pinned)
        if error is None and old is not None and not job.replaces and _differs(old, content):
            error = taken_name(job.name)
        if content is None or error is not None:
            assert error is not None
            self._registry.failed(job.name, job.load_id, str(error))
            self._end(job, error)
            if facts is not None:
                self._maybe_unused.add(facts.digest)
            return
        registered = self._registry.ready(job.name, job.path, job.load_id, content)
        if registered is None:
            self._end(job, AdapterError(f"adapter {job.name!r} was removed while it was loading"))
            self._maybe_unused.add(content.facts.digest)
            return
        self._changes.mark((job.name,), must_publish=True)
        if old is not None and registered.is_new:
            assert self._device is not None
            self._device.unpin_adapter(old.adapter_id)
        self._drop(registered.freed)
        self.pin_now(job.name, is_pinned=is_pinned)
        if self._state_file is not None and job.is_kept:
            self._state_file.put(RememberedAdapter(job.name, job.path, is_pinned))
        self._end(job)

    def _end(self, job: ReadJob, error: CorunError | None = None) -> None:
        """Tell whoever waits for it."""
        if job.operation_id is None:
            if error is not None:
                _LOG.error("adapter %r cannot be served: %s", job.name, error)
            return
        failure = () if error is None else (str(error), error.kind)
        self._done.append(OperationDone(job.operation_id, *failure))

    def _pin_error(
        self, name: str, facts: AdapterFacts | None, old: AdapterVersion | None, *, is_pinned: bool
    ) -> CorunError | None:
        """Why what has been read cannot be pinned, if it is to be."""
        if facts is None or not is_pinned:
            return None
        try:
            self._check_pin(name, facts, old)
        except RequestError as error:
            return error
        return None

    def _check_pin(self, name: str, facts: AdapterFacts, old: AdapterVersion | None) -> None:
        """Raise ``RequestError`` unless ``name`` may be pinned with this content."""
        assert self._device is not None
        other_bytes = self._registry.largest_unpinned_bytes(without=name)
        replaced = None if old is None else old.adapter_id
        self._device.check_pin(facts.num_bytes, other_bytes, replaced)

    def _remove_unused_contents(self) -> None:
        """Two names may have the same content, and an old version that of a new one.

        So may what is being read, which is known to others before it is settled here.
        """
        if self._reader.num_reading or not self._maybe_unused:
            return
        unused = self._maybe_unused - self._registry.digests()
        self._maybe_unused.clear()
        for digest in sorted(unused):
            assert self._device is not None
            self._device.forget_content(digest)
            self._host.remove_content(digest)

    def _drop(self, adapter_ids: Iterable[AdapterId]) -> None:
        """Evict versions that nothing can refer to any more."""
        for adapter_id in adapter_ids:
            assert self._device is not None
            self._device.drop_adapter(adapter_id)

    def _make_room(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        """Ask the core, and do what it says before anybody writes to what it hands out."""
        assert self._device is not None
        room = self._device.place_registration(layer_bytes)
        self._host.evict(room.evictions)
        return room.place


def _differs(old: AdapterVersion, content: AdapterContent | None) -> bool:
    """Whether what was read is another version."""
    return content is not None and (
        content.facts != old.facts or content.conventions != old.conventions
    )
