"""Brings adapters to the device outside of the step.

A fetching thread brings adapters to the host's arena. The engine's thread, the only one that
enqueues device operations, starts the copies and later takes the results. Files are copied while
they are read. No thread blocks on a copy: while any is running, a second thread polls its event, so
reading one adapter's files does not delay the end of another's copy.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from ...runtime.errors import (
    AdapterError,
    AdapterFailedError,
    AdapterUnavailableError,
    CorunError,
    EngineDeadError,
)
from ...runtime.plan import AdapterId, AdapterTransfer, TransferId
from ..device.lost import raise_if_lost
from ..lora.table import DeviceAdapter
from .arrival import AdapterLoad, Copied, Reading
from .fetcher import AdapterFetcher, FetchAdapter, Fetched

_LOG = logging.getLogger(__name__)

# Loads that requests wait for with copies on the device's queue: the first in turn, and the next one,
# so that the link is not idle while the engine's thread computes. A new order does not move copies
# that are on the queue.
_MAX_COPYING = 2
# Short compared with a copy, long compared with the cost of a poll.
_POLL_EVERY_S = 0.0005


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A load that has ended: with an adapter, or with the reason why it failed."""

    transfer_id: TransferId
    adapter_id: AdapterId
    adapter: DeviceAdapter | None
    error: str | None = None
    error_kind: str | None = None  # name of a class in ``errors``


@dataclass(frozen=True, slots=True)
class StartedLoad:
    """A load with enqueued copies: its first layers can be used before the last arrive."""

    adapter_id: AdapterId
    arrival: Copied


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The number of layer groups of a load that are on the device."""

    transfer_id: TransferId
    num_groups: int


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """More of a load's files has been read."""

    transfer_id: TransferId
    reading: Reading


LoadEvent: TypeAlias = StartedLoad | LoadProgress | ReadProgress | LoadedAdapter


@dataclass(slots=True, eq=False)
class _Started:
    transfer: AdapterTransfer
    arrival: AdapterLoad
    is_gradual: bool  # a prefetch, copied only while no request waits for a load
    num_seen: int = 0  # reported layer groups on the device; used by the polling thread
    num_read: int = 0  # the same on the host; used by the engine's thread


class AdapterLoader:
    """Runs loads; they are fetched one at a time, in order of submission."""

    def __init__(
        self, fetch: FetchAdapter, notify: Callable[[], None], fetch_cpus: tuple[int, ...] = ()
    ) -> None:
        """Start the threads.

        Args:
            fetch: Called by ``start`` for what is on the host, else by the thread that reads files.
            notify: Called by any thread when ``take_events`` has more to return.
            fetch_cpus: Cores of the thread that reads files; () = those of the caller.
        """
        self._fetch = fetch
        self._notify = notify
        self._started: queue.SimpleQueue[_Started | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[_Started] = queue.SimpleQueue()
        self._progress: queue.SimpleQueue[LoadProgress] = queue.SimpleQueue()
        self._events: list[LoadEvent] = []  # used by the engine's thread; not taken yet
        self._under_way: list[_Started] = []  # used by the engine's thread
        self._unwatched: list[_Started] = []  # of these, for the polling thread once it may look
        self._turns: dict[TransferId, int] = {}  # of loads that requests wait for; others are behind
        self._cancelled: list[tuple[AdapterLoad, LoadedAdapter]] = []  # their files are still read
        self._watch_error: Exception | None = None  # the error that ended the polling thread
        self._may_look = threading.Event()
        self._may_look.set()
        self._closed = False
        self._fetcher = AdapterFetcher(fetch, notify, fetch_cpus)
        self._thread = threading.Thread(target=self._watch, name="corun-adapter-copies", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether all loads have ended."""
        return not self._under_way and self._fetcher.is_idle

    @property
    def has_demand(self) -> bool:
        """Whether a request waits for a load that is being copied."""
        return any(not started.is_gradual for started in self._under_way)

    def start(self, transfer: AdapterTransfer) -> None:
        """Start a load: at once if it is on the host, otherwise when its files are being read.

        ``take_events`` returns what follows.
        """
        if transfer.host is None or not transfer.host.is_filled:
            self._fetcher.submit(transfer)
            return
        fetched = Fetched(transfer, self._fetch(transfer))
        self._start(fetched, is_prefetch=not transfer.is_demand)
        self._notify()

    def order(self, order: Sequence[TransferId]) -> None:
        """Copy loads that requests wait for in this order from now on, and others behind by id."""
        self._turns = {transfer_id: turn for turn, transfer_id in enumerate(order)}

    def promote(self, transfer_id: TransferId) -> None:
        """Make a prefetch urgent, as a request waits for it; ignores loads that have ended."""
        if self._fetcher.promote(transfer_id):
            return
        for started in self._under_way:
            if started.transfer.transfer_id == transfer_id and started.is_gradual:
                started.is_gradual = False

    @contextmanager
    def polling_suspended(self) -> Iterator[None]:
        """Suspend polling of copies while the engine computes and could not use the results.

        On a CPU each poll takes the core and the interpreter from the computation. Copies that
        ended meanwhile are reported right afterwards, and loads that started are polled from then on.
        """
        self._may_look.clear()
        try:
            yield
        finally:
            self._may_look.set()
            for started in self._unwatched:
                self._started.put(started)
            self._unwatched.clear()

    def take_events(self) -> list[LoadEvent]:
        """Start copies of fetched adapters; return the events since the last call.

        Raises ``EngineDeadError`` if the device is lost, or if polling has failed.
        """
        if self._watch_error is not None:
            raise_if_lost(self._watch_error)
            raise EngineDeadError("polling copies to the device failed") from self._watch_error
        while not self._progress.empty():
            self._events.append(self._progress.get())
        while not self._arrived.empty():
            started = self._arrived.get()
            if not started.arrival.is_done():
                self._started.put(started)  # reading failed while more was being enqueued
                continue
            self._under_way.remove(started)
            self._events.append(_finished(started))
        while (taken := self._fetcher.take()) is not None:
            fetched, is_prefetch = taken
            self._start(fetched, is_prefetch=is_prefetch)
        self._advance()
        self._end_cancelled()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Drop all loads and stop the threads. Idempotent.

        The device must be idle: no copy may be running.
        """
        if self._closed:
            return
        self._closed = True
        self._may_look.set()
        self._started.put(None)
        self._thread.join()
        self._fetcher.close()
        for started in self._under_way:
            started.arrival.cancel()
        self._under_way.clear()
        while (taken := self._fetcher.take()) is not None:
            if taken[0].arrival is not None:
                taken[0].arrival.cancel()

    def _start(self, fetched: Fetched, *, is_prefetch: bool) -> None:
        transfer, arrival = fetched.transfer, fetched.arrival
        if arrival is None:
            assert fetched.error is not None
            self._events.append(_failed(transfer, fetched.error))
            return
        started = _Started(transfer, arrival, is_prefetch)
        try:
            arrival.start(is_gradual=is_prefetch, runs=transfer.runs)
        except Exception as error:  # a full device fails one adapter, not the engine
            raise_if_lost(error)
            _LOG.exception("could not copy adapter %d; its load fails", transfer.adapter_id)
            arrival.cancel()
            reason = f"{type(error).__name__}: {error}"
            failed = _failed(transfer, AdapterUnavailableError(reason))
            self._cancelled.append((arrival, failed))
            return
        if arrival.is_done():
            self._events.append(_finished(started))
            return
        if isinstance(arrival, Copied):
            self._events.append(StartedLoad(transfer.adapter_id, arrival))
        self._under_way.append(started)
        if self._may_look.is_set():
            self._started.put(started)
        else:
            self._unwatched.append(started)

    def _advance(self) -> None:
        """Enqueue what is in turn; prefetches wait while a request waits for a load."""
        for started in self._under_way:
            reading = started.arrival.reading()
            if reading is not None and reading.num_groups > started.num_read:
                started.num_read = reading.num_groups
                self._events.append(ReadProgress(started.transfer.transfer_id, reading))
        demand = [started for started in self._under_way if not started.is_gradual]
        copying = {started for started in demand if started.arrival.is_copying()}
        for started in sorted(demand, key=self._turn):
            if len(copying) >= _MAX_COPYING:
                break
            started.arrival.enqueue_all()
            if started.arrival.is_copying():
                copying.add(started)
        for started in self._under_way if not demand else ():
            started.arrival.advance()

    def _turn(self, started: _Started) -> tuple[int, TransferId]:
        transfer_id = started.transfer.transfer_id
        return self._turns.get(transfer_id, len(self._turns)), transfer_id

    def _end_cancelled(self) -> None:
        """End a cancelled load once its place on the host is no longer written."""
        self._events += [failed for arrival, failed in self._cancelled if arrival.is_read()]
        self._cancelled = [one for one in self._cancelled if not one[0].is_read()]

    def _watch(self) -> None:
        """Report copies that ended, or the error of polling.

        Only this thread asks a load whether it is done.
        """
        try:
            self._watch_copies()
        except Exception as error:  # of the device; raised again by the engine's thread
            _LOG.exception("could not poll copies to the device; the engine stops")
            self._watch_error = error
            self._notify()

    def _watch_copies(self) -> None:
        watched: list[_Started] = []
        while True:
            self._may_look.wait()
            try:
                started = self._started.get(timeout=_POLL_EVERY_S if watched else None)
            except queue.Empty:
                pass
            else:
                if started is None:
                    return
                watched.append(started)
            if self._poll(watched):
                self._notify()

    def _poll(self, watched: list[_Started]) -> bool:
        """Report groups that have arrived; returns whether there were any."""
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


def _failed(transfer: AdapterTransfer, error: CorunError) -> LoadedAdapter:
    """The result of a failed load. Later loads of the adapter are not affected."""
    kind = AdapterFailedError if isinstance(error, AdapterError) else AdapterUnavailableError
    return LoadedAdapter(transfer.transfer_id, transfer.adapter_id, None, str(error), kind.__name__)


def _finished(started: _Started) -> LoadedAdapter:
    transfer = started.transfer
    try:
        adapter = started.arrival.finish()
    except CorunError as error:
        raise_if_lost(error)
        return _failed(transfer, error)
    return LoadedAdapter(transfer.transfer_id, transfer.adapter_id, adapter)
