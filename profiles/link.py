"""Fair sharing of a link between host and device. Pure.

Both directions are independent (full duplex). Within one, all running transfers get the same share
of the bandwidth at every moment: generalised processor sharing. Its virtual clock counts the bytes
that each transfer has received. Prefetches move only while no demand transfer does. All times are
absolute.

Source: Parekh and Gallager, A generalized processor sharing approach to flow control, section III.
"""

import copy
import enum
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class Direction(enum.Enum):
    """The direction of a transfer."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Statistics of one direction of a link, since it was made."""

    num_bytes: int  # of all transfers that have started
    busy_s: float  # with at least one running transfer
    num_transfers: int  # running now


@dataclass(slots=True)
class _Share:
    """Transfers that share the bandwidth evenly."""

    each_bytes: float = 0.0  # the virtual clock
    # Heap of pending parts: end on the virtual clock, transfer, number of the part.
    parts: list[tuple[float, int, int]] = field(default_factory=list)
    num_left: dict[int, int] = field(default_factory=dict)  # parts of each running transfer

    def copy(self) -> "_Share":
        return _Share(self.each_bytes, self.parts.copy(), self.num_left.copy())

    def push(self, end_bytes: float, index: int, part: int) -> None:
        heapq.heappush(self.parts, (end_bytes, index, part))
        self.num_left[index] = self.num_left.get(index, 0) + 1

    def pop(self) -> int:
        """Complete the next part; return its transfer."""
        self.each_bytes, index, _ = heapq.heappop(self.parts)
        self.num_left[index] -= 1
        if not self.num_left[index]:
            del self.num_left[index]
        return index


class SharedLane:
    """One direction with a bandwidth. Results up to ``_now_s`` are final.

    Time advances only when a transfer starts or becomes urgent, never on reads. So a transfer may
    start a little in the past, where the one before it on its stream ended.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_s = 0.0
        self._now_s = 0.0
        self._demand = _Share()
        self._prefetch = _Share()  # moves only while there is no demand transfer
        self._ends_s: dict[int, list[float]] = {}  # of completed parts, until ``remove``

    def start(
        self, index: int, part_bytes: Sequence[float], start_s: float, *, is_demand: bool = True
    ) -> float:
        """Queue parts of a transfer, one behind the other, behind its earlier parts.

        Returns the start time: not before the latest earlier start.
        """
        self._advance(start_s)
        share = self._demand if is_demand else self._prefetch
        if not share.parts:
            share.each_bytes = 0.0  # avoids accumulated rounding
        ends_s = self._ends_s.setdefault(index, [])
        pending = [end for end, other, _ in share.parts if other == index]
        end_bytes, part = max(pending, default=share.each_bytes), len(ends_s) + len(pending)
        for num_bytes in part_bytes:
            end_bytes += num_bytes
            share.push(end_bytes, index, part)
            part += 1
        return self._now_s

    def promote(self, index: int, now_s: float) -> None:
        """Make a running prefetch a demand transfer."""
        self._advance(now_s)
        moved = sorted(one for one in self._prefetch.parts if one[1] == index)
        if not moved:
            return
        self._prefetch.parts = [one for one in self._prefetch.parts if one[1] != index]
        heapq.heapify(self._prefetch.parts)
        del self._prefetch.num_left[index]
        if not self._demand.parts:
            self._demand.each_bytes = 0.0
        for end_bytes, _, part in moved:
            ahead_bytes = end_bytes - self._prefetch.each_bytes
            self._demand.push(self._demand.each_bytes + ahead_bytes, index, part)

    def ends_s(self) -> Mapping[int, Sequence[float]]:
        """When each part ends, or has ended, of all transfers without a call of ``remove``.

        Assumes that no other transfer starts; more transfers can only delay it.
        """
        future = self._copy()
        future._ends_s = {index: ends_s.copy() for index, ends_s in self._ends_s.items()}
        future._advance(math.inf)
        return future._ends_s

    def remove(self, index: int, _now_s: float) -> None:
        """Drop the end times of a transfer."""
        del self._ends_s[index]

    def at(self, now_s: float) -> tuple[float, int]:
        """Busy seconds and number of running transfers at ``now_s``."""
        future = self._copy()
        future._advance(now_s)
        return future._busy_s, len(future._demand.num_left) + len(future._prefetch.num_left)

    def _copy(self) -> "SharedLane":
        future = copy.copy(self)
        future._demand, future._prefetch = self._demand.copy(), self._prefetch.copy()
        future._ends_s = {}
        return future

    def _advance(self, to_s: float) -> None:
        while share := self._moving():
            rate = self._bytes_per_s / len(share.num_left)
            end_s = self._now_s + (share.parts[0][0] - share.each_bytes) / rate
            if end_s > to_s:
                if to_s > self._now_s:
                    share.each_bytes += (to_s - self._now_s) * rate
                    self._busy_s += to_s - self._now_s
                break
            index = share.pop()
            if index in self._ends_s:
                self._ends_s[index].append(end_s)
            self._busy_s += end_s - self._now_s
            self._now_s = end_s
        self._now_s = max(self._now_s, to_s)

    def _moving(self) -> _Share | None:
        """The transfers that move now."""
        if self._demand.parts:
            return self._demand
        return self._prefetch if self._prefetch.parts else None
