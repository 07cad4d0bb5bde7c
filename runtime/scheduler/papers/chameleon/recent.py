"""Sizes and durations of the newest requests, by which queues are divided. Pure."""

import enum
import math

import numpy as np
from numpy.typing import NDArray

from ....plan import RequestId
from ....request import Request

MIN_REQUESTS = 256  # of a window, if so many have arrived
_MAX_REQUESTS = 4096  # bounds the time of a refresh


class Column(enum.IntEnum):
    """Columns of a request's row."""

    PROMPT_TOKENS = 0
    OUTPUT_TOKENS = 1  # predicted
    ADAPTER_BYTES = 2
    SIZE_TOKENS = 3  # prompt, predicted output and adapter together
    ARRIVAL_S = 4
    UNLOADED_S = 5  # from arrival to the end on an idle engine, predicted; 0 = unknown
    DURATION_S = 6  # from admission to the end; NaN = it has not ended


class RecentRequests:
    """A ring of rows, one for each of the newest requests."""

    def __init__(self) -> None:
        self.num_arrived = 0
        self._rows = np.zeros((_MAX_REQUESTS, len(Column)))
        self._numbers: dict[RequestId, int] = {}  # of requests that have not ended

    def arrived(self, request: Request, *, size_tokens: int, unloaded_s: float, now_s: float) -> None:
        """Add the row of a new request."""
        self._numbers[request.request_id] = self.num_arrived
        self._rows[self.num_arrived % _MAX_REQUESTS] = (
            request.num_uncached_prompt_tokens,
            request.num_predicted_output_tokens,
            request.adapter_bytes,
            size_tokens,
            now_s,
            unloaded_s,
            math.nan,
        )
        self.num_arrived += 1

    def ended(self, request_id: RequestId, duration_s: float | None) -> None:
        """Set the duration of a request that has ended; None if it was not running."""
        number = self._numbers.pop(request_id)
        if duration_s is not None and number >= self.num_arrived - _MAX_REQUESTS:
            self._rows[number % _MAX_REQUESTS, Column.DURATION_S] = duration_s

    def window(self, since_s: float) -> NDArray[np.float64]:
        """Return the rows of requests that arrived since ``since_s``, oldest first.

        At least the newest 256 rows, at most 4,096.
        """
        num_kept = min(self.num_arrived, _MAX_REQUESTS)
        last = np.arange(self.num_arrived - num_kept, self.num_arrived) % _MAX_REQUESTS
        rows: NDArray[np.float64] = self._rows[last]
        num_old = int(np.searchsorted(rows[:, Column.ARRIVAL_S], since_s))
        return rows[min(num_old, max(0, num_kept - MIN_REQUESTS)) :]
