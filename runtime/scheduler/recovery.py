"""Decides how rows are planned again whose results do not count: the only place that does.

An executor says why a row came to nothing (``RetryCause``) and does nothing about it. What was, or
may have been, the row's own fault counts: from the first time on a cold row goes without workers,
from the second on it waits for its whole adapter. A request ends only by what it did alone, or by
its own deltas; a fault of its company costs it a step and nothing else:

- A row of a sub-batch that other rows have spoiled goes without cold rows next, then alone.
- A row that may have made its forward pass fail goes alone next.

So a position is computed at most ``MAX_RETRIES`` + 1 times by the fault of its row, and twice more
by that of others.
"""

import enum

from ..plan import RequestId, RetryCause
from ..request import Request

# Of one position. A cold row goes with workers, then without them, then with its whole adapter on
# the device; what still comes to nothing fails.
MAX_RETRIES = 2


class _Separation(enum.Enum):
    """Which rows the next sub-batch of a row without a result excludes."""

    FROM_COLD = enum.auto()  # only rows whose adapters are on the device may share it
    FROM_ALL = enum.auto()  # it has no other rows


class Recovery:
    """Remembers which rows go apart from others, until they have been computed."""

    def __init__(self) -> None:
        self._separated: dict[RequestId, _Separation] = {}

    def __bool__(self) -> bool:
        return bool(self._separated)

    def may_retry(
        self, request: Request, start: int, cause: RetryCause | None, *, was_alone: bool
    ) -> bool:
        """Note that a row that starts at ``start`` came to nothing; False = its request ends.

        ``was_alone``: its sub-batch had no other row.
        """
        is_own = was_alone or cause is RetryCause.DELTAS
        num_retries = request.retried_positions[start]
        if is_own and num_retries >= MAX_RETRIES:
            return False
        if is_own or cause is RetryCause.FORWARD:
            request.retried_positions[start] = num_retries + 1
        if cause is RetryCause.OTHER_ROW and request.request_id not in self._separated:
            self._separated[request.request_id] = _Separation.FROM_COLD
        elif cause is not RetryCause.DELTAS:
            self._separated[request.request_id] = _Separation.FROM_ALL
        return True

    def discard(self, request_id: RequestId) -> None:
        """A row of the request has been computed, or the request has ended."""
        self._separated.pop(request_id, None)

    def goes_alone(self, request: Request, *, is_cold: bool) -> bool:
        """Whether the request's next row has a sub-batch of its own."""
        separation = self._separated.get(request.request_id)
        return separation is _Separation.FROM_ALL or (
            is_cold and separation is _Separation.FROM_COLD
        )

    def avoids_cold_rows(self, request: Request) -> bool:
        """Whether no cold row may be in the sub-batch of the request's next row."""
        return request.request_id in self._separated


def may_use_workers(request: Request) -> bool:
    """Whether CPU workers may compute deltas of a cold row: not once something has gone wrong."""
    return not request.retried_positions


def needs_whole_adapter(request: Request) -> bool:
    """Whether the next row waits until its adapter is on the device: nothing else has helped."""
    return request.retried_positions[request.num_computed_tokens] >= MAX_RETRIES
