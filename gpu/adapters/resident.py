"""The adapters that rows may use: on the device, or on their way to it."""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ...runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    Result,
    TransferId,
    TransferProgress,
    TransferRead,
    TransferResult,
)
from ..device.lost import raise_if_lost
from ..lora.table import DeviceAdapter, LoraTable
from .arrival import Copied
from .loader import AdapterLoader, LoadedAdapter, LoadProgress, ReadProgress, StartedLoad

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class ResidentAdapter:
    """What the executor needs of a row's adapter."""

    table_row: int
    max_rank: int
    arriving: Copied | None = None  # its first layers may have arrived


_BASE = ResidentAdapter(table_row=-1, max_rank=0)


class ResidentAdapters:
    """Starts loads and evictions, and updates the kernels' table with their results.

    Used by the engine's thread alone.
    """

    def __init__(self, loader: AdapterLoader, table: LoraTable, results: deque[Result]) -> None:
        """``results`` receives the progress and the end of every transfer."""
        self._loader = loader
        self._table = table
        self._results = results
        self._resident: dict[AdapterId, ResidentAdapter] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no adapter is resident and no load is running."""
        return not self._resident and self._loader.is_idle

    @property
    def has_demand(self) -> bool:
        """Whether a request waits for a load that is being copied."""
        return self._loader.has_demand

    def __contains__(self, adapter_id: AdapterId) -> bool:
        """Whether the adapter is on the device or on its way; always true of the base model."""
        return adapter_id == BASE_ADAPTER or adapter_id in self._resident

    def __getitem__(self, adapter_id: AdapterId) -> ResidentAdapter:
        return _BASE if adapter_id == BASE_ADAPTER else self._resident[adapter_id]

    def load(self, transfer: AdapterTransfer) -> None:
        """Start to bring an adapter to the device."""
        self._loader.start(transfer)

    def order(self, order: Sequence[TransferId]) -> None:
        """See ``AdapterLoader.order``."""
        self._loader.order(order)

    def promote(self, transfer_id: TransferId) -> None:
        """Make a prefetch urgent: a request waits for it."""
        self._loader.promote(transfer_id)

    def evict(self, adapter_id: AdapterId) -> None:
        """Remove an adapter from the table, which frees it. Unknown ids are ignored."""
        resident = self._resident.pop(adapter_id, None)
        if resident is not None:
            self._table.remove(resident.table_row)

    @contextmanager
    def polling_suspended(self) -> Iterator[None]:
        """Suspend polling of copies while this thread computes."""
        with self._loader.polling_suspended():
            yield

    def take_loads(self) -> None:
        """Add adapters that are moving or have arrived to the kernels' table."""
        for event in self._loader.take_events():
            if isinstance(event, StartedLoad):
                self._enter(event.adapter_id, event.arrival.adapter, event.arrival)
            elif isinstance(event, LoadProgress):
                self._results.append(TransferProgress(event.transfer_id, event.num_groups))
            elif isinstance(event, ReadProgress):
                reading = event.reading
                self._results.append(TransferRead(event.transfer_id, reading.num_groups, reading.duration_s))
            else:
                self._end_load(event)

    def close(self) -> None:
        """Stop loading, and release all adapters."""
        self._loader.close()
        self._resident.clear()
        self._table.clear()

    def _enter(self, adapter_id: AdapterId, adapter: DeviceAdapter, arriving: Copied | None) -> str | None:
        """Add an adapter to the table; returns the reason if this fails."""
        try:
            row = self._table.add(adapter)
        except Exception as failure:
            raise_if_lost(failure)
            _LOG.exception("no table row for adapter %d; its load fails", adapter_id)
            if adapter.release is not None:  # otherwise the host's place would never be freed
                adapter.release()
            return str(failure)
        self._resident[adapter_id] = ResidentAdapter(row, adapter.max_rank, arriving)
        return None

    def _end_load(self, loaded: LoadedAdapter) -> None:
        resident = self._resident.get(loaded.adapter_id)
        error = loaded.error
        if loaded.adapter is None:
            if resident is not None:
                del self._resident[loaded.adapter_id]
                self._table.remove(resident.table_row)
        elif resident is not None:
            resident.arriving = None
        else:
            error = self._enter(loaded.adapter_id, loaded.adapter, None)
        self._results.append(TransferResult(loaded.transfer_id, error, loaded.error_kind))
