"""The share of a server that an adapter's tokens take. Pure."""

from bisect import bisect_left
from collections.abc import Mapping

from ....errors import ConfigError
from .plan import AdapterDemand


class CapacityTable:
    """Tokens/s that one server sustains within its SLO if all its adapters have one rank.

    Source: LoRAServe, section IV-A ("operating points"). A rank that is not in the table has the
    capacity of the next larger one, or of the largest.
    """

    def __init__(self, tokens_per_s: Mapping[int, float]) -> None:
        """By rank. Raises ``ConfigError`` if there is none, or one is not above 0."""
        if not tokens_per_s or min(tokens_per_s.values()) <= 0.0:
            raise ConfigError(f"operating capacities must be above 0: {dict(tokens_per_s)}")
        self._ranks = sorted(tokens_per_s)
        self._tokens_per_s = [tokens_per_s[rank] for rank in self._ranks]

    def load_of(self, adapter: AdapterDemand) -> float:
        """Return an adapter's load in servers."""
        index = min(bisect_left(self._ranks, adapter.rank), len(self._ranks) - 1)
        return adapter.tokens_per_s / self._tokens_per_s[index]
