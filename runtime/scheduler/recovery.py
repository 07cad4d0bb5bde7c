"""Decides how rows without a result are planned again. No other part decides this.

The executor reports the cause (``RetryCause``) and does not retry. Failures that the row may have
caused itself are counted. After the first one a cold row runs without workers, after the second it
waits for its whole adapter. A request fails only after failures of its own deltas, or in
sub-batches without other rows. Failures caused by other rows are not counted, and cost a step each.
After a failure the next steps are limited:

- After a failure caused by another row, the row's next sub-batch has no cold rows; after a second
  one it has no other rows.
- After a failed forward pass that the row may have caused, its next sub-batch has no other rows.
- After too little memory for a sub-batch, all later steps have at most half as many tokens.

So a position is computed at most ``MAX_RETRIES`` + 1 times because of its own row, and twice more
because of other rows.
"""

import enum
import logging

from ..plan import RequestId, RetryCause
from ..request import Request

_LOG = logging.getLogger(__name__)

# Of one position. A cold row runs with workers, then without, then with its whole adapter on the
# device. If that fails too, the request ends.
MAX_RETRIES = 2


class _Separation(enum.Enum):
    """Which rows the next sub-batch of a row without a result excludes."""

    FROM_COLD = enum.auto()  # only rows with adapters on the device may share it
    FROM_ALL = enum.auto()  # it has no other rows


class Recovery:
    """Records which rows must be separated from others, until they have been computed."""

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens``: of a step, while the device's memory suffices for them."""
        self.max_tokens = max_tokens
        self._separated: dict[RequestId, _Separation] = {}

    def __bool__(self) -> bool:
        return bool(self._separated)

    def may_retry(self, request: Request, start: int, cause: RetryCause | None, *, was_alone: bool) -> bool:
        """Record that a row starting at ``start`` has no result. False = its request fails.

        ``was_alone``: its sub-batch had no other rows.
        """
        if cause is RetryCause.MEMORY:
            return True  # with fewer tokens: see ``lower_limit``
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

    def lower_limit(self, num_tokens: int) -> None:
        """Limit steps: the device has too little memory for a sub-batch of ``num_tokens`` >= 2."""
        if num_tokens // 2 < self.max_tokens:
            self.max_tokens = num_tokens // 2
            _LOG.warning(
                "the device has too little memory for %d tokens in one step; from now on a step "
                "has at most %d. A lower --max-num-seqs or --max-num-batched-tokens avoids this",
                num_tokens,
                self.max_tokens,
            )

    def discard(self, request_id: RequestId) -> None:
        """Drop the record of a request: a row was computed, or the request has ended."""
        self._separated.pop(request_id, None)

    def goes_alone(self, request: Request, *, is_cold: bool) -> bool:
        """Whether the request's next row must have a sub-batch of its own."""
        separation = self._separated.get(request.request_id)
        return separation is _Separation.FROM_ALL or (is_cold and separation is _Separation.FROM_COLD)

    def avoids_cold_rows(self, request: Request) -> bool:
        """Whether the sub-batch of the request's next row must not have cold rows."""
        return request.request_id in self._separated


def may_use_workers(request: Request) -> bool:
    """Whether CPU workers may compute deltas of a cold row: not after a failure."""
    return not request.retried_positions


def needs_whole_adapter(request: Request) -> bool:
    """Whether the next row must wait for its whole adapter, after ``MAX_RETRIES`` failures."""
    return request.retried_positions[request.num_computed_tokens] >= MAX_RETRIES
