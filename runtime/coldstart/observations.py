"""Compares measured with predicted times: delays of steps, and first tokens of requests. Pure.

The profile predicts the time of a step without waits. Steps with prompts and without cold rows show
the present error of the profile. Steps during a load are preferred for this, because a load
prolongs steps even if no row waits for it, most of all the step that begins it. The remaining time
of a step with cold rows is the delay of running requests. Steps without other rows are ignored.

A prediction of a first token includes the rows that are in the step when it is made. The time of
rows that join later is added to the prediction, because it says nothing about the strategy.
Requests that cannot run for lack of room in steps or memory are ignored.
"""

from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import NamedTuple

from ..plan import RequestId, StepId, TransferId
from .strategy import LoadStrategy, Prediction

_SMOOTHING = 0.2  # weight of the newest step in the running ratio


class StallObservation(NamedTuple):
    """The delay of a step with cold and other rows, as shares of its time without waits."""

    strategy: LoadStrategy
    predicted_share: float
    measured_share: float


class FirstTokenObservation(NamedTuple):
    """Predicted and measured time of a first token."""

    strategy: LoadStrategy
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class _Step:
    closed_at_s: float
    warm_s: float  # predicted for all its rows, with all adapters on the device
    # Of its cold rows; None = no cold rows, or different strategies.
    strategy: LoadStrategy | None
    wait_s: float  # predicted
    is_cold: bool
    has_others: bool
    begins_s: float  # time to begin loads
    is_loading: bool


class DelayTracker:
    """Open steps, and the measured over predicted time of steps without cold rows."""

    def __init__(self) -> None:
        self._steps: dict[StepId, _Step] = {}
        # Of the step that is being assembled.
        self._chunks: dict[RequestId, tuple[LoadStrategy, float]] = {}
        self._last_end_s = 0.0
        # Measured over predicted time of steps without cold rows, by whether a load was open.
        self._warm_ratios: dict[bool, float] = {}

    def planned(self, request_id: RequestId, strategy: LoadStrategy, wait_s: float) -> None:
        """Record the predicted wait of a cold chunk for the next step."""
        self._chunks[request_id] = strategy, wait_s

    def closed(
        self,
        step_id: StepId,
        cold: Collection[RequestId],
        warm_s: float,
        now_s: float,
        *,
        has_others: bool,
        begins_s: float = 0.0,
        is_loading: bool = False,
    ) -> None:
        """Record a complete step, predicted to take ``warm_s`` with all adapters on the device.

        ``begins_s``: additional time to begin loads. ``is_loading``: whether a load is open.
        """
        chunks = [self._chunks[request_id] for request_id in cold if request_id in self._chunks]
        self._chunks.clear()
        if warm_s <= 0.0:  # steps with only decode rows are not predicted
            return
        strategies = {strategy for strategy, _ in chunks}
        self._steps[step_id] = _Step(
            closed_at_s=now_s,
            warm_s=warm_s,
            strategy=strategies.pop() if len(strategies) == 1 else None,
            wait_s=max((wait_s for _, wait_s in chunks), default=0.0),
            is_cold=bool(cold),
            has_others=has_others,
            begins_s=begins_s,
            is_loading=is_loading,
        )

    def ended(self, step_id: StepId, now_s: float) -> StallObservation | None:
        """Record the end of a step. Return its delay; None if it shows none."""
        began_s, self._last_end_s = self._last_end_s, now_s  # of two in flight, the second waits
        step = self._steps.pop(step_id, None)
        for given_up in [known for known in self._steps if known < step_id]:
            del self._steps[given_up]
        if step is None:
            return None
        took_s = now_s - max(began_s, step.closed_at_s) - step.begins_s
        ratio, ratios = max(0.0, took_s / step.warm_s), self._warm_ratios
        if not step.is_cold:
            before = ratios.get(step.is_loading, ratio)
            ratios[step.is_loading] = (1.0 - _SMOOTHING) * before + _SMOOTHING * ratio
            return None
        warm_ratio = ratios.get(True, ratios.get(False, 0.0))
        if not warm_ratio or step.strategy is None or not step.has_others:
            return None
        return StallObservation(step.strategy, step.wait_s / step.warm_s, ratio / warm_ratio - 1.0)


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
        self,
        request_id: RequestId,
        load_id: TransferId,
        prediction: Prediction,
        now_s: float,
        *,
        is_at_once: bool,
    ) -> None:
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
        predicted_s = prediction.first_token_s + expected.joined_s
        return FirstTokenObservation(prediction.strategy, predicted_s, now_s - expected.decided_at_s)

    def discard(self, request_id: RequestId) -> None:
        """Drop the record of a request that has ended."""
        self._expected.pop(request_id, None)

    def _is_followed(self, expected: _Expected) -> bool:
        """Whether the request has more chunks to compute while its adapter is loading."""
        return expected.has_chunks_to_come and expected.load_id in self._open_transfers
