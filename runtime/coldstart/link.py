"""Predicts when transfers arrive on the device, with a shared link, and files on the host. Pure.

Loads that requests wait for use the link one after the other, in the order of ``in_order``. Copies of
KV that requests wait for share it with the first one. Prefetches progress only while there are no
others. The parts of a transfer arrive in order. Reports override predictions.

Source: Toppings section 4.1, which does not consider that several loads share a link. Times of
layer groups at the full rate would be too early.
"""

from collections.abc import Mapping, Sequence

from ...profiles.link import PREFETCH, Direction, SharedLane
from ...profiles.models import LinkModel
from ..memory.transfers import OpenLoad, OpenTransfer, TransferTable
from ..plan import TransferId
from ..scheduler.cold import FIRST_FILE_BYTES_PER_S

_PATIENCE = 8.0  # multiple of its own time after which a load goes before all others but such ones
_SMOOTHING = 0.5  # weight of the newest measurement; large, as files may be in the page cache


class LinkForecast:
    """Predicts when each part of the transfers to the device arrives."""

    def __init__(self, link: LinkModel, transfers: TransferTable) -> None:
        self._link = link
        self._transfers = transfers
        self._based_on = transfers.last_change(Direction.TO_DEVICE)
        self._ready_at_s = self._predict(self._based_on.at_s)

    def ready_s(self, transfer: OpenTransfer, now_s: float) -> tuple[float, ...]:
        """Return by part the predicted seconds until it arrives; 0 if it is there or overdue."""
        change = self._transfers.last_change(Direction.TO_DEVICE)
        if change != self._based_on:
            self._based_on, self._ready_at_s = change, self._predict(change.at_s)
        return tuple(
            0.0 if part < transfer.num_arrived else max(0.0, at_s - now_s)
            for part, at_s in enumerate(self._ready_at_s[transfer.transfer_id])
        )

    def _predict(self, from_s: float) -> Mapping[TransferId, Sequence[float]]:
        """Simulate the transfers from their reported progress."""
        moving = [one for one in self._transfers if one.direction is Direction.TO_DEVICE]
        lane = SharedLane(self._link.bytes_per_s)
        turns = {load.transfer_id: turn for turn, load in enumerate(self._transfers.loads_in_turn())}
        for one in moving:
            left_bytes = one.part_bytes[one.num_arrived :]
            turn = turns.get(one.transfer_id, 0 if one.is_demand else PREFETCH)
            lane.start(one.transfer_id, left_bytes, from_s, turn=turn)
        ends_s = lane.ends_s()
        return {
            one.transfer_id: [
                *[from_s] * one.num_arrived,
                *[end_s + self._link.latency_s for end_s in ends_s[one.transfer_id]],
            ]
            for one in moving
        }


def in_order(
    loads: Sequence[OpenLoad], losses: Mapping[TransferId, float], bytes_per_s: float, now_s: float
) -> list[OpenLoad]:
    """Return the loads in the order in which they use the link: the largest gain goes first.

    The gain is in seconds per second of the link: what the load's requests lose by a second of
    delay, over the seconds that the load takes. Requests that workers can serve meanwhile lose
    little. Before these come loads that a step waits for, since all of its rows wait; and before
    them loads that requests have waited for during a multiple of the load's own time, the longest
    wait first, so that none is overtaken for ever. Its own time is that of reading and copying it.
    Equal loads keep their order.

    Args:
        loads: The loads that requests wait for.
        losses: Predicted seconds that requests lose per second of delay, by load; absent = 0.
        bytes_per_s: Rate of the link.
        now_s: The current time.
    """

    def rank(load: OpenLoad) -> tuple[int, float]:
        own_s = load.read_s + sum(load.part_bytes) / bytes_per_s
        if now_s - load.demanded_s > _PATIENCE * own_s:
            return 0, load.demanded_s
        if load.is_awaited:
            return 1, 0.0
        left_s = sum(load.part_bytes[load.num_arrived :]) / bytes_per_s
        return 2, -losses.get(load.transfer_id, 0.0) / max(left_s, 1e-9)

    return sorted(loads, key=rank)


def by_layer(group_of_layer: Sequence[int], by_group: Sequence[float]) -> tuple[float, ...]:
    """Spread values of layer groups over their layers."""
    return tuple(by_group[group] for group in group_of_layer)


def group_of_layers(layer_bytes: Sequence[int], min_group_bytes: int) -> tuple[int, ...]:
    """Return the layer group of each layer: adjacent layers of at least ``min_group_bytes``.

    Each group costs the latency of the link once, so groups should not be smaller than what the
    link copies in a few latencies. With larger groups the device waits longer for the first one.
    The last group may be smaller.
    """
    groups = []
    group, num_bytes = 0, 0
    for layer_size in layer_bytes:
        groups.append(group)
        num_bytes += layer_size
        if num_bytes >= min_group_bytes:
            group, num_bytes = group + 1, 0
    return tuple(groups)


class FileForecast:
    """Predicts when the layer groups of loads from files are on the host.

    The table of transfers knows the adapter that is being read. The rate is learned from reads.
    """

    def __init__(self, transfers: TransferTable) -> None:
        self._transfers = transfers
        self.bytes_per_s = FIRST_FILE_BYTES_PER_S

    def record(self, num_bytes: int, duration_s: float) -> None:
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
