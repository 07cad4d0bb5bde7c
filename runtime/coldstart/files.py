"""When the layer groups of adapters that are read from files will be on the host. Pure.

The table of transfers knows which adapter is read; the rate is learned from finished reads.
"""

from collections.abc import Sequence

from ..memory.transfers import OpenLoad, TransferTable
from ..scheduler.cold import FIRST_FILE_BYTES_PER_S

_SMOOTHING = 0.5  # weight of the newest measurement: files are in the system's memory, or are not


class FileForecast:
    """When the layer groups of loads from files are expected on the host."""

    def __init__(self, transfers: TransferTable) -> None:
        self._transfers = transfers
        self.bytes_per_s = FIRST_FILE_BYTES_PER_S

    def record(self, num_bytes: int, duration_s: float) -> None:
        """So many bytes have been read, which took so long."""
        if num_bytes and duration_s > 0.0:
            self.bytes_per_s += _SMOOTHING * (num_bytes / duration_s - self.bytes_per_s)

    def read_s(self, load: OpenLoad, now_s: float) -> tuple[float, ...]:
        """By group: seconds until it is expected on the host; 0 if it is there.

        What is late by some time is expected to take as long again: a disk that hangs must not
        look as if it were done.
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
    """By group: when it is on the device, if it must be read first and then copied.

    Args:
        on_link_s: When it would be there if all were on the host.
        read_s: When it is on the host; 0 = it is.
        copy_s: How long its copy takes by itself.
    """
    return tuple(
        max(link_s, host_s + own_s) if host_s else link_s
        for link_s, host_s, own_s in zip(on_link_s, read_s, copy_s, strict=True)
    )
