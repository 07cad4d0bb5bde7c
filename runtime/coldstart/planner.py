"""Chooses how a cold request starts, and learns from how it went. Pure: no clock, no I/O.

It compares predictions, corrected by what was measured before. Workers are used only where their
predicted gain passes a margin, and after a streak of bad predictions not at all for a while. The
aim is bounded regret. Where the link is fast and the prompt long, plain pipelining is best; where
other requests would be held up by the load, it is best that the cold request waits outside steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ...profiles.models import MachineModel
from .cold import ColdRequest
from .predict import PlannedStep, predict
from .strategy import AT_ONCE, Decision, LoadStrategy, Prediction

_MAX_EXCESS = 5.0  # times the bearable share, of one step's wait beyond its prediction
_FADING = 0.95  # per decision for another way, or for one that is held back
_MAX_RATIO = 2.5  # that one first token counts as: longer delays have other causes
_COMPARED = (LoadStrategy.PIPELINED, LoadStrategy.ASSISTED, LoadStrategy.ASYNC_LOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """How bold the planner is."""

    forced: LoadStrategy | None = None
    margin: float = 0.05  # gain, as a share of the alternative's time, that pays for workers
    # Of a step's time without waits, by which its cold rows together may hold it up.
    max_stall_share: float = 0.05
    smoothing: float = 0.2  # weight of the newest measurement in the running ratio
    bad_ratio: float = 1.25  # measured over predicted, from which an assisted start was bad
    streak_limit: int = 3  # bad ones in a row until workers are left alone
    penalty_decisions: int = 20  # for so many decisions


@dataclass(slots=True)
class _Record:
    """What was measured of one strategy."""

    ratio: float = 1.0  # measured over predicted time of first tokens
    num_observed: int = 0
    # By how much steps have waited longer than predicted, as a share of them without waits: waits
    # that are predicted are often none, so that a ratio would say nothing.
    excess_share: float = 0.0
    # Since the last decision: a step that is bearable as predicted was not as corrected. So the
    # strategy was not used, although it was chosen.
    is_held_back: bool = False


@dataclass(slots=True)
class Planner:
    """See the module. Not thread-safe."""

    model: MachineModel
    config: PlannerConfig = field(default_factory=PlannerConfig)
    _records: dict[LoadStrategy, _Record] = field(
        default_factory=lambda: {strategy: _Record() for strategy in LoadStrategy}
    )
    _bad_streak: int = 0
    _num_penalty_decisions: int = 0

    def decide(self, request: ColdRequest) -> Decision:
        """Choose a strategy for ``request``."""
        forced = self.config.forced
        if forced is not None:
            self._fade(forced)
            return Decision(forced, "forced by --load-strategy", (self.predict(request, forced),))
        strategies, note = self._candidates(request)
        predictions = [self.predict(request, strategy) for strategy in strategies]
        if request.num_running:
            bearable = [p for p in predictions if self._is_bearable(request, p)]
            predictions = bearable or predictions
        best = min(predictions, key=lambda p: _cost_s(p, request))
        best, why = self._with_margin(best, predictions, request)
        self._fade(best.strategy)
        ordered = (best, *(p for p in predictions if p is not best))
        return Decision(best.strategy, f"{why}{note}", ordered)

    def predict(self, request: ColdRequest, strategy: LoadStrategy) -> Prediction:
        """The model's prediction, corrected by what was measured of this strategy."""
        raw = predict(self.model, request, strategy)
        ratio = self._records[strategy].ratio
        return replace(
            raw,
            first_token_s=raw.first_token_s * ratio,
            second_token_s=raw.second_token_s * ratio,
            stall_s=self._corrected_s(
                raw.stall_s, max(0.0, raw.first_token_s - raw.stall_s), strategy
            ),
        )

    def is_bearable(self, step: PlannedStep, strategy: LoadStrategy) -> bool:
        """Whether all rows of ``step`` are held up by no more than the configured share."""
        limit_s = self.config.max_stall_share * step.warm_s
        if self._corrected_s(step.wait_s, step.warm_s, strategy) <= limit_s:
            return True
        if step.wait_s <= limit_s:
            self._records[strategy].is_held_back = True
        return False

    def observe(self, strategy: LoadStrategy, predicted_s: float, measured_s: float) -> None:
        """Learn how long a first token took; ``predicted_s`` is the corrected prediction."""
        if predicted_s <= 0.0:
            return
        record = self._records[strategy]
        measured_ratio = measured_s / predicted_s
        weight = max(self.config.smoothing, 1.0 / (record.num_observed + 2))
        bounded = min(_MAX_RATIO, max(1.0 / _MAX_RATIO, measured_ratio))
        record.ratio *= (1.0 - weight) + weight * bounded
        record.num_observed += 1
        if strategy is LoadStrategy.ASSISTED:
            self._judge(measured_ratio)

    def observe_stall(
        self, strategy: LoadStrategy, predicted_share: float, measured_share: float
    ) -> None:
        """Learn how long a step with other rows waited; the prediction is not corrected.

        Shares are of the step without waits. An excess counts up to a limit: a longer wait has
        another cause.
        """
        limit = _MAX_EXCESS * self.config.max_stall_share
        excess = min(limit, max(-limit, measured_share - predicted_share))
        record = self._records[strategy]
        record.excess_share += self.config.smoothing * (excess - record.excess_share)
        record.is_held_back = False

    def _corrected_s(self, stall_s: float, warm_s: float, strategy: LoadStrategy) -> float:
        """A stall of steps of ``warm_s`` without it, corrected if the request starts at once."""
        if strategy not in AT_ONCE:
            return stall_s
        return max(0.0, stall_s + self._records[strategy].excess_share * warm_s)

    def _judge(self, measured_ratio: float) -> None:
        if measured_ratio < self.config.bad_ratio:
            self._bad_streak = 0
            return
        self._bad_streak += 1
        if self._bad_streak >= self.config.streak_limit:
            self._bad_streak = 0
            self._num_penalty_decisions = self.config.penalty_decisions

    def _fade(self, chosen: LoadStrategy) -> None:
        """Slowly forget bad results of other strategies: one that is not used teaches nothing new.

        A strategy that is chosen and held back is not used either.
        """
        for strategy, record in self._records.items():
            is_taken = strategy is chosen
            if record.excess_share > 0.0 and not (is_taken and not record.is_held_back):
                record.excess_share *= _FADING
            if record.ratio > 1.0 and not is_taken:
                record.ratio **= _FADING
            record.is_held_back = False

    def _candidates(self, request: ColdRequest) -> tuple[Iterable[LoadStrategy], str]:
        if not request.num_workers:
            return (LoadStrategy.PIPELINED, LoadStrategy.ASYNC_LOAD), "; no worker is free"
        if self._num_penalty_decisions:
            self._num_penalty_decisions -= 1
            note = "; workers are left alone after a streak of late first tokens"
            return (LoadStrategy.PIPELINED, LoadStrategy.ASYNC_LOAD), note
        return _COMPARED, ""

    def _is_bearable(self, request: ColdRequest, prediction: Prediction) -> bool:
        """Whether running requests are held up by no more than the configured share."""
        own_s = max(prediction.first_token_s - prediction.stall_s, 1e-9)
        return prediction.stall_s <= self.config.max_stall_share * own_s

    def _with_margin(
        self, best: Prediction, predictions: Iterable[Prediction], request: ColdRequest
    ) -> tuple[Prediction, str]:
        """Take workers only for a gain; say in words what decided."""
        others = [p for p in predictions if p.strategy is not LoadStrategy.ASSISTED]
        if best.strategy is not LoadStrategy.ASSISTED or not others:
            return best, _describe(best)
        second = min(others, key=lambda p: _cost_s(p, request))
        gain_s = _cost_s(second, request) - _cost_s(best, request)
        if gain_s >= self.config.margin * _cost_s(second, request):
            return best, f"{_describe(best)}, {second.strategy} {_ms(second.first_token_s)}"
        return second, f"{_describe(second)}; workers would gain only {_ms(gain_s)}"


def _cost_s(prediction: Prediction, request: ColdRequest) -> float:
    """Seconds that people wait: this request's first token, and the running requests' stall."""
    return prediction.first_token_s + prediction.stall_s * request.num_running


def _describe(prediction: Prediction) -> str:
    return f"{prediction.strategy}: first token in {_ms(prediction.first_token_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
