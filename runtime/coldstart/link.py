"""When what is under way to the device will be there: the planner's view of the link. Pure.

What requests wait for shares the link fairly; prefetches move only while nothing else does. The
parts of a transfer come in order. What has been reported overrides what was predicted.

Source: the loose ends of Toppings section 4.1: several loads share one link, so group times
computed for the full rate would be too early.
"""

from collections.abc import Mapping, Sequence

from ...profiles.link import Direction, SharedLane
from ...profiles.models import LinkModel
from ..memory.transfers import OpenTransfer, TransferTable
from ..plan import TransferId


class LinkForecast:
    """When each part of the transfers to the device is expected."""

    def __init__(self, link: LinkModel, transfers: TransferTable) -> None:
        self._link = link
        self._transfers = transfers
        self._based_on = transfers.last_change(Direction.TO_DEVICE)
        self._ready_at_s = self._predict(self._based_on.at_s)

    def ready_s(self, transfer: OpenTransfer, now_s: float) -> tuple[float, ...]:
        """By part: seconds until it is expected; 0 if it is there or overdue."""
        change = self._transfers.last_change(Direction.TO_DEVICE)
        if change != self._based_on:
            self._based_on, self._ready_at_s = change, self._predict(change.at_s)
        return tuple(
            0.0 if part < transfer.num_arrived else max(0.0, at_s - now_s)
            for part, at_s in enumerate(self._ready_at_s[transfer.transfer_id])
        )

    def _predict(self, from_s: float) -> Mapping[TransferId, Sequence[float]]:
        """Simulate the transfers from what has been reported."""
        moving = [one for one in self._transfers if one.direction is Direction.TO_DEVICE]
        lane = SharedLane(self._link.bytes_per_s)
        for one in moving:
            left_bytes = one.part_bytes[one.num_arrived :]
            lane.start(one.transfer_id, left_bytes, from_s, is_demand=one.is_demand)
        ends_s = lane.ends_s()
        return {
            one.transfer_id: [
                *[from_s] * one.num_arrived,
                *[end_s + self._link.latency_s for end_s in ends_s[one.transfer_id]],
            ]
            for one in moving
        }


def by_layer(group_of_layer: Sequence[int], by_group: Sequence[float]) -> tuple[float, ...]:
    """Spread values of layer groups over their layers."""
    return tuple(by_group[group] for group in group_of_layer)


def group_of_layers(layer_bytes: Sequence[int], min_group_bytes: int) -> tuple[int, ...]:
    """Which layer group each layer is in: neighbours, of at least ``min_group_bytes`` together.

    A group pays the link's latency once, so it should not be smaller than what the link moves in
    a few latencies; larger ones let the device wait longer for the first. The last one may be
    smaller.
    """
    groups = []
    group, num_bytes = 0, 0
    for layer_size in layer_bytes:
        groups.append(group)
        num_bytes += layer_size
        if num_bytes >= min_group_bytes:
            group, num_bytes = group + 1, 0
    return tuple(groups)
