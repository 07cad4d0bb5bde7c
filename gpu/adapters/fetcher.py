"""Fetches adapters to the host one at a time: from the arena, or from files into it.

Adapters that requests wait for precede prefetches, also between two layers of a prefetch. An
adapter is handed over as soon as it has its place in the arena. Its files are read after that,
while its first layers are already in use.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...cpu_workers.affinity import place_thread
from ...runtime.errors import AdapterUnavailableError, CorunError
from ...runtime.plan import AdapterTransfer, TransferId
from .arrival import AdapterLoad

_LOG = logging.getLogger(__name__)


# Fetches the adapter of a load to the host; raises ``CorunError`` with the reason.
FetchAdapter = Callable[[AdapterTransfer], AdapterLoad]


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter that has its place on the host, or the reason why it does not."""

    transfer: AdapterTransfer
    arrival: AdapterLoad | None
    error: CorunError | None = None


@dataclass(slots=True, eq=False)
class _Waiting:
    transfer: AdapterTransfer
    is_prefetch: bool


class AdapterFetcher:
    """Owns the thread that fetches. All methods belong to the engine's thread."""

    def __init__(self, fetch: FetchAdapter, notify: Callable[[], None], cpus: tuple[int, ...] = ()) -> None:
        """Start the thread.

        Args:
            fetch: Called by the thread.
            notify: Called by the thread when there is more to take, or more has been read.
            cpus: Cores of the thread; () = those of the caller.
        """
        self._cpus = cpus
        self._fetch = fetch
        self._notify = notify
        self._submitted: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._fetched: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self._by_id: dict[TransferId, _Waiting] = {}  # submitted, and not taken yet
        self._waiting: list[_Waiting] = []  # used by the thread only
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="corun-adapter-loader", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether every submitted load has been taken."""
        return not self._by_id

    def submit(self, transfer: AdapterTransfer) -> None:
        """Submit the adapter of a load; ``take`` returns it."""
        waiting = _Waiting(transfer, not transfer.is_demand)
        self._by_id[transfer.transfer_id] = waiting
        self._submitted.put(waiting)

    def promote(self, transfer_id: TransferId) -> bool:
        """Make a prefetch urgent, as a request waits for it; False if it is not here any more."""
        waiting = self._by_id.get(transfer_id)
        if waiting is None:
            return False
        waiting.is_prefetch = False
        return True

    def take(self) -> tuple[Fetched, bool] | None:
        """The next fetched adapter, and whether it is a prefetch; None if there is none."""
        try:
            fetched = self._fetched.get_nowait()
        except queue.Empty:
            return None
        return fetched, self._by_id.pop(fetched.transfer.transfer_id).is_prefetch

    def close(self) -> None:
        """Stop reading and end the thread; what was fetched can still be taken."""
        self._is_closed = True
        self._submitted.put(None)
        self._thread.join()

    def _run(self) -> None:
        place_thread(self._cpus)
        while not self._is_closed and self._receive_submitted(0.0 if self._waiting else None):
            self._fetch_next()

    def _receive_submitted(self, timeout_s: float | None) -> bool:
        """Wait for more loads to fetch; False once the fetcher is closed."""
        try:
            waiting = self._submitted.get(timeout=timeout_s)
            while waiting is not None:
                self._waiting.append(waiting)
                waiting = self._submitted.get_nowait()
        except queue.Empty:
            return True
        return False

    def _fetch_next(self) -> None:
        """Fetch the next of the waiting loads."""
        # In order among equally urgent ones, or large adapters would starve.
        waiting = min(self._waiting, key=lambda one: one.is_prefetch)
        fetched = self._fetch_one(waiting.transfer)
        self._waiting.remove(waiting)
        self._fetched.put(fetched)
        self._notify()
        if fetched.arrival is not None:
            fetched.arrival.read(partial(self._on_layer_read, waiting), lambda: not self._is_closed)

    def _on_layer_read(self, waiting: _Waiting) -> None:
        """More has been read; urgent loads precede the rest of a prefetch."""
        self._notify()
        while waiting.is_prefetch and not self._is_closed:
            self._receive_submitted(0.0)
            if all(one.is_prefetch for one in self._waiting):
                return
            self._fetch_next()

    def _fetch_one(self, transfer: AdapterTransfer) -> Fetched:
        try:
            return Fetched(transfer, self._fetch(transfer))
        except CorunError as error:
            return Fetched(transfer, None, error)
        except Exception as error:  # a bug must fail one adapter, not the thread
            _LOG.exception("loading adapter %d failed", transfer.adapter_id)
            reason = f"{type(error).__name__}: {error}"
            return Fetched(transfer, None, AdapterUnavailableError(reason))
