"""Chooses how a cold request starts, and learns from the results. Pure: no clock, no I/O.

The planner compares predictions, corrected by earlier measurements. Workers are used only if their
predicted gain exceeds a margin. After a streak of bad predictions they are not used for a while.
The aim is bounded regret: with a fast link and a long prompt, plain pipelining is best. If a step
waits for a load, all of its rows wait. So a price decides: seconds of the cold request are weighed
against seconds of all other running requests.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

from ...profiles.models import MachineModel
from .cold import ColdRequest, CoScheduledRows
from .predict import PlannedStep, Start, choose_start, predict
from .strategy import AT_ONCE, Decision, LoadStrategy, Prediction

_MAX_EXCESS_SHARE = 0.25  # limit of one step's excess wait, as a share of the step
_FADING = 0.95  # of bad results, per decision that does not use the strategy
_MAX_RATIO = 2.5  # cap of the ratio of one first token: longer delays have other causes
_COMPARED = (LoadStrategy.PIPELINED, LoadStrategy.ASSISTED, LoadStrategy.ASYNC_LOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Configuration of the planner."""

    forced: LoadStrategy | None = None  # None = the planner chooses
    margin: float = 0.05  # smallest gain of workers, as a share of the alternative's time
    # Weight of a cold request's seconds, if seconds of the requests beside it weigh 1.
    priority: float = 1.0
    # Limit of the delay of a step by its cold rows, as a share of its time without waits.
    max_stall_share: float | None = None
    smoothing: float = 0.2  # weight of the newest measurement in the running ratio
    bad_ratio: float = 1.25  # measured over predicted time of a bad assisted start
    streak_limit: int = 3  # bad starts in a row, after which workers are not used
    penalty_decisions: int = 20  # decisions without workers

    @classmethod
    def of_options(cls, load_strategy: str, priority: float, max_stall_share: float | None) -> Self:
        """Return the configuration with the values of its options. ``load_strategy``: or "auto"."""
        forced = None if load_strategy == "auto" else LoadStrategy(load_strategy)
        return cls(forced=forced, priority=priority, max_stall_share=max_stall_share)


BY_PRICE = PlannerConfig()  # the planner's choice, with default values


@dataclass(slots=True)
class _Record:
    """Measurements of one strategy."""

    ratio: float = 1.0  # measured over predicted time of first tokens
    num_observed: int = 0
    # Wait beyond the prediction, as a share of the step without waits. Predicted waits are often 0,
    # so a ratio of waits would be useless.
    excess_share: float = 0.0
    # Whether, since the last decision, a step was bearable as predicted but not as corrected. Then
    # the strategy was chosen, but not used.
    is_held_back: bool = False


@dataclass(slots=True)
class Planner:
    """Chooses strategies; see the module. Not thread-safe."""

    model: MachineModel
    config: PlannerConfig = field(default_factory=PlannerConfig)
    _records: dict[LoadStrategy, _Record] = field(
        default_factory=lambda: {strategy: _Record() for strategy in LoadStrategy}
    )
    # Of the last calls of ``choose_start``: arguments and result. The first step of a request asks
    # again what its decision has asked.
    _starts: deque[tuple[tuple[object, ...], Start]] = field(default_factory=lambda: deque(maxlen=6))
    _bad_streak: int = 0
    _num_penalty_decisions: int = 0

    def decide(self, request: ColdRequest) -> Decision:
        """Choose a strategy for ``request``."""
        forced = self.config.forced
        if forced is not None:
            why = "forced by --load-strategy"
            if forced is LoadStrategy.ASSISTED and request.not_by_workers:
                forced, why = (LoadStrategy.PIPELINED, f"assisted is {why}{_without_workers(request)}")
            self._fade(forced)
            return Decision(forced, why, (self.predict(request, forced),))
        strategies, note = self._candidates(request)
        predictions = [self.predict(request, strategy) for strategy in strategies]
        if request.num_running:
            bearable = [p for p in predictions if self._is_bearable(p)]
            predictions = bearable or predictions
        best = min(predictions, key=lambda p: request.cost_s(p.first_token_s, p.stall_s))
        best, why = self._with_margin(best, predictions, request)
        self._fade(best.strategy)
        ordered = (best, *(p for p in predictions if p is not best))
        return Decision(best.strategy, f"{why}{note}", ordered)

    def predict(self, request: ColdRequest, strategy: LoadStrategy) -> Prediction:
        """Return the model's prediction, corrected by measurements of this strategy."""
        raw = predict(self.model, request, strategy, self._start)
        ratio = self._records[strategy].ratio
        return replace(
            raw,
            first_token_s=raw.first_token_s * ratio,
            stall_s=self._corrected_s(raw.stall_s, max(0.0, raw.first_token_s - raw.stall_s), strategy),
        )

    def loss_per_s(self, request: ColdRequest, delay_s: float) -> float:
        """Return the predicted seconds that its first token loses per second, if its load is late.

        ``delay_s``: by how much each layer group would arrive later. Workers that can serve the
        request meanwhile reduce the loss.
        """
        late = replace(request, ready_s=tuple(time_s and time_s + delay_s for time_s in request.ready_s))
        compared: tuple[LoadStrategy, ...] = (
            _COMPARED if self.config.forced is None else (self.config.forced,)
        )
        if request.not_by_workers or not request.num_workers:
            compared = tuple(one for one in compared if one is not LoadStrategy.ASSISTED)
        strategies = compared or (LoadStrategy.PIPELINED,)
        in_time_s, late_s = (
            min(self.predict(one, strategy).first_token_s for strategy in strategies)
            for one in (request, late)
        )
        return max(0.0, late_s - in_time_s) / delay_s

    def step_now(self, request: ColdRequest, num_tokens: int, strategy: LoadStrategy) -> PlannedStep | None:
        """Return the step with a chunk if it should begin now, else None.

        None if a later start costs less, or if the step would delay its rows by more than the
        configured share.
        """
        rows, excess_share = request.co_scheduled, self._records[strategy].excess_share
        start = self._start(request, num_tokens, rows, strategy, excess_share)
        if not start.begin_s and self._bears(request, start.step, excess_share):
            return start.step
        if excess_share > 0.0:
            start = self._start(request, num_tokens, rows, strategy)
            if not start.begin_s and self._bears(request, start.step, 0.0):
                self._records[strategy].is_held_back = True
        return None

    def observe(self, strategy: LoadStrategy, predicted_s: float, measured_s: float) -> None:
        """Learn from a first token. ``predicted_s``: the corrected prediction."""
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

    def observe_stall(self, strategy: LoadStrategy, predicted_share: float, measured_share: float) -> None:
        """Learn from the wait of a step with other rows. ``predicted_share``: not corrected.

        Shares are of the step without waits. An excess counts up to a limit, because longer waits
        have other causes.
        """
        excess = min(_MAX_EXCESS_SHARE, max(-_MAX_EXCESS_SHARE, measured_share - predicted_share))
        record = self._records[strategy]
        record.excess_share += self.config.smoothing * (excess - record.excess_share)
        record.is_held_back = False

    def _start(
        self,
        request: ColdRequest,
        num_tokens: int,
        co_scheduled: CoScheduledRows,
        strategy: LoadStrategy,
        excess_share: float = 0.0,
    ) -> Start:
        """Return ``choose_start``, computed once for the same arguments."""
        asked = num_tokens, strategy, excess_share, request, co_scheduled
        for known, start in self._starts:
            if known == asked:
                return start
        start = choose_start(
            self.model, request, num_tokens, co_scheduled, strategy, excess_share=excess_share
        )
        self._starts.append((asked, start))
        return start

    def _corrected_s(self, stall_s: float, warm_s: float, strategy: LoadStrategy) -> float:
        """Return a corrected stall, if the strategy starts at once. ``warm_s``: without stalls."""
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
        """Reduce bad results of unused strategies, which would otherwise never be tried again.

        A strategy that is chosen and held back counts as unused.
        """
        for strategy, record in self._records.items():
            is_taken = strategy is chosen
            if record.excess_share > 0.0 and (not is_taken or record.is_held_back):
                record.excess_share *= _FADING
            if record.ratio > 1.0 and not is_taken:
                record.ratio **= _FADING
            record.is_held_back = False

    def _candidates(self, request: ColdRequest) -> tuple[Iterable[LoadStrategy], str]:
        """Return the strategies to compare, and a note. Counts a decision without workers."""
        if request.not_by_workers:
            return (LoadStrategy.PIPELINED, LoadStrategy.ASYNC_LOAD), _without_workers(request)
        if not request.num_workers:
            return (LoadStrategy.PIPELINED, LoadStrategy.ASYNC_LOAD), "; no worker is free"
        if self._num_penalty_decisions:
            self._num_penalty_decisions -= 1
            note = "; workers are not used after a streak of late first tokens"
            return (LoadStrategy.PIPELINED, LoadStrategy.ASYNC_LOAD), note
        return _COMPARED, ""

    def _bears(self, request: ColdRequest, step: PlannedStep, excess_share: float) -> bool:
        """Whether the rows of ``step`` are delayed by at most the configured share."""
        limit = self.config.max_stall_share
        if limit is None or not request.num_running:
            return True
        return step.wait_s + excess_share * step.warm_s <= limit * step.warm_s

    def _is_bearable(self, prediction: Prediction) -> bool:
        """Whether running requests are delayed by at most the configured share."""
        limit = self.config.max_stall_share
        own_s = max(prediction.first_token_s - prediction.stall_s, 1e-9)
        return limit is None or prediction.stall_s <= limit * own_s

    def _with_margin(
        self, best: Prediction, predictions: Iterable[Prediction], request: ColdRequest
    ) -> tuple[Prediction, str]:
        """Return the best prediction, with workers only for a sufficient gain, and the reason."""
        others = [p for p in predictions if p.strategy is not LoadStrategy.ASSISTED]
        if best.strategy is not LoadStrategy.ASSISTED or not others:
            return best, _describe(best)
        second = min(others, key=lambda p: request.cost_s(p.first_token_s, p.stall_s))
        second_s = request.cost_s(second.first_token_s, second.stall_s)
        gain_s = second_s - request.cost_s(best.first_token_s, best.stall_s)
        if gain_s >= self.config.margin * second_s:
            return best, f"{_describe(best)}, {second.strategy} {_ms(second.first_token_s)}"
        return second, f"{_describe(second)}; workers would gain only {_ms(gain_s)}"


def _without_workers(request: ColdRequest) -> str:
    return f"; workers do not compute {request.not_by_workers}"


def _describe(prediction: Prediction) -> str:
    return f"{prediction.strategy}: first token in {_ms(prediction.first_token_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
