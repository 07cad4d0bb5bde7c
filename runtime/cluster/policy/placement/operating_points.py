"""How much of a server an adapter's tokens take. Pure."""

from bisect import bisect_left
from collections.abc import Mapping

from ....errors import ConfigError
from .plan import AdapterDemand


class OperatingPoints:
    """Tokens/s that one server bears within its SLO if all its adapters have one rank.

    Source: LoRAServe, section IV-A. Of a rank that nobody measured that of the next larger counts,
    or of the largest.
    """

    def __init__(self, tokens_per_s: Mapping[int, float]) -> None:
        """By rank. Raises ``ConfigError`` if there are none, or one is not above 0."""
        if not tokens_per_s or min(tokens_per_s.values()) <= 0.0:
            raise ConfigError(f"operating points must be above 0: {dict(tokens_per_s)}")
        self._ranks = sorted(tokens_per_s)
        self._tokens_per_s = [tokens_per_s[rank] for rank in self._ranks]

    def load_of(self, adapter: AdapterDemand) -> float:
        """In servers."""
        index = min(bisect_left(self._ranks, adapter.rank), len(self._ranks) - 1)
        return adapter.tokens_per_s / self._tokens_per_s[index]
