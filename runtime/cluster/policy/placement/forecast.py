"""What is expected of adapters in the next time step, from what came in those before. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

_LEVEL_SHARE, _TREND_SHARE = 0.5, 0.3  # of the newest step
_DAMPING = 0.8  # of a trend, from step to step
_ERROR_SHARE = 0.2  # of the newest step in the mean errors


@dataclass(slots=True)
class _Series:
    """Damped Holt's level and trend of one number, beside its last value.

    Source: Gardner and McKenzie, 1985, "Forecasting trends in time series".
    """

    level: float
    trend: float = 0.0
    last: float = 0.0
    error: float = 0.0  # mean, of this
    last_error: float = 0.0  # mean, of forecasting the last value again

    def add(self, value: float) -> None:
        expected = self._trended()
        self.error += _ERROR_SHARE * (abs(value - expected) - self.error)
        self.last_error += _ERROR_SHARE * (abs(value - self.last) - self.last_error)
        before = self.level
        self.level = _LEVEL_SHARE * value + (1.0 - _LEVEL_SHARE) * expected
        self.trend *= (1.0 - _TREND_SHARE) * _DAMPING
        self.trend += _TREND_SHARE * (self.level - before)
        self.last = value

    @property
    def next(self) -> float:
        """Of the two, what has been nearer so far."""
        return self._trended() if self.error <= self.last_error else self.last

    def _trended(self) -> float:
        return max(0.0, self.level + _DAMPING * self.trend)


class DemandForecast:
    """Tokens/s by adapter; prompts and outputs apart, since their trends are different.

    LoRAServe, algorithm 1, step 1, leaves open how.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, bool], _Series] = {}

    def add(self, tokens_per_s: Mapping[str, tuple[float, float]]) -> None:
        """Take the demand of a step, of prompts and outputs; adapters not in it had none."""
        for name in tokens_per_s.keys() | {name for name, _ in self._series}:
            for is_output, value in enumerate(tokens_per_s.get(name, (0.0, 0.0))):
                key = name, bool(is_output)
                if key in self._series:
                    self._series[key].add(value)
                else:
                    self._series[key] = _Series(value, last=value)

    def remove(self, name: str) -> None:
        """There is no such adapter any more."""
        self._series.pop((name, False), None)
        self._series.pop((name, True), None)

    def tokens_per_s(self, name: str) -> float:
        """The forecast of the next step; 0 for adapters without requests so far."""
        both = (self._series.get((name, is_output)) for is_output in (False, True))
        return sum(series.next for series in both if series is not None)
