"""Adapters where the kernels read the arena itself: on a CPU without a link."""

from collections.abc import Callable

from ..lora.adapter_layout import AdapterLayout
from ..lora.table import DeviceAdapter
from .arrival import Reading
from .store import HostAdapter


class InPlace:
    """An adapter that is where it is needed; see ``adapter_fetcher.Arrival``."""

    def __init__(self, host: HostAdapter, layout: AdapterLayout) -> None:
        """The kernels read ``host`` until the adapter is evicted."""
        self._host = host
        self._layout = layout

    def start(self, *, is_gradual: bool, offset_bytes: int | None = None) -> None:
        """Nothing is copied."""

    def read(self, on_progress: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Read its files, if they must be."""
        self._host.read(on_progress, is_wanted)

    def is_read(self) -> bool:
        """Whether nothing more is read, whatever became of it."""
        return self._host.is_read

    def reading(self) -> Reading | None:
        """Nobody plans with it here."""
        return None

    def is_done(self) -> bool:
        """Once it is on the host."""
        return self._host.is_read

    def num_arrived(self) -> int:
        """One group, of all layers."""
        return int(self._host.is_read)

    def advance(self) -> None:
        """Nothing is to be enqueued."""

    def enqueue_all(self) -> None:
        """Nothing is to be enqueued."""

    def finish(self) -> DeviceAdapter:
        """Views of the arena, which keep the reference until the adapter is released.

        Raises ``CorunError`` if its files could not be read.
        """
        if self._host.error is not None:
            self._host.release()
            raise self._host.error
        host, targets = self._host, {}
        for region, place in enumerate(host.places):
            part = host.bytes_of(region, region + 1)
            for found in self._layout.matrices_in(place, part):
                targets[found.target.index] = self._layout.views(found, part)
        return DeviceAdapter(targets, release=host.release)

    def cancel(self) -> None:
        """Give the reference back."""
        self._host.release()
