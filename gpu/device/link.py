"""A link of given bandwidth and latency between host and device, shared by concurrent transfers.

All times are absolute, so a sleep that ends late delays one transfer and none after it. Knows
nothing of memory or streams.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...profiles.link import Direction, LinkStats, SharedLane

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class LinkTransfer:
    """One transfer, made by ``PacedLink.begin``."""

    direction: Direction
    index: int
    start_s: float


class _FreeLane:
    """A direction at full memory speed: only counts, with the measured times of transfers."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._active: dict[int, float] = {}
        self._busy_since_s = 0.0

    def start(self, index: int, part_bytes: Sequence[float], start_s: float) -> float:
        if not self._active:
            self._busy_since_s = max(start_s, self._busy_since_s)
        self._active[index] = start_s
        return start_s

    def ends_s(self) -> Mapping[int, Sequence[float]]:
        return {index: (start_s,) for index, start_s in self._active.items()}

    def remove(self, index: int, now_s: float) -> None:
        del self._active[index]
        if not self._active:
            self._busy_s += max(0.0, now_s - self._busy_since_s)
            self._busy_since_s = now_s

    def at(self, now_s: float) -> tuple[float, int]:
        under_way_s = now_s - self._busy_since_s if self._active else 0.0
        return self._busy_s + under_way_s, len(self._active)


def _lanes(gib_per_s: float | None) -> "dict[Direction, SharedLane | _FreeLane]":
    return {
        direction: _FreeLane() if gib_per_s is None else SharedLane(gib_per_s * _GIB)
        for direction in Direction
    }


class PacedLink:
    """Computes when transfers end, and makes their callers wait until then. Thread-safe."""

    def __init__(
        self,
        gib_per_s: float | None = None,
        latency_us: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``gib_per_s`` per direction; None = unlimited, transfers are then only counted.

        A transfer's bytes arrive ``latency_us`` after the link has carried them; the link is free
        for other transfers meanwhile.
        """
        assert gib_per_s is None or gib_per_s > 0, gib_per_s
        assert latency_us >= 0, latency_us
        self.gib_per_s = gib_per_s
        self.latency_us = latency_us
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._num_started = 0
        self._num_bytes = dict.fromkeys(Direction, 0)
        self._lanes: dict[Direction, SharedLane | _FreeLane] = _lanes(gib_per_s)
        self._ends_s: dict[Direction, Mapping[int, Sequence[float]]] = {}  # since the newest start

    def change_bandwidth(self, gib_per_s: float) -> None:
        """Change the link; no transfer may be running, and the link must be paced."""
        assert self.is_paced, "the device may bypass a link that is not paced"
        with self._lock:
            now_s = self._clock()
            assert not any(lane.at(now_s)[1] for lane in self._lanes.values()), "a transfer is open"
            self.gib_per_s = gib_per_s
            self._lanes = _lanes(gib_per_s)
            self._ends_s.clear()

    @property
    def is_paced(self) -> bool:
        """Whether transfers are delayed at all."""
        return self.gib_per_s is not None or self.latency_us > 0

    def describe(self) -> str:
        """For logs: "unpaced", or bandwidth and latency."""
        if not self.is_paced:
            return "unpaced"
        bandwidth = "unlimited" if self.gib_per_s is None else f"{self.gib_per_s:g} GiB/s"
        return f"{bandwidth} + {self.latency_us:g} us"

    def begin(self, direction: Direction, num_bytes: int, *, start_s: float | None = None) -> LinkTransfer:
        """Start a transfer now, or at ``start_s`` on the clock: the end of the previous one.

        It cannot start before the newest start of another transfer; then it starts at that time.
        """
        assert num_bytes >= 0, num_bytes
        if start_s is None:
            start_s = self._clock()
        with self._lock:
            index = self._num_started
            self._num_started += 1
            self._num_bytes[direction] += num_bytes
            start_s = self._lanes[direction].start(index, (num_bytes,), start_s)
            self._ends_s.pop(direction, None)
        return LinkTransfer(direction, index, start_s)

    def expected_s(self, transfer: LinkTransfer) -> float:
        """Its end on the clock if no other transfer starts; others can only delay it."""
        direction = transfer.direction
        with self._lock:
            if direction not in self._ends_s:
                self._ends_s[direction] = self._lanes[direction].ends_s()
            return self._ends_s[direction][transfer.index][0] + self.latency_us / 1e6

    def finish(self, transfer: LinkTransfer) -> float:
        """Wait until its bytes have arrived; return the time of arrival. Call once.

        A transfer that directly follows starts at that time, however late this call returns.
        """
        while (left_s := (end_s := self.expected_s(transfer)) - self._clock()) > 0:
            self._sleep(left_s)
        now_s = self._clock()
        with self._lock:
            self._lanes[transfer.direction].remove(transfer.index, now_s)
        return end_s if self.is_paced else now_s

    def stats(self, direction: Direction) -> LinkStats:
        """Bytes that one direction has carried, and transfers in progress."""
        now_s = self._clock()
        with self._lock:
            busy_s, num_transfers = self._lanes[direction].at(now_s)
            return LinkStats(self._num_bytes[direction], busy_s, num_transfers)
