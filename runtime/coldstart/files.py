"""When the layer groups of adapters that are read from files will be on the host. Pure.

One adapter is read after the other, each in the order of its layers; those that requests wait for
before prefetches, which give way between two layers. How fast, is learned from what has been read;
the first guess is low, because the first layer group that was read corrects it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import AdapterId

_FIRST_BYTES_PER_S = 100e6
_SMOOTHING = 0.5  # weight of the newest measurement: files are in the system's memory, or are not


@dataclass(slots=True, eq=False)
class _FileLoad:
    group_bytes: tuple[int, ...]
    is_demand: bool
    num_on_host: int = 0  # groups
    num_read: int = 0  # groups that it is known of how long it took to read them
    read_s: float = 0.0
    # When the newest group was told of, or the reading began; None = others have their turn.
    since_s: float | None = None


class FileLedger:
    """Adapters that are being read, or wait to be, and when their layer groups are expected."""

    def __init__(self) -> None:
        self._bytes_per_s = _FIRST_BYTES_PER_S
        self._loads: dict[AdapterId, _FileLoad] = {}

    def start(
        self, adapter_id: AdapterId, group_bytes: Sequence[int], now_s: float, *, is_demand: bool
    ) -> None:
        """An adapter is to be read."""
        assert adapter_id not in self._loads, f"adapter {adapter_id} is read twice"
        self._loads[adapter_id] = _FileLoad(tuple(group_bytes), is_demand)
        self._take_turn(now_s)

    def promote(self, adapter_id: AdapterId, now_s: float) -> None:
        """A request waits for this adapter now."""
        load = self._loads.get(adapter_id)
        if load is not None:
            load.is_demand = True
            self._take_turn(now_s)

    def report(self, adapter_id: AdapterId, num_read: int, read_s: float, now_s: float) -> None:
        """``num_read`` groups are on the host, and it has taken ``read_s`` to read them."""
        load = self._loads.get(adapter_id)
        if load is None or num_read <= load.num_read:
            return
        new_bytes = sum(load.group_bytes[load.num_read : num_read])
        if read_s > load.read_s and new_bytes:
            measured = new_bytes / (read_s - load.read_s)
            self._bytes_per_s += _SMOOTHING * (measured - self._bytes_per_s)
        load.num_read, load.read_s = num_read, read_s
        self.arrived(adapter_id, num_read, now_s)

    def arrived(self, adapter_id: AdapterId, num_groups: int, now_s: float) -> None:
        """``num_groups`` groups are on the device, and so on the host, however they came there."""
        load = self._loads.get(adapter_id)
        if load is None or num_groups <= load.num_on_host:
            return
        for other in self._loads.values():
            other.since_s = None  # whatever the order was thought to be, this is the one
        load.num_on_host, load.since_s = num_groups, now_s
        if num_groups == len(load.group_bytes):
            load.since_s = None
            self._take_turn(now_s)

    def end(self, adapter_id: AdapterId, now_s: float) -> None:
        """The load has ended, or was given up."""
        if self._loads.pop(adapter_id, None) is not None:
            self._take_turn(now_s)

    def num_on_host(self, adapter_id: AdapterId) -> int | None:
        """Groups that are on the host; None if the adapter is not read from files."""
        load = self._loads.get(adapter_id)
        return None if load is None else load.num_on_host

    def read_s(self, adapter_id: AdapterId, now_s: float) -> tuple[float, ...]:
        """By group: seconds until it is expected on the host; 0 if it is there.

        What is late by some time is expected to take as long again: a disk that hangs must not
        look as if it were done.
        """
        begin_s = now_s
        for number, load in self._in_order():
            at_s = begin_s if load.since_s is None else load.since_s
            expected_s = [0.0] * load.num_on_host
            for num_bytes in load.group_bytes[load.num_on_host :]:
                at_s += num_bytes / self._bytes_per_s
                at_s = max(at_s, 2 * now_s - at_s)
                expected_s.append(at_s - now_s)
            if number == adapter_id:
                return tuple(expected_s)
            begin_s = now_s + max(expected_s, default=0.0)
        raise KeyError(adapter_id)

    def _in_order(self) -> list[tuple[AdapterId, _FileLoad]]:
        """The one that is being read, then those that requests wait for, then the others."""
        return sorted(
            self._loads.items(), key=lambda item: (item[1].since_s is None, not item[1].is_demand)
        )

    def _take_turn(self, now_s: float) -> None:
        """Begin with the next one if nothing is being read, or a prefetch that gives way."""
        waiting = [load for _, load in self._in_order() if load.num_on_host < len(load.group_bytes)]
        if not waiting:
            return
        first = waiting[0]
        if first.since_s is None:
            first.since_s = now_s
        elif not first.is_demand:
            demanded = next((load for load in waiting if load.is_demand), None)
            if demanded is not None:
                first.since_s, demanded.since_s = None, now_s


def ready_s(
    on_link_s: Sequence[float], read_s: Sequence[float], copy_s: Sequence[float]
) -> tuple[float, ...]:
    """By group: when it is on the device that must be read and then be copied.

    Args:
        on_link_s: When it would be there if all were on the host.
        read_s: When it is on the host; 0 = it is.
        copy_s: How long its copy takes by itself.
    """
    return tuple(
        max(link_s, host_s + own_s) if host_s else link_s
        for link_s, host_s, own_s in zip(on_link_s, read_s, copy_s, strict=True)
    )
