"""Fills an adapter's place in the host's arena from its files, while others use its first layers.

One thread reads; any other asks how far it is, and may read or copy the regions that are whole, as
they hold what was registered. The arena keeps the memory until both sides have let go.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ...runtime.adapters.resolved import AdapterReader, RawTensor
from ...runtime.errors import AdapterError, CorunError
from ...shm.arena import ArenaEntry, HostArena
from ..lora.adapter_layout import RegionWriter

_LOG = logging.getLogger(__name__)


class AdapterReading:
    """Reads one adapter, layer by layer. ``run`` ends it, and must be called."""

    def __init__(
        self, source: AdapterReader, writer: RegionWriter, arena: HostArena, entry: ArenaEntry
    ) -> None:
        """Takes ``source`` and the filler's reference to ``entry`` over."""
        self._source = source
        self._writer = writer
        self._arena = arena
        self._entry = entry
        self._region_ends = _region_ends([region.layer for region in entry.regions])
        self._is_wanted = True
        self._num_regions = 0
        self._read_s = 0.0
        self._error: CorunError | None = None
        self._is_over = False
        self._changed = threading.Condition()

    @property
    def num_regions(self) -> int:
        """Regions, from the first on, that are whole and may be used; never fewer than before."""
        return self._num_regions

    @property
    def read_s(self) -> float:
        """How long it took to read what is whole."""
        return self._read_s

    @property
    def error(self) -> CorunError | None:
        """Why the other regions will never be there; None while they may, or once they are."""
        return self._error

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._is_over

    def run(self, on_layer: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Read to the end. By one thread, once; what fails is told by ``error``.

        ``on_layer`` is called whenever there is more to use, and at the end. ``is_wanted`` is
        asked before each tensor whether to go on.
        """

        def take(raw: RawTensor, data: memoryview) -> None:
            if not (self._is_wanted and is_wanted()):
                raise AdapterError("nobody waits for its files any more")
            self._writer.write(raw, data)

        begin_s = time.monotonic()
        try:
            with self._source:
                for layer in self._source.read_layers(take):
                    self._advance(self._region_ends[layer], time.monotonic() - begin_s)
                    on_layer()  # which may read others' files
                    begin_s = time.monotonic()
                assert not self._writer.missing, self._writer.missing
        except CorunError as error:
            self._end(error)
        except Exception as error:  # a bug must fail one adapter, not the thread
            _LOG.exception("reading an adapter failed")
            self._end(AdapterError(f"{type(error).__name__}: {error}"))
        else:
            self._end(None)
        on_layer()

    def stop(self) -> None:
        """Nobody waits for the rest: let ``run`` end at the next tensor."""
        self._is_wanted = False

    def wait(self, num_regions: int, timeout_s: float) -> bool:
        """Wait until so many regions are whole; False if they will not be, or not in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_regions >= num_regions or self._is_over, timeout_s
            )
            return self._num_regions >= num_regions

    def _advance(self, num_regions: int, duration_s: float) -> None:
        with self._changed:
            self._read_s += duration_s
            self._num_regions = num_regions
            self._changed.notify_all()

    def _end(self, error: CorunError | None) -> None:
        """End the filler's reference, and tell all who wait."""
        self._arena.release(self._entry)
        with self._changed:
            self._error = error
            self._is_over = True
            self._changed.notify_all()


def _region_ends(layers: Sequence[int]) -> dict[int, int]:
    """By layer: how many regions there are up to its last one."""
    return {layer: number for number, layer in enumerate(layers, start=1)}
