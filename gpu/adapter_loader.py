"""Brings adapters to the device off the step.

One thread fetches them from the host's arena, or from files; the engine's thread, the only one that
enqueues operations on the device, starts the copies and later takes what has arrived. Nobody waits
for a copy: while any is under way a second thread looks now and then whether its event is done, so
that reading one adapter's files does not delay the end of another's copy.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..runtime.errors import CorunError
from ..runtime.plan import AdapterId, Transfer, TransferId
from .adapter_arrival import Copied
from .adapter_store import StoreBusyError
from .lora.table import DeviceAdapter

_LOG = logging.getLogger(__name__)

# Small against any copy worth the name, large against what a look costs.
_LOOK_EVERY_S = 0.0005
_RETRY_EVERY_S = 0.005
# References that fill the arena are those of copies under way; longer than this nothing copies.
_BUSY_TIMEOUT_S = 30.0


class Arrival(Protocol):
    """An adapter on its way from the host to the device."""

    def start(self, *, is_gradual: bool) -> None:
        """Enqueue what brings it there, or only the first layers. Called once.

        Like all but ``is_done`` and ``num_arrived`` by the engine's thread.
        """
        ...

    def advance(self) -> None:
        """Enqueue the next layers if those before have arrived."""
        ...

    def num_arrived(self) -> int:
        """Layer groups, from the first on, that are on the device. As ``is_done``."""
        ...

    def is_done(self) -> bool:
        """Whether it has arrived, or failed to. Called between ``start`` and ``finish``."""
        ...

    def finish(self) -> DeviceAdapter:
        """Return it. Called once, when it is done; raises ``CorunError`` if it has failed."""
        ...

    def cancel(self) -> None:
        """Give the host's copy back; instead of ``finish``, with no copy under way."""
        ...


# Fetches one adapter version on the host; raises ``CorunError`` with the reason.
FetchAdapter = Callable[[AdapterId], Arrival]
# The same without reading any file: None if it is not in the arena.
FetchPresent = Callable[[AdapterId], Arrival | None]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A load that has ended: with an adapter, or with the reason why there is none."""

    transfer_id: TransferId
    adapter_id: AdapterId
    adapter: DeviceAdapter | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StartedLoad:
    """A load whose copies are enqueued: its first layers can be used before the last are there."""

    adapter_id: AdapterId
    arrival: Copied


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """So many layer groups of a load are on the device."""

    transfer_id: TransferId
    num_groups: int


LoadEvent: TypeAlias = StartedLoad | LoadProgress | LoadedAdapter


@dataclass(frozen=True, slots=True)
class _Fetched:
    transfer: Transfer
    arrival: Arrival | None
    error: str = ""  # why there is none


@dataclass(slots=True, eq=False)
class _Started:
    transfer: Transfer
    arrival: Arrival
    is_gradual: bool  # a prefetch, which moves only while no demand load does
    num_seen: int = 0  # layer groups that were told of; of the watching thread


@dataclass(slots=True)
class _Deferred:
    transfer: Transfer
    since_s: float


class AdapterLoader:
    """Runs loads, fetched one after the other in the order asked for."""

    def __init__(
        self, fetch: FetchAdapter, fetch_present: FetchPresent, notify: Callable[[], None]
    ) -> None:
        """``notify`` is called by any thread when ``take_done`` has something to do."""
        self._fetch = fetch
        self._fetch_present = fetch_present
        self._notify = notify
        self._jobs: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[_Started | None] = queue.SimpleQueue()
        self._fetched: queue.SimpleQueue[_Fetched] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[_Started] = queue.SimpleQueue()
        self._progress: queue.SimpleQueue[LoadProgress] = queue.SimpleQueue()
        self._events: list[LoadEvent] = []  # of the engine's thread, to be taken
        self._under_way: list[_Started] = []  # of the engine's thread
        # Loads whose files are being read, and whether they are prefetches; likewise.
        self._fetching: dict[TransferId, bool] = {}
        self._deferred: deque[_Deferred] = deque()  # of the fetching thread
        self._may_look = threading.Event()
        self._may_look.set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name="corun-adapter-loader", daemon=True),
            threading.Thread(target=self._watch, name="corun-adapter-copies", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def start(self, transfer: Transfer) -> None:
        """Begin a load: at once if it is in the arena, else when its files have been read.

        What comes of it is told by ``take_events``.
        """
        arrival = self._fetch_present(transfer.adapter_id)
        if arrival is None:
            self._fetching[transfer.transfer_id] = not transfer.is_demand
            self._jobs.put(transfer)
            return
        self._start(_Fetched(transfer, arrival))
        self._notify()

    def promote(self, transfer_id: TransferId) -> None:
        """A request waits for what was a prefetch; unknown loads have ended."""
        if transfer_id in self._fetching:
            self._fetching[transfer_id] = False
            return
        for started in self._under_way:
            if started.transfer.transfer_id == transfer_id and started.is_gradual:
                started.is_gradual = False
                if isinstance(started.arrival, Copied):
                    started.arrival.enqueue_all()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let nobody look at copies meanwhile: the engine computes, and would hear of it later.

        On a CPU each look takes the core, and the interpreter, from who computes. Whatever has
        happened is told right afterwards.
        """
        self._may_look.clear()
        try:
            yield
        finally:
            self._may_look.set()

    def take_events(self) -> list[LoadEvent]:
        """Start the copies of what was fetched; return what has happened since the last call."""
        while not self._progress.empty():
            self._events.append(self._progress.get())
        while not self._arrived.empty():
            started = self._arrived.get()
            self._under_way.remove(started)
            self._events.append(_finished(started))
        while not self._fetched.empty():
            self._start(self._fetched.get())
        self._advance_prefetches()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Finish the load that is running, drop the others, stop the threads. Idempotent.

        The device must have come to its end: nothing is copied any more.
        """
        if self._closed:
            return
        self._closed = True
        self._may_look.set()
        self._jobs.put(None)
        self._started.put(None)
        for thread in self._threads:
            thread.join()
        for started in self._under_way:
            started.arrival.cancel()
        self._under_way.clear()
        while not self._fetched.empty():
            fetched = self._fetched.get()
            if fetched.arrival is not None:
                fetched.arrival.cancel()

    def _start(self, fetched: _Fetched) -> None:
        """Start the copies of one adapter."""
        transfer, arrival = fetched.transfer, fetched.arrival
        is_gradual = self._fetching.pop(transfer.transfer_id, not transfer.is_demand)
        if arrival is None:
            self._events.append(_failed(transfer, fetched.error))
            return
        started = _Started(transfer, arrival, is_gradual)
        try:
            arrival.start(is_gradual=started.is_gradual)
        except Exception as error:  # a full device must fail one adapter, not the engine
            _LOG.exception("adapter %d cannot be copied", transfer.adapter_id)
            arrival.cancel()
            self._events.append(_failed(transfer, f"{type(error).__name__}: {error}"))
            return
        if arrival.is_done():
            self._events.append(_finished(started))
            return
        if isinstance(arrival, Copied):
            self._events.append(StartedLoad(transfer.adapter_id, arrival))
        self._under_way.append(started)
        self._started.put(started)

    def _advance_prefetches(self) -> None:
        """Let prefetches have the link while no request waits for a load."""
        if any(not started.is_gradual for started in self._under_way):
            return
        for started in self._under_way:
            started.arrival.advance()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_RETRY_EVERY_S if self._deferred else None)
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                self._deferred.append(_Deferred(job, time.monotonic()))
            self._fetch_deferred()

    def _watch(self) -> None:
        """Tell of copies that have ended; no other thread asks a load whether it is done."""
        watched: list[_Started] = []
        while True:
            self._may_look.wait()
            try:
                started = self._started.get(timeout=_LOOK_EVERY_S if watched else None)
            except queue.Empty:
                pass
            else:
                if started is None:
                    return
                watched.append(started)
            if self._look(watched):
                self._notify()

    def _look(self, watched: list[_Started]) -> bool:
        """Note what has arrived; whether anything has."""
        has_news = False
        for started in tuple(watched):
            if started.arrival.is_done():
                watched.remove(started)
                self._arrived.put(started)
                has_news = True
                continue
            num_groups = started.arrival.num_arrived()
            if num_groups > started.num_seen:
                started.num_seen = num_groups
                self._progress.put(LoadProgress(started.transfer.transfer_id, num_groups))
                has_news = True
        return has_news

    def _fetch_deferred(self) -> None:
        """Fetch what waits, in order, until the arena has no room for the next."""
        while self._deferred and not self._closed:
            deferred = self._deferred[0]
            fetched = self._fetch_one(deferred)
            if fetched is None:
                return
            self._deferred.popleft()
            self._fetched.put(fetched)
            self._notify()

    def _fetch_one(self, deferred: _Deferred) -> _Fetched | None:
        """None if it must wait until somebody else is done with the arena."""
        transfer = deferred.transfer
        try:
            return _Fetched(transfer, self._fetch(transfer.adapter_id))
        except StoreBusyError as error:
            if time.monotonic() - deferred.since_s < _BUSY_TIMEOUT_S:
                return None
            return _Fetched(transfer, None, str(error))
        except CorunError as error:
            return _Fetched(transfer, None, str(error))
        except Exception as error:  # a bug must fail one adapter, not the thread
            _LOG.exception("loading adapter %d failed", transfer.adapter_id)
            return _Fetched(transfer, None, f"{type(error).__name__}: {error}")


def _failed(transfer: Transfer, error: str) -> LoadedAdapter:
    return LoadedAdapter(transfer.transfer_id, transfer.adapter_id, None, error)


def _finished(started: _Started) -> LoadedAdapter:
    transfer = started.transfer
    try:
        adapter = started.arrival.finish()
    except CorunError as error:
        return _failed(transfer, str(error))
    return LoadedAdapter(transfer.transfer_id, transfer.adapter_id, adapter)
