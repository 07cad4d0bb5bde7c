"""Forecasts which adapters will be requested soon, by the gaps between earlier requests. Pure.

Source: Chameleon section 4.1, after Shahrad et al., Serverless in the Wild (2020), section 4.2: the
next request for an adapter is expected between two percentiles of a histogram of gaps. Bins are
geometric here, because gaps may be as short as seconds.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..adapter import AdapterFacts
from ..plan import AdapterId
from ..request import Request

_FIRST_GAP_S, _RATIO, _NUM_BINS = 0.1, 1.25, 54  # up to 4 hours, as in the source
_HEAD, _TAIL = 0.05, 0.99  # percentiles
_MARGIN = 0.1  # by which the window between them is widened
_MIN_GAPS = 8  # for a forecast
# Largest ratio of the window's end to its start for a forecast. The source limits the variation of
# the bins instead, but in geometric bins that is high whenever there are few gaps.
_MAX_SPREAD = 8.0


@dataclass(slots=True)
class _History:
    """Gaps between the requests of one adapter."""

    adapter: AdapterFacts
    last_s: float
    bins: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    num_gaps: int = 0
    expected_s: tuple[float, float] | None = None  # from, until; None = no forecast

    def add(self, gap_s: float) -> None:
        self.bins[_bin_of(gap_s)] += 1
        self.num_gaps += 1

    def window_s(self) -> tuple[float, float] | None:
        """Return begin and end of the window, in seconds after the last request, or None."""
        if self.num_gaps < _MIN_GAPS:
            return None
        head, tail = self._percentile(_HEAD), self._percentile(_TAIL)
        begin_s = _FIRST_GAP_S * _RATIO ** (head - 1) * (1.0 - _MARGIN)
        end_s = _FIRST_GAP_S * _RATIO**tail * (1.0 + _MARGIN)
        return (begin_s, end_s) if end_s <= _MAX_SPREAD * begin_s else None

    def _percentile(self, share: float) -> int:
        """Return the bin that this share of the gaps lies in or before."""
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
    """Forecasts adapters from the arrivals of requests, and counts hits of prefetches."""

    def __init__(self) -> None:
        self._histories: dict[AdapterId, _History] = {}
        # Heap of begins of windows; outdated for adapters that were requested since.
        self._begins: list[tuple[float, AdapterId]] = []
        self._expected: dict[AdapterId, _History] = {}
        self._loaded: dict[AdapterId, int] = {}  # bytes of prefetched adapters not used yet
        self.num_hits = 0  # prefetched adapters that were still on the device when requested
        self.num_misses = 0  # other prefetched adapters
        self.missed_bytes = 0

    def arrived(self, request: Request, now_s: float, *, is_on_device: bool) -> None:
        """Record a request. ``is_on_device``: its adapter is on the device, or loading."""
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
        """Yield adapters with an open window, the earliest begin first."""
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
        """Return when the next window opens; None = never."""
        return self._begins[0][0] if self._begins else None

    def loads(self, adapter_id: AdapterId, num_bytes: int) -> None:
        """Record that an expected adapter is being loaded. It is not expected a second time."""
        del self._expected[adapter_id]
        self._loaded[adapter_id] = num_bytes

    def discard(self, adapter_id: AdapterId) -> None:
        """Drop the record of an adapter that no later request can name."""
        self._histories.pop(adapter_id, None)
        self._expected.pop(adapter_id, None)
        self._end_load(adapter_id, is_hit=False)

    def _end_load(self, adapter_id: AdapterId, *, is_hit: bool) -> None:
        """Count a prefetched adapter as a hit or a miss. No error if it was not prefetched."""
        num_bytes = self._loaded.pop(adapter_id, None)
        if num_bytes is None:
            return
        self.num_hits += is_hit
        self.num_misses += not is_hit
        self.missed_bytes += 0 if is_hit else num_bytes
