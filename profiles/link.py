"""Fair sharing of a link between host and device. Pure.

Both directions are independent (full duplex). Within one, all running transfers get the same share
of the bandwidth at every moment: generalised processor sharing. Its virtual clock counts the bytes
that each transfer has received. Transfers have turns: only those with the lowest one move. All
times are absolute.

Source: Parekh and Gallager, A generalized processor sharing approach to flow control, section III.
"""

import enum
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PREFETCH = 1 << 30  # the turn of what no request waits for: after all others


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

    def take_out(self, index: int) -> list[tuple[float, int]]:
        """Remove a transfer; return the ends and numbers of its parts, in order."""
        taken = sorted((end_bytes, part) for end_bytes, other, part in self.parts if other == index)
        self.parts = [one for one in self.parts if one[1] != index]
        heapq.heapify(self.parts)
        del self.num_left[index]
        return taken

    def pop(self) -> int:
        """Complete the next part; return its transfer."""
        self.each_bytes, index, _ = heapq.heappop(self.parts)
        self.num_left[index] -= 1
        if not self.num_left[index]:
            del self.num_left[index]
        return index


class SharedLane:
    """One direction with a bandwidth. Results up to ``_now_s`` are final.

    Time advances only when a transfer starts or gets another turn, never on reads. So a transfer may
    start a little in the past, where the one before it on its stream ended.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_s = 0.0
        self._now_s = 0.0
        self._shares: dict[int, _Share] = {}  # by turn, those with transfers that run
        self._ends_s: dict[int, list[float]] = {}  # of completed parts, until ``remove``

    def start(self, index: int, part_bytes: Sequence[float], start_s: float, *, turn: int = 0) -> float:
        """Queue parts of a transfer, one behind the other, behind its earlier parts.

        Returns the start time: not before the latest earlier start.
        """
        self._advance(start_s)
        share = self._shares.get(turn) or _Share()
        ends_s = self._ends_s.setdefault(index, [])
        pending = [end for end, other, _ in share.parts if other == index]
        end_bytes, part = max(pending, default=share.each_bytes), len(ends_s) + len(pending)
        for num_bytes in part_bytes:
            end_bytes += num_bytes
            share.push(end_bytes, index, part)
            part += 1
        if share.parts:
            self._shares[turn] = share
        return self._now_s

    def give_turn(self, index: int, turn: int, now_s: float) -> None:
        """Give another turn to a transfer, unless it has ended."""
        self._advance(now_s)
        before = next((one for one, share in self._shares.items() if index in share.num_left), turn)
        if before == turn:
            return
        share, other = self._shares[before], self._shares.setdefault(turn, _Share())
        for end_bytes, part in share.take_out(index):
            other.push(other.each_bytes + end_bytes - share.each_bytes, index, part)
        if not share.parts:
            del self._shares[before]

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
        return future._busy_s, sum(len(share.num_left) for share in future._shares.values())

    def _copy(self) -> "SharedLane":
        future = SharedLane(self._bytes_per_s)
        future._busy_s, future._now_s = self._busy_s, self._now_s
        future._shares = {turn: share.copy() for turn, share in self._shares.items()}
        return future

    def _advance(self, to_s: float) -> None:
        while self._shares:
            turn = min(self._shares)
            share = self._shares[turn]
            rate = self._bytes_per_s / len(share.num_left)
            end_s = self._now_s + (share.parts[0][0] - share.each_bytes) / rate
            if end_s > to_s:
                if to_s > self._now_s:
                    share.each_bytes += (to_s - self._now_s) * rate
                    self._busy_s += to_s - self._now_s
                break
            index = share.pop()
            if not share.parts:
                del self._shares[turn]
            if index in self._ends_s:
                self._ends_s[index].append(end_s)
            self._busy_s += end_s - self._now_s
            self._now_s = end_s
        self._now_s = max(self._now_s, to_s)
