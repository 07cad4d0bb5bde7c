"""Brings adapters to the device off the step: one thread that reads, checks and packs."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..runtime.errors import CorunError
from ..runtime.plan import AdapterId, Transfer, TransferId
from .lora.table import DeviceAdapter

_LOG = logging.getLogger(__name__)

# Reads, checks and packs one adapter version; raises ``CorunError`` with the reason.
LoadAdapter = Callable[[AdapterId], DeviceAdapter]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A load that has ended: with an adapter, or with the reason why there is none."""

    transfer_id: TransferId
    adapter_id: AdapterId
    adapter: DeviceAdapter | None
    error: str | None = None


class AdapterLoader:
    """Runs loads one after the other, in the order asked for."""

    def __init__(self, load: LoadAdapter, notify: Callable[[], None]) -> None:
        """``notify`` is called in the loading thread after each load that has ended."""
        self._load = load
        self._notify = notify
        self._jobs: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[LoadedAdapter] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="corun-adapter-loader", daemon=True)
        self._thread.start()

    def start(self, transfer: Transfer) -> None:
        """Queue a load; its end comes back through ``take_done``."""
        self._jobs.put(transfer)

    def take_done(self) -> list[LoadedAdapter]:
        """Return the loads that have ended since the last call."""
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        """Finish the load that is running, drop the others, stop the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (transfer := self._jobs.get()) is not None:
            if self._closed:
                continue
            self._done.put(self._run_one(transfer))
            self._notify()

    def _run_one(self, transfer: Transfer) -> LoadedAdapter:
        try:
            adapter = self._load(transfer.adapter_id)
        except CorunError as error:
            return LoadedAdapter(transfer.transfer_id, transfer.adapter_id, None, str(error))
        except Exception as error:  # a bug or a full device must fail one adapter, not the thread
            _LOG.exception("loading adapter %d failed", transfer.adapter_id)
            reason = f"{type(error).__name__}: {error}"
            return LoadedAdapter(transfer.transfer_id, transfer.adapter_id, None, reason)
        return LoadedAdapter(transfer.transfer_id, transfer.adapter_id, adapter)
