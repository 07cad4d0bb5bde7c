"""Compares measured with predicted times of first tokens of cold requests. Pure.

A prediction includes the rows that are in the step when it is made. The time of rows that join
later is added to the prediction, because it says nothing about the strategy. Requests that cannot
run for lack of room in steps or memory are ignored.
"""

from collections.abc import Container
from dataclasses import dataclass

from ..plan import RequestId, TransferId
from .strategy import LoadStrategy, Prediction


@dataclass(frozen=True, slots=True)
class FirstTokenObservation:
    """Predicted and measured time of a first token."""

    strategy: LoadStrategy
    predicted_s: float
    measured_s: float


@dataclass(slots=True)
class _Expected:
    prediction: Prediction
    load_id: TransferId
    decided_at_s: float
    has_chunks_to_come: bool  # before its load ends
    joined_s: float = 0.0  # time that rows that joined later have added to its steps
    foreseen_s: float | None = None  # predicted time of the current step; None = no row in it
    has_skipped: bool = False  # it skips the current step because it would only wait
    has_begun: bool = False
    is_last_planned: bool = False  # its last prefill chunk has been planned
    is_comparable: bool = True


class FirstTokens:
    """Cold requests without a first token."""

    def __init__(self, open_transfers: Container[TransferId]) -> None:
        """``open_transfers``: loads under way. Requests are cold only while their load is open."""
        self._open_transfers = open_transfers
        self._expected: dict[RequestId, _Expected] = {}

    def expect(
        self, request_id: RequestId, load_id: TransferId, prediction: Prediction, now_s: float,
        *, is_at_once: bool,
    ) -> None:  # fmt: skip
        """Record the prediction for a request. ``is_at_once``: it does not wait for its load."""
        self._expected[request_id] = _Expected(prediction, load_id, now_s, is_at_once)

    def has_begun(self, request_id: RequestId) -> bool:
        """Whether a chunk of the request has been planned."""
        expected = self._expected.get(request_id)
        return expected is not None and expected.has_begun

    def planned(self, request_id: RequestId, foreseen_s: float, *, is_last: bool) -> None:
        """Record a chunk in the step, predicted to take ``foreseen_s`` with a loaded adapter."""
        expected = self._expected.get(request_id)
        if expected is not None and self._is_followed(expected):
            expected.foreseen_s = foreseen_s
            expected.has_begun = True
            expected.is_last_planned = is_last

    def skipped(self, request_id: RequestId) -> None:
        """Record that the request skips the step because of its strategy."""
        expected = self._expected.get(request_id)
        if expected is not None:
            expected.has_skipped = True

    def step_closed(self, step_s: float) -> None:
        """Record a complete step, predicted to take ``step_s`` with all adapters on the device."""
        for expected in self._expected.values():
            if expected.foreseen_s is not None:
                expected.joined_s += step_s - expected.foreseen_s
                expected.has_chunks_to_come = not expected.is_last_planned
            elif self._is_followed(expected) and not expected.has_skipped:
                expected.is_comparable = False
            expected.foreseen_s = None
            expected.has_skipped = False

    def on_first_token(self, request_id: RequestId, now_s: float) -> FirstTokenObservation | None:
        """Compare the time of a first token. None if it cannot be compared."""
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
        """Drop the record of a request that has ended."""
        self._expected.pop(request_id, None)

    def _is_followed(self, expected: _Expected) -> bool:
        """Whether the request has more chunks to compute while its adapter is loading."""
        return expected.has_chunks_to_come and expected.load_id in self._open_transfers
