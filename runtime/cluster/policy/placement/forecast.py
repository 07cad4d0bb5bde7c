"""Forecast of adapters' demand in the next time step, from earlier steps. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

_LEVEL_SHARE, _TREND_SHARE = 0.5, 0.3  # weights of the newest step
_DAMPING = 0.8  # factor of a trend per step
_ERROR_SHARE = 0.2  # weight of the newest step in mean errors


@dataclass(slots=True)
class _Series:
    """Damped Holt's level and trend of one number, and its last value.

    Source: Gardner and McKenzie, 1985, "Forecasting trends in time series".
    """

    level: float
    trend: float = 0.0
    last: float = 0.0
    error: float = 0.0  # mean, of the trend's forecast
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
        """The forecast with the smaller mean error: by trend, or the last value."""
        return self._trended() if self.error <= self.last_error else self.last

    def _trended(self) -> float:
        return max(0.0, self.level + _DAMPING * self.trend)


class DemandForecast:
    """Forecasts tokens/s by adapter, separately for prompts and outputs: their trends differ.

    LoRAServe, algorithm 1, step 1, does not define the forecast.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, bool], _Series] = {}

    def add(self, tokens_per_s: Mapping[str, tuple[float, float]]) -> None:
        """Add the demand of a step, of prompts and outputs; adapters not in it had none."""
        for name in tokens_per_s.keys() | {name for name, _ in self._series}:
            for is_output, value in enumerate(tokens_per_s.get(name, (0.0, 0.0))):
                key = name, bool(is_output)
                if key in self._series:
                    self._series[key].add(value)
                else:
                    self._series[key] = _Series(value, last=value)

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        self._series.pop((name, False), None)
        self._series.pop((name, True), None)

    def tokens_per_s(self, name: str) -> float:
        """Return the forecast of the next step; 0 for adapters without requests so far."""
        both = (self._series.get((name, is_output)) for is_output in (False, True))
        return sum(series.next for series in both if series is not None)
