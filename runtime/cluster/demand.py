"""Steps of a placement: measured demand and its forecast in, planned shares out. Pure.

Simulated and live clusters share this code.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .policy.placement.plan import AdapterDemand, PlacementPolicy, StoreServer
from .policy.reports import ServerId, Shares

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
        self._series.pop((name, False), None)
        self._series.pop((name, True), None)

    def tokens_per_s(self, name: str) -> float:
        """Return the forecast of the next step; 0 for adapters without requests so far."""
        both = (self._series.get((name, is_output)) for is_output in (False, True))
        return sum(series.next for series in both if series is not None)


class PlacementSteps:
    """A placement, the demand that it has seen, and its last plan."""

    def __init__(
        self,
        policy: PlacementPolicy,
        *,
        min_copies: Mapping[str, int] | None = None,
        shares: Shares | None = None,
    ) -> None:
        """``min_copies``: by adapter. ``shares``: an earlier plan, where the next one starts."""
        self.shares: Shares = shares or {}
        self._policy = policy
        self._min_copies = min_copies or {}
        self._forecast = DemandForecast()
        self._prompt_tokens, self._output_tokens = Counter[str](), Counter[str]()

    def expect(self, tokens_per_s: Mapping[str, tuple[float, float]]) -> None:
        """Add the demand of an earlier step, or demand that is expected before the first step.

        Tokens/s of prompts and outputs, by adapter.
        """
        self._forecast.add(tokens_per_s)

    def record(self, adapter: str, prompt_tokens: int, output_tokens: int) -> None:
        self._prompt_tokens[adapter] += prompt_tokens
        self._output_tokens[adapter] += output_tokens

    def end_step(self, lasted_s: float) -> None:
        self._forecast.add(
            {
                name: (self._prompt_tokens[name] / lasted_s, self._output_tokens[name] / lasted_s)
                for name in self._prompt_tokens | self._output_tokens
            }
        )
        self._prompt_tokens.clear()
        self._output_tokens.clear()

    def remove(self, adapter: str) -> None:
        self._forecast.remove(adapter)

    def demand_of(self, name: str, rank: int, num_bytes: int) -> AdapterDemand:
        return AdapterDemand(
            name=name, rank=rank, num_bytes=num_bytes, tokens_per_s=self._forecast.tokens_per_s(name)
        )

    def plan(self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer]) -> Shares:
        """Plan the next step for these servers, at least one. May take long.

        Raises ``ConfigError`` if there is no room for all adapters, or there are fewer servers
        than an adapter must have copies.
        """
        shares = dict(self._policy.plan(demand, servers, self.shares).shares)
        for name, number in self._min_copies.items():
            if name in shares:
                shares[name] = _with_copies(name, shares[name], number, servers, self.shares)
        self.shares = shares
        return shares


def names_at(shares: Shares) -> dict[ServerId, set[str]]:
    """Return the names of adapters by server."""
    found = defaultdict[ServerId, set[str]](set)
    for name, row in shares.items():
        for server_id in row:
            found[server_id].add(name)
    return found


def _with_copies(
    name: str, row: Mapping[ServerId, float], number: int, servers: Sequence[StoreServer], previous: Shares
) -> Mapping[ServerId, float]:
    """Return ``row`` on at least ``number`` servers; previous ones come first.

    Each added server gets an equal share.
    """
    if number > len(servers):
        raise ConfigError(
            f"--min-copies {name}={number} is more than the {len(servers)} engines of the cluster"
        )
    before = previous.get(name, {})
    others = sorted(
        (server for server in servers if server.server_id not in row),
        key=lambda one: (one.server_id not in before, -one.store_bytes, one.server_id),
    )
    new = [server.server_id for server in others[: max(0, number - len(row))]]
    if not new:
        return row
    kept = len(row) / number
    return {server_id: share * kept for server_id, share in row.items()} | dict.fromkeys(new, 1.0 / number)
