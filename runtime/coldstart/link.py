"""When the layer groups of loads under way will be there: the planner's view of the link. Pure.

Demand loads share the link fairly; prefetches move only while no demand does. A load's groups
come in order. What has been reported overrides what was predicted.

Source: the loose ends of Toppings section 4.1: several loads share one link, so group times
computed for the full rate would be too early.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...profiles.link import SharedLane
from ...profiles.models import LinkModel
from ..plan import AdapterId


@dataclass(slots=True, eq=False)
class _LinkLoad:
    group_bytes: tuple[int, ...]
    is_demand: bool
    num_ready: int = 0
    ready_at_s: list[float] = field(default_factory=list)  # predicted, by group


class LinkLedger:
    """Loads under way, and when each of their layer groups is expected."""

    def __init__(self, link: LinkModel) -> None:
        self._link = link
        self._loads: dict[AdapterId, _LinkLoad] = {}

    def start(
        self, adapter_id: AdapterId, group_bytes: Sequence[int], now_s: float, *, is_demand: bool
    ) -> None:
        """A load of these layer groups begins."""
        assert adapter_id not in self._loads, f"adapter {adapter_id} is loaded twice"
        self._loads[adapter_id] = _LinkLoad(tuple(group_bytes), is_demand)
        self._predict(now_s)

    def promote(self, adapter_id: AdapterId, now_s: float) -> None:
        """A request waits for this load now, which began as a prefetch."""
        load = self._loads[adapter_id]
        if not load.is_demand:
            load.is_demand = True
            self._predict(now_s)

    def report(self, adapter_id: AdapterId, num_ready: int, now_s: float) -> None:
        """``num_ready`` groups of this load have arrived."""
        load = self._loads.get(adapter_id)
        if load is not None and num_ready > load.num_ready:
            load.num_ready = num_ready
            self._predict(now_s)

    def end(self, adapter_id: AdapterId, now_s: float) -> None:
        """The load has ended, or was given up."""
        if self._loads.pop(adapter_id, None) is not None:
            self._predict(now_s)

    def num_ready(self, adapter_id: AdapterId) -> int:
        """Groups that have arrived."""
        return self._loads[adapter_id].num_ready

    def ready_s(self, adapter_id: AdapterId, now_s: float) -> tuple[float, ...]:
        """By group: seconds until it is expected; 0 if it is there or overdue."""
        load = self._loads[adapter_id]
        return tuple(
            0.0 if group < load.num_ready else max(0.0, at_s - now_s)
            for group, at_s in enumerate(load.ready_at_s)
        )

    def _predict(self, now_s: float) -> None:
        """Let the loads run in thought, from what has been reported."""
        lane = SharedLane(self._link.bytes_per_s)
        for index, load in enumerate(self._loads.values()):
            left_bytes = load.group_bytes[load.num_ready :]
            lane.start(index, left_bytes, now_s, is_demand=load.is_demand)
        ends_s = lane.ends_s()
        for index, load in enumerate(self._loads.values()):
            left_s = [end_s + self._link.latency_s for end_s in ends_s[index]]
            load.ready_at_s = [now_s] * load.num_ready + left_s


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
