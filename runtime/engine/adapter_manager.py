"""Adapter operations beside the step: reads and checks files in a thread, keeps the registry.

Joins three parts that do not know each other: the registry (names and versions), the engine core
(references and evictions) and the device half (which reads a directory into packed matrices).
"""

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..adapter import AdapterFacts
from ..adapters.info import AdapterInfo, Residency
from ..adapters.registry import AdapterRegistry, AdapterVersion, LoadId
from ..errors import AdapterError, CorunError, RequestError
from ..memory.registrations import HostRoom
from ..plan import AdapterId, HostPlace, HostPlaceId
from .messages import (
    AdapterOperation,
    AdaptersChanged,
    OperationDone,
    PinAdapter,
    RemoveAdapter,
)
from .residency import Changed, log_move

_LOG = logging.getLogger(__name__)

# Where on the host an adapter is kept whose layers take so many bytes; None = nowhere.
MakeRoom = Callable[[Sequence[int]], HostPlace | None]
# Reads and checks a directory; and whether it is kept where there is room. Raises ``CorunError``.
ReadAdapter = Callable[[str, MakeRoom], tuple[AdapterFacts, bool]]


class AdapterHost(Protocol):
    """What the manager tells the host's memory."""

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None:
        """Take adapters out of it."""
        ...

    def forget(self, digest: str) -> None:
        """No version has this content any more."""
        ...


class AdapterResidency(Protocol):
    """What the manager asks of the engine core."""

    def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Evict a version for good."""
        ...

    def check_pin(self, num_bytes: int, other_bytes: int, replaced: AdapterId | None) -> None:
        """Raise ``RequestError`` unless so much may be pinned, in place of a version.

        ``other_bytes``: of an adapter that a request may need beside.
        """
        ...

    def pin_adapter(self, adapter_id: AdapterId, facts: AdapterFacts) -> None:
        """Keep a version on the device, for which there is room."""
        ...

    def unpin_adapter(self, adapter_id: AdapterId) -> None:
        """It may leave the device again."""
        ...

    def take_changed_adapters(self) -> Changed:
        """Versions and contents that may be elsewhere than at the last call."""
        ...

    def residency(self, version: AdapterVersion) -> Residency:
        """Where a version is now."""
        ...

    def place_registration(self, layer_bytes: Sequence[int]) -> HostRoom:
        """Make room on the host for an adapter that is being read."""
        ...

    def end_registration(self, place_id: HostPlaceId, digest: str | None) -> None:
        """It is there, with this content, or is not."""
        ...

    def forget_content(self, digest: str) -> None:
        """No version has this content any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    operation_id: int
    name: str
    path: str
    load_id: LoadId
    pinned: bool | None = None  # None = as the name is by then


@dataclass(frozen=True, slots=True)
class _Read:
    job: _Job
    facts: AdapterFacts | None = None
    error: CorunError | None = None
    place_id: HostPlaceId | None = None  # that was made for it
    is_kept: bool = False  # and filled


class AdapterManager:
    """Adds, reloads and removes adapters; also the core's source of versions.

    All methods but the reading thread's belong to the engine's thread.
    """

    def __init__(
        self,
        read_adapter: ReadAdapter,
        base_names: Collection[str],
        host: AdapterHost,
    ) -> None:
        """``host``: where adapters are kept as ``attach``'s core says."""
        ids = itertools.count(1)
        self._registry = AdapterRegistry(lambda: AdapterId(next(ids)), base_names)
        self._read_adapter = read_adapter
        self._host = host
        self._device: AdapterResidency | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        # The reading thread asks for room, one adapter at a time, and waits for the answer.
        self._asked: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[HostPlace | None] = queue.SimpleQueue()
        self._num_reading = 0  # jobs and reads that are not settled
        self._maybe_gone: set[str] = set()  # digests that a version was the last to have
        self._done: list[OperationDone] = []
        self._told: dict[str, AdapterInfo] = {}  # what others know
        self._changed: set[str] = set()  # names of which something may be otherwise
        self._is_closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="corun-adapter-reader", daemon=True)
        self._thread.start()

    def attach(self, device: AdapterResidency) -> None:
        """Name the engine core; before that nothing can be removed."""
        self._device = device

    # The core's source of versions.

    def resolve(self, name: str) -> AdapterVersion:
        """The version new requests for ``name`` use; raises ``RequestError``."""
        return self._registry.resolve(name)

    def acquire(self, adapter_id: AdapterId) -> None:
        """A request uses this version from now on."""
        self._registry.acquire(adapter_id)

    def release(self, adapter_id: AdapterId) -> bool:
        """A request that used this version has ended; True = drop it, nobody can name it now."""
        self._changed.add(self._registry.version(adapter_id).name)
        return self._registry.release(adapter_id)

    def version(self, adapter_id: AdapterId) -> AdapterVersion:
        """A version that may still be loaded. Called by the loader's thread."""
        return self._registry.version(adapter_id)

    def forget(self, adapter_id: AdapterId) -> None:
        """A dropped version has left the device."""
        version = self._registry.forget(adapter_id)
        if version is not None:
            self._changed.add(version.name)
            self._maybe_gone.add(version.digest)
            self._tell_gone()

    # Operations.

    def handle(self, message: AdapterOperation) -> None:
        """Begin an operation; ``poll`` tells how it ended. Raises ``CorunError`` if refused."""
        if isinstance(message, RemoveAdapter):
            self._remove(message)
            return
        if isinstance(message, PinAdapter):
            self.pin_now(message.name, is_pinned=message.pinned)
            self._done.append(OperationDone(message.operation_id))
            return
        load_id = self._registry.begin_loading(message.name, message.path)
        self._changed.add(message.name)
        self._num_reading += 1
        self._jobs.put(
            _Job(message.operation_id, message.name, message.path, load_id, message.pinned)
        )

    def add_now(self, name: str, path: str) -> None:
        """Register an adapter and wait for it. Raises ``CorunError`` with the reason."""
        load_id = self._registry.begin_loading(name, path)
        self._settle(self._read(_Job(0, name, path, load_id), self._make_room))
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
        self._changed.add(name)

    def poll(self, *, is_due: bool = True) -> list[OperationDone | AdaptersChanged]:
        """Return operations that have ended, and before them what is new of adapters.

        Unless it ``is_due``, that is told only if an operation has ended. O(what has changed).
        """
        self._take_reads()
        done, self._done = self._done, []
        told = self._news() if is_due or done else None
        return [*done] if told is None else [told, *done]

    def infos(self) -> tuple[AdapterInfo, ...]:
        """All registered adapters; what becomes of them from now on is told by ``poll``."""
        assert self._device is not None
        infos = self._registry.infos(self._device.residency)
        self._told = {info.name: info for info in infos}
        return infos

    def _news(self) -> AdaptersChanged | None:
        """What is otherwise than it was told."""
        device = self._device
        assert device is not None
        changed = device.take_changed_adapters()
        self._changed |= self._registry.names_of(changed.adapter_ids, changed.digests)
        infos, removed = list[AdapterInfo](), list[str]()
        for name in sorted(self._changed):
            before, info = self._told.get(name), self._registry.info(name, device.residency)
            if info == before:
                continue
            log_move(name, before, info)
            if info is None:
                del self._told[name]
                removed.append(name)
            else:
                self._told[name] = info
                infos.append(info)
        self._changed.clear()
        return AdaptersChanged(tuple(infos), tuple(removed)) if infos or removed else None

    def fileno(self) -> int:
        """Readable while ``poll`` would return the end of an operation."""
        return self._event_fd

    def close(self) -> None:
        """Stop the thread after the adapter that it reads; drop what waits. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._jobs.put(None)
        self._answers.put(None)  # it may wait for one
        self._thread.join()
        os.close(self._event_fd)

    def _remove(self, message: RemoveAdapter) -> None:
        old = self._registry.serving(message.name)
        freed = self._registry.remove(message.name)
        if old is not None:  # it may have requests left, which do not keep it from leaving
            assert self._device is not None
            self._device.unpin_adapter(old.adapter_id)
        self._drop(freed)
        self._done.append(OperationDone(message.operation_id))
        self._changed.add(message.name)

    def _take_reads(self) -> None:
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        while not self._asked.empty():
            self._answers.put(self._make_room(self._asked.get()))
        while not self._reads.empty():
            read = self._reads.get()
            self._num_reading -= 1
            self._settle(read)
        self._tell_gone()

    def _settle(self, read: _Read) -> None:
        """Enter what reading a directory has brought."""
        job = read.job
        self._changed.add(job.name)
        if read.place_id is not None:
            assert self._device is not None
            digest = read.facts.digest if read.facts is not None and read.is_kept else None
            self._device.end_registration(read.place_id, digest)
        old = self._registry.serving(job.name)
        is_pinned = self._registry.is_pinned(job.name) if job.pinned is None else job.pinned
        error = read.error or self._pin_error(job.name, read.facts, old, is_pinned=is_pinned)
        if read.facts is None or error is not None:
            self._registry.failed(job.name, job.load_id, str(error))
            self._done.append(OperationDone(job.operation_id, str(error), type(error).__name__))
            if read.facts is not None:
                self._maybe_gone.add(read.facts.digest)
            return
        registered = self._registry.ready(job.name, job.path, job.load_id, read.facts)
        if registered is None:
            text = f"adapter {job.name!r} was removed while it was being loaded"
            self._done.append(OperationDone(job.operation_id, text, AdapterError.__name__))
            self._maybe_gone.add(read.facts.digest)
            return
        if old is not None and registered.is_new:
            assert self._device is not None
            self._device.unpin_adapter(old.adapter_id)
        self._drop(registered.freed)
        self.pin_now(job.name, is_pinned=is_pinned)
        self._done.append(OperationDone(job.operation_id))

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

    def _tell_gone(self) -> None:
        """Two names may have the same content, and an old version that of a new one.

        So may what is being read, which is known to others before it is settled here.
        """
        if self._num_reading or not self._maybe_gone:
            return
        gone = self._maybe_gone - self._registry.digests()
        self._maybe_gone.clear()
        for digest in sorted(gone):
            assert self._device is not None
            self._device.forget_content(digest)
            self._host.forget(digest)

    def _drop(self, adapter_ids: Iterable[AdapterId]) -> None:
        """Evict versions that nothing can refer to any more."""
        for adapter_id in adapter_ids:
            assert self._device is not None
            self._device.drop_adapter(adapter_id)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._is_closed:
                continue
            self._reads.put(self._read(job, self._ask_for_room))
            os.eventfd_write(self._event_fd, 1)

    def _ask_for_room(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        """Let the engine's thread decide."""
        if self._is_closed:
            return None
        self._asked.put(layer_bytes)
        os.eventfd_write(self._event_fd, 1)
        return self._answers.get()

    def _make_room(self, layer_bytes: Sequence[int]) -> HostPlace | None:
        """Ask the core, and do what it says before anybody writes to what it hands out."""
        assert self._device is not None
        room = self._device.place_registration(layer_bytes)
        self._host.evict(room.evictions)
        return room.place

    def _read(self, job: _Job, make_room: MakeRoom) -> _Read:
        place: HostPlace | None = None

        def noted(layer_bytes: Sequence[int]) -> HostPlace | None:
            nonlocal place
            place = make_room(layer_bytes)
            return place

        read = _Read(job)
        try:
            facts, is_kept = self._read_adapter(job.path, noted)
            read = replace(read, facts=facts, is_kept=is_kept)
        except CorunError as error:
            read = replace(read, error=error)
        except Exception as error:  # nobody's files may end the thread that serves all others
            _LOG.exception("reading adapter %r from %s failed", job.name, job.path)
            read = replace(read, error=AdapterError(f"{type(error).__name__}: {error}"))
        return read if place is None else replace(read, place_id=place.place_id)
