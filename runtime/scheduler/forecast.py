"""Which adapters are asked for soon, by when they were asked for before. Pure.

Source: Chameleon section 4.1, which takes it from Shahrad et al., Serverless in the Wild (2020),
section 4.2: a histogram of the gaps between an adapter's requests says between which percentiles of
them the next one is expected. Bins here are geometric: adapters are asked for again after seconds.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..adapter import AdapterFacts
from ..plan import AdapterId
from ..request import Request

_FIRST_GAP_S, _RATIO, _NUM_BINS = 0.1, 1.25, 54  # up to 4 hours, as there
_HEAD, _TAIL = 0.05, 0.99  # percentiles
_MARGIN = 0.1  # by which the time between them is widened
_MIN_GAPS = 8  # with fewer a histogram says nothing
# Longest over shortest gap that still says something. There it is the variation of the bins, which
# is high for any few gaps in geometric ones.
_MAX_SPREAD = 8.0


@dataclass(slots=True)
class _History:
    """Of one adapter."""

    adapter: AdapterFacts
    last_s: float
    bins: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    num_gaps: int = 0
    expected_s: tuple[float, float] | None = None  # from when until when; None = no saying

    def add(self, gap_s: float) -> None:
        self.bins[_bin_of(gap_s)] += 1
        self.num_gaps += 1

    def window_s(self) -> tuple[float, float] | None:
        """After how long it is expected, and for how long; None if there is no saying."""
        if self.num_gaps < _MIN_GAPS:
            return None
        head, tail = self._percentile(_HEAD), self._percentile(_TAIL)
        begin_s = _FIRST_GAP_S * _RATIO ** (head - 1) * (1.0 - _MARGIN)
        end_s = _FIRST_GAP_S * _RATIO**tail * (1.0 + _MARGIN)
        return (begin_s, end_s) if end_s <= _MAX_SPREAD * begin_s else None

    def _percentile(self, share: float) -> int:
        """The bin that so many of the gaps are in or before."""
        left = share * self.num_gaps
        for index, count in enumerate(self.bins):
            left -= count
            if left <= 0.0 and count:
                return index
        return _NUM_BINS - 1


def _bin_of(gap_s: float) -> int:
    if gap_s <= _FIRST_GAP_S:
        return 0
    return min(_NUM_BINS - 1, math.ceil(math.log(gap_s / _FIRST_GAP_S, _RATIO)))


class ArrivalForecast:
    """Told of requests and of loads that it led to; says who is expected."""

    def __init__(self) -> None:
        self._histories: dict[AdapterId, _History] = {}
        # When each is expected from; of those that have been asked for since, out of date.
        self._begins: list[tuple[float, AdapterId]] = []
        self._expected: dict[AdapterId, _History] = {}
        self._loaded: dict[AdapterId, int] = {}  # ahead, and not asked for yet; bytes
        self.num_hits = 0  # loads ahead whose adapter was asked for, and still there
        self.num_misses = 0  # and the others
        self.missed_bytes = 0

    def arrived(self, request: Request, now_s: float, *, is_on_device: bool) -> None:
        """A request has come; whether its adapter is on the device, or on its way."""
        adapter_id = request.adapter_id
        if request.adapter is None:
            return
        self._end_load(adapter_id, is_hit=is_on_device)
        history = self._histories.get(adapter_id)
        if history is None:
            self._histories[adapter_id] = _History(request.adapter, now_s)
            return
        self._expected.pop(adapter_id, None)
        history.add(now_s - history.last_s)
        history.last_s, history.expected_s = now_s, None
        window_s = history.window_s()
        if window_s is not None:
            history.expected_s = now_s + window_s[0], now_s + window_s[1]
            heapq.heappush(self._begins, (history.expected_s[0], adapter_id))

    def expected(self, now_s: float) -> Iterator[tuple[AdapterId, AdapterFacts]]:
        """Adapters that may be asked for at any moment, the longest expected first."""
        while self._begins and self._begins[0][0] <= now_s:
            begin_s, adapter_id = heapq.heappop(self._begins)
            history = self._histories.get(adapter_id)
            if history is not None and history.expected_s and history.expected_s[0] == begin_s:
                self._expected[adapter_id] = history
        for adapter_id, history in tuple(self._expected.items()):
            assert history.expected_s is not None, history
            if history.expected_s[1] < now_s:
                del self._expected[adapter_id]
            else:
                yield adapter_id, history.adapter

    def wake_at_s(self) -> float | None:
        """When somebody else is expected; None = never."""
        return self._begins[0][0] if self._begins else None

    def loads(self, adapter_id: AdapterId, num_bytes: int) -> None:
        """It is loaded because it is expected, which it is not a second time."""
        del self._expected[adapter_id]
        self._loaded[adapter_id] = num_bytes

    def discard(self, adapter_id: AdapterId) -> None:
        """No request names it any more."""
        self._histories.pop(adapter_id, None)
        self._expected.pop(adapter_id, None)
        self._end_load(adapter_id, is_hit=False)

    def _end_load(self, adapter_id: AdapterId, *, is_hit: bool) -> None:
        num_bytes = self._loaded.pop(adapter_id, None)
        if num_bytes is None:
            return
        self.num_hits += is_hit
        self.num_misses += not is_hit
        self.missed_bytes += 0 if is_hit else num_bytes
