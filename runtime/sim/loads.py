"""Transfers to and from a simulated device: files are read one by one, the link is shared.

Files are read as ``coldstart.link`` assumes: one adapter after the other, each in the order of its
layers, demand loads before prefetches, which are preempted between layer groups. KV blocks share
the link with the first adapter in turn; those to the host have its other direction to themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...profiles.link import PREFETCH, Direction, LinkStats, SharedLane
from ...profiles.models import LinkModel
from ..plan import (
    AdapterId,
    AdapterTransfer,
    KvTransfer,
    Result,
    TransferId,
    TransferProgress,
    TransferRead,
    TransferResult,
)


@dataclass(slots=True, eq=False)
class _Load:
    transfer: AdapterTransfer
    group_bytes: tuple[int, ...]
    is_demand: bool
    num_arrived: int = 0  # groups on the device
    on_host_s: list[float] = field(default_factory=list)  # when groups got to the host's memory
    read_s: float = 0.0  # spent on reading these groups

    @property
    def num_on_host(self) -> int:
        return len(self.on_host_s)


@dataclass(frozen=True, slots=True)
class _Reading:
    load: _Load
    begin_s: float
    end_s: float


class SimulatedLoads:
    """Running loads and KV copies, and when each part arrives. Time never goes back."""

    def __init__(self, link: LinkModel, file_bytes_per_s: float) -> None:
        self._link = link
        self._file_bytes_per_s = file_bytes_per_s
        self._lanes = {direction: SharedLane(link.bytes_per_s) for direction in Direction}
        self._num_bytes = dict.fromkeys(Direction, 0)
        self._loads: dict[TransferId, _Load] = {}
        self._order: list[TransferId] = []  # of loads that requests wait for
        self._copies: dict[TransferId, KvTransfer] = {}
        self._reading: _Reading | None = None
        # The newest completed load of each adapter, as ``times_s``.
        self._ended_s: dict[AdapterId, tuple[Sequence[float], Sequence[float]]] = {}
        # (time, transfer, part) of arrivals over the link, the next one last.
        self._arrivals: list[tuple[float, TransferId, int]] = []

    def start(self, transfer: AdapterTransfer, group_bytes: tuple[int, ...], now_s: float) -> None:
        load = _Load(transfer, group_bytes, transfer.is_demand)
        self._loads[transfer.transfer_id] = load
        if load.is_demand and transfer.transfer_id not in self._order:
            self._order.append(transfer.transfer_id)
        self._give_turns(now_s)  # it may be before others
        self._num_bytes[Direction.TO_DEVICE] += sum(group_bytes)
        if transfer.host is None or transfer.host.is_filled:
            load.on_host_s = [now_s] * len(group_bytes)
            self._copy(load, group_bytes, now_s)
        elif self._reading is None:
            self._read_next(now_s)

    def start_copy(self, transfer: KvTransfer, num_bytes: int, now_s: float) -> None:
        """Begin a copy of KV blocks, which arrive together."""
        self._copies[transfer.transfer_id] = transfer
        self._num_bytes[transfer.direction] += num_bytes
        turn = 0 if transfer.is_demand else PREFETCH
        self._lanes[transfer.direction].start(transfer.transfer_id, (num_bytes,), now_s, turn=turn)
        self._expect()

    def promote(self, transfer_id: TransferId, now_s: float) -> None:
        """Make a prefetch a demand load; unknown transfers have ended."""
        if transfer_id in self._copies:
            self._lanes[Direction.TO_DEVICE].give_turn(transfer_id, 0, now_s)
            self._expect()
            return
        load = self._loads.get(transfer_id)
        if load is None:
            return
        assert not load.is_demand, f"transfer {transfer_id} is no prefetch"
        load.is_demand = True
        if transfer_id not in self._order:
            self._order.append(transfer_id)
        self._give_turns(now_s)

    def order(self, order: Sequence[TransferId], now_s: float) -> None:
        """Let loads use the link in this order; new ones may be among them."""
        self._order = list(order)
        self._give_turns(now_s)

    @property
    def next_s(self) -> float:
        """Time of the next event."""
        arrival_s = self._arrivals[-1][0] if self._arrivals else math.inf
        return min(arrival_s, math.inf if self._reading is None else self._reading.end_s)

    def process_next(self) -> Result:
        if self._reading is not None and self._reading.end_s <= self.next_s:
            return self._end_reading(self._reading)
        now_s, transfer_id, group = self._arrivals.pop()
        copy = self._copies.pop(transfer_id, None)
        if copy is not None:
            self._lanes[copy.direction].remove(transfer_id, now_s)
            return TransferResult(transfer_id)
        load = self._loads[transfer_id]
        load.num_arrived = group + 1
        if load.num_arrived < len(load.group_bytes):
            return TransferProgress(transfer_id, load.num_arrived)
        self._ended_s[load.transfer.adapter_id] = load.on_host_s, self._arrival_s(load)
        self._lanes[Direction.TO_DEVICE].remove(transfer_id, now_s)
        del self._loads[transfer_id]
        if load.is_demand:
            self._order.remove(transfer_id)
            self._give_turns(now_s)
        return TransferResult(transfer_id)

    def times_s(self, adapter_id: AdapterId) -> tuple[Sequence[float], Sequence[float]]:
        """When each layer group of the newest load is, or was, on the host and on the device.

        An estimate: transfers that begin later may delay it.
        """
        for load in self._loads.values():
            if load.transfer.adapter_id == adapter_id:
                return [*load.on_host_s, *self._read_ends_s(load)], self._arrival_s(load)
        return self._ended_s[adapter_id]

    def stats(self, direction: Direction, now_s: float) -> LinkStats:
        busy_s, num_transfers = self._lanes[direction].at(now_s)
        return LinkStats(self._num_bytes[direction], busy_s, num_transfers)

    def _arrival_s(self, load: _Load) -> tuple[float, ...]:
        ends_s: list[float] = []
        if load.num_on_host:
            ends_s += self._lanes[Direction.TO_DEVICE].ends_s()[load.transfer.transfer_id]
        unread_bytes = load.group_bytes[len(ends_s) :]
        for num_bytes, read_s in zip(unread_bytes, self._read_ends_s(load), strict=True):
            ends_s.append(max([read_s, *ends_s[-1:]]) + num_bytes / self._link.bytes_per_s)
        return tuple(end_s + self._link.latency_s for end_s in ends_s)

    def _copy(self, load: _Load, group_bytes: tuple[int, ...], now_s: float) -> None:
        """Queue layer groups on the link, behind those of the same load."""
        self._lanes[Direction.TO_DEVICE].start(
            load.transfer.transfer_id, group_bytes, now_s, turn=self._turn(load)
        )
        self._expect()

    def _turn(self, load: _Load) -> int:
        """The number of loads before it."""
        if not load.is_demand:
            return PREFETCH
        ahead = self._order[: self._order.index(load.transfer.transfer_id)]
        return sum(one in self._loads and self._loads[one].is_demand for one in ahead)

    def _give_turns(self, now_s: float) -> None:
        """Apply the order to the loads with layer groups on the link."""
        for transfer_id, load in self._loads.items():
            self._lanes[Direction.TO_DEVICE].give_turn(transfer_id, self._turn(load), now_s)
        self._expect()

    def _expect(self) -> None:
        """Compute all arrival times again: the transfers that share the link have changed."""
        self._arrivals = [
            (end_s + self._link.latency_s, TransferId(index), part)
            for lane in self._lanes.values()
            for index, ends_s in lane.ends_s().items()
            for part, end_s in enumerate(ends_s)
            if TransferId(index) in self._copies or part >= self._loads[TransferId(index)].num_arrived
        ]
        self._arrivals.sort(reverse=True)

    def _read_next(self, now_s: float) -> None:
        """Read one more layer group, of the first unread load."""
        self._reading = None
        for load in self._unread():
            duration_s = load.group_bytes[load.num_on_host] / self._file_bytes_per_s
            self._reading = _Reading(load, now_s, now_s + duration_s)
            return

    def _unread(self) -> list[_Load]:
        """Loads with files to read, in the order in which they are read."""
        unread = [load for load in self._loads.values() if load.num_on_host < len(load.group_bytes)]
        return sorted(unread, key=lambda load: not load.is_demand)

    def _read_ends_s(self, load: _Load) -> list[float]:
        """When the layer groups of ``load`` that are not on the host get there."""
        reading = self._reading
        if reading is None:
            return []
        now_s = reading.end_s
        for other in sorted(self._unread(), key=lambda one: one is not reading.load):
            ends_s: list[float] = []
            for num_bytes in other.group_bytes[other.num_on_host :]:
                if ends_s or other is not reading.load:
                    now_s += num_bytes / self._file_bytes_per_s
                ends_s.append(now_s)
            if other is load:
                return ends_s
        return []

    def _end_reading(self, reading: _Reading) -> TransferRead:
        load, now_s = reading.load, reading.end_s
        group = load.num_on_host
        load.on_host_s.append(now_s)
        load.read_s += now_s - reading.begin_s
        self._copy(load, (load.group_bytes[group],), now_s)
        self._read_next(now_s)
        return TransferRead(load.transfer.transfer_id, load.num_on_host, load.read_s)
