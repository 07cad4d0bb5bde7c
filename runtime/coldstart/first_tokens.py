"""Compares when first tokens came with when they were expected, and keeps that fair. Pure.

A prediction knows the rows that share the step when it is made. What joins later makes the step
longer by no fault of the strategy, so the prediction gets that time added. A request that cannot
run for want of room or memory teaches nothing.
"""

from collections.abc import Container
from dataclasses import dataclass

from ..plan import RequestId, TransferId
from .strategy import LoadStrategy, Prediction


@dataclass(frozen=True, slots=True)
class FirstTokenObservation:
    """A first token has come."""

    strategy: LoadStrategy
    predicted_s: float
    measured_s: float


@dataclass(slots=True)
class _Expected:
    prediction: Prediction
    load_id: TransferId
    decided_at_s: float
    has_chunks_to_come: bool  # that are computed while its adapter is loading
    joined_s: float = 0.0  # by which rows that joined later have made its steps longer
    foreseen_s: float | None = None  # of the step that is put together; None = has no row in it
    has_skipped: bool = False  # it has none because it would only have waited
    has_begun: bool = False
    is_last_planned: bool = False  # the chunk that brings the first token has been planned
    is_comparable: bool = True


class FirstTokens:
    """First tokens of cold requests that have not come yet."""

    def __init__(self, open_transfers: Container[TransferId]) -> None:
        """When its load has ended, a request is like any other."""
        self._open_transfers = open_transfers
        self._expected: dict[RequestId, _Expected] = {}

    def expect(
        self, request_id: RequestId, load_id: TransferId, prediction: Prediction, now_s: float,
        *, is_at_once: bool,
    ) -> None:  # fmt: skip
        """A request has a strategy; ``is_at_once``: it need not wait for its load."""
        self._expected[request_id] = _Expected(prediction, load_id, now_s, is_at_once)

    def has_begun(self, request_id: RequestId) -> bool:
        """Whether a chunk of it has been planned."""
        expected = self._expected.get(request_id)
        return expected is not None and expected.has_begun

    def planned(self, request_id: RequestId, foreseen_s: float, *, is_last: bool) -> None:
        """A chunk is in the step, which was foreseen to take so long with a cached adapter."""
        expected = self._expected.get(request_id)
        if expected is not None and self._is_followed(expected):
            expected.foreseen_s = foreseen_s
            expected.has_begun = True
            expected.is_last_planned = is_last

    def skipped(self, request_id: RequestId) -> None:
        """Its strategy lets the request skip the step."""
        expected = self._expected.get(request_id)
        if expected is not None:
            expected.has_skipped = True

    def step_closed(self, step_s: float) -> None:
        """No other row joins the step, which would take ``step_s`` with all adapters cached."""
        for expected in self._expected.values():
            if expected.foreseen_s is not None:
                expected.joined_s += step_s - expected.foreseen_s
                expected.has_chunks_to_come = not expected.is_last_planned
            elif self._is_followed(expected) and not expected.has_skipped:
                expected.is_comparable = False
            expected.foreseen_s = None
            expected.has_skipped = False

    def on_first_token(self, request_id: RequestId, now_s: float) -> FirstTokenObservation | None:
        """The first token is there; None where nothing is to be learned of it."""
        expected = self._expected.pop(request_id, None)
        if expected is None or not expected.is_comparable:
            return None
        prediction = expected.prediction
        return FirstTokenObservation(
            prediction.strategy,
            prediction.first_token_s + expected.joined_s,
            now_s - expected.decided_at_s,
        )

    def discard(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._expected.pop(request_id, None)

    def _is_followed(self, expected: _Expected) -> bool:
        """Whether it runs while its adapter is loading, and has chunks to come."""
        return expected.has_chunks_to_come and expected.load_id in self._open_transfers
