"""Adapter operations beside the step: reads and checks files in a thread, keeps the registry.

Joins three parts that do not know each other: the registry (names and versions), the engine core
(references and evictions) and the device half (which reads a directory into packed matrices).
"""

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from ..adapters.registry import AdapterFacts, AdapterInfo, AdapterRegistry, AdapterVersion, LoadId
from ..errors import AdapterError, CorunError
from ..plan import AdapterId
from .messages import AdaptersChanged, AddAdapter, OperationDone, RemoveAdapter

_LOG = logging.getLogger(__name__)

ReadFacts = Callable[[str], AdapterFacts]  # reads and checks a directory; raises ``CorunError``


class AdapterResidency(Protocol):
    """What the manager asks of the engine core."""

    def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Evict a version for good."""
        ...

    def resident_adapters(self) -> frozenset[AdapterId]:
        """Versions on the device now."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    operation_id: int
    name: str
    path: str
    load_id: LoadId


@dataclass(frozen=True, slots=True)
class _Read:
    job: _Job
    facts: AdapterFacts | None
    error: CorunError | None = None


class AdapterManager:
    """Adds, reloads and removes adapters; also the core's source of versions.

    All methods but the reading thread's belong to the engine's thread.
    """

    def __init__(
        self,
        read_facts: ReadFacts,
        base_names: Collection[str] = (),
        on_content_gone: Callable[[str], None] | None = None,
    ) -> None:
        """``on_content_gone`` is told the digest of content that no version has any more."""
        ids = itertools.count(1)
        self._registry = AdapterRegistry(lambda: AdapterId(next(ids)), base_names)
        self._read_facts = read_facts
        self._on_content_gone = on_content_gone
        self._device: AdapterResidency | None = None
        self._versions: dict[AdapterId, AdapterVersion] = {}  # until they have left the device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._num_reading = 0  # jobs and reads that are not settled
        self._maybe_gone: set[str] = set()  # digests that a version was the last to have
        self._done: list[OperationDone] = []
        self._told: tuple[AdapterInfo, ...] = ()
        self._told_resident: frozenset[AdapterId] = frozenset()
        self._is_changed = False
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
        is_drained = self._registry.release(adapter_id)
        self._is_changed |= is_drained
        return is_drained

    def version(self, adapter_id: AdapterId) -> AdapterVersion:
        """A version that may still be loaded. Called by the loader's thread."""
        return self._versions[adapter_id]

    def forget(self, adapter_id: AdapterId) -> None:
        """A dropped version has left the device."""
        version = self._versions.pop(adapter_id, None)
        self._is_changed = True
        if version is not None:
            self._maybe_gone.add(version.digest)
            self._tell_gone()

    # Operations.

    def handle(self, message: AddAdapter | RemoveAdapter) -> None:
        """Begin an operation; ``poll`` tells how it ended. Raises ``CorunError`` if refused."""
        if isinstance(message, RemoveAdapter):
            self._remove(message)
            return
        load_id = self._registry.begin_loading(message.name, message.path)
        self._is_changed = True
        self._num_reading += 1
        self._jobs.put(_Job(message.operation_id, message.name, message.path, load_id))

    def add_now(self, name: str, path: str) -> None:
        """Register an adapter and wait for it. Raises ``CorunError`` with the reason."""
        load_id = self._registry.begin_loading(name, path)
        self._settle(self._read(_Job(0, name, path, load_id)))
        done = self._done.pop()
        if done.error is not None:
            raise AdapterError(f"adapter {name!r}: {done.error}")

    def poll(self) -> list[OperationDone | AdaptersChanged]:
        """Return operations that have ended, and the adapters if anything about them changed."""
        self._take_reads()
        done, self._done = self._done, []
        assert self._device is not None
        resident = self._device.resident_adapters()
        if not self._is_changed and resident == self._told_resident:
            return list(done)
        self._is_changed, self._told_resident = False, resident
        infos = self._registry.infos(resident)
        if infos == self._told:
            return list(done)
        self._told = infos
        return [AdaptersChanged(infos), *done]

    def infos(self) -> tuple[AdapterInfo, ...]:
        """All registered adapters."""
        return self._registry.infos(self._told_resident)

    def fileno(self) -> int:
        """Readable while ``poll`` would return the end of an operation."""
        return self._event_fd

    def close(self) -> None:
        """Stop the thread after the adapter that it reads; drop what waits. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join()
        os.close(self._event_fd)

    def _remove(self, message: RemoveAdapter) -> None:
        self._drop(self._registry.remove(message.name))
        self._done.append(OperationDone(message.operation_id))
        self._is_changed = True

    def _take_reads(self) -> None:
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        while not self._reads.empty():
            read = self._reads.get()
            self._num_reading -= 1
            self._settle(read)
        self._tell_gone()

    def _settle(self, read: _Read) -> None:
        """Enter what reading a directory has brought."""
        job = read.job
        self._is_changed = True
        if read.facts is None:
            self._registry.failed(job.name, job.load_id, str(read.error))
            self._done.append(
                OperationDone(job.operation_id, str(read.error), type(read.error).__name__)
            )
            return
        registered = self._registry.ready(job.name, job.path, job.load_id, read.facts)
        if registered is None:
            error = f"adapter {job.name!r} was removed while it was being loaded"
            self._done.append(OperationDone(job.operation_id, error, AdapterError.__name__))
            self._maybe_gone.add(read.facts.digest)
            return
        self._versions[registered.version.adapter_id] = registered.version
        self._drop(registered.freed)
        self._done.append(OperationDone(job.operation_id))

    def _tell_gone(self) -> None:
        """Two names may have the same content, and an old version that of a new one.

        So may what is being read, which is known to others before it is settled here.
        """
        if self._num_reading or not self._maybe_gone:
            return
        gone = self._maybe_gone - {version.digest for version in self._versions.values()}
        self._maybe_gone.clear()
        if self._on_content_gone is not None:
            for digest in sorted(gone):
                self._on_content_gone(digest)

    def _drop(self, adapter_ids: Iterable[AdapterId]) -> None:
        """Evict versions that nothing can refer to any more."""
        for adapter_id in adapter_ids:
            assert self._device is not None
            self._device.drop_adapter(adapter_id)
            self._is_changed = True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._is_closed:
                continue
            self._reads.put(self._read(job))
            os.eventfd_write(self._event_fd, 1)

    def _read(self, job: _Job) -> _Read:
        try:
            return _Read(job, self._read_facts(job.path))
        except CorunError as error:
            return _Read(job, None, error)
        except Exception as error:  # nobody's files may end the thread that serves all others
            _LOG.exception("reading adapter %r from %s failed", job.name, job.path)
            return _Read(job, None, AdapterError(f"{type(error).__name__}: {error}"))
