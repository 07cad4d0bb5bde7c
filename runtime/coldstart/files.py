"""Predicts when layer groups that are read from files are on the host. Pure.

The table of transfers knows the adapter that is being read. The rate is learned from reads.
"""

from collections.abc import Sequence

from ..memory.transfers import OpenLoad, TransferTable
from ..scheduler.cold import FIRST_FILE_BYTES_PER_S

_SMOOTHING = 0.5  # weight of the newest measurement; large, as files may be in the page cache


class FileForecast:
    """Predicts when the layer groups of loads from files are on the host."""

    def __init__(self, transfers: TransferTable) -> None:
        self._transfers = transfers
        self.bytes_per_s = FIRST_FILE_BYTES_PER_S

    def record(self, num_bytes: int, duration_s: float) -> None:
        """Learn from a read of ``num_bytes`` bytes."""
        if num_bytes and duration_s > 0.0:
            self.bytes_per_s += _SMOOTHING * (num_bytes / duration_s - self.bytes_per_s)

    def read_s(self, load: OpenLoad, now_s: float) -> tuple[float, ...]:
        """Return by group the predicted seconds until it is on the host; 0 if it is there.

        A group that is late by some time is expected to take as long again, so that a hanging disk
        does not look as if it were done.
        """
        if load.is_on_host:
            return (0.0,) * len(load.part_bytes)
        begin_s = now_s
        reading = self._transfers.reading
        for one in self._transfers.files_in_turn():
            at_s = begin_s
            if reading is not None and reading.load is one:
                at_s = reading.since_s
            expected_s = [0.0] * one.num_on_host
            for num_bytes in one.part_bytes[one.num_on_host :]:
                at_s += num_bytes / self.bytes_per_s
                at_s = max(at_s, 2 * now_s - at_s)
                expected_s.append(at_s - now_s)
            if one is load:
                return tuple(expected_s)
            begin_s = now_s + expected_s[-1]
        raise KeyError(load.transfer_id)


def ready_s(
    on_link_s: Sequence[float], read_s: Sequence[float], copy_s: Sequence[float]
) -> tuple[float, ...]:
    """Return by group the seconds until it is on the device, if it is read first and then copied.

    Args:
        on_link_s: Seconds until it is there if all groups are on the host.
        read_s: Seconds until it is on the host; 0 = is there.
        copy_s: Time of its copy alone.
    """
    return tuple(
        max(link_s, host_s + own_s) if host_s else link_s
        for link_s, host_s, own_s in zip(on_link_s, read_s, copy_s, strict=True)
    )
