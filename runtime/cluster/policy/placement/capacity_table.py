"""The share of a server that an adapter's tokens take. Pure."""

from bisect import bisect_left
from collections.abc import Mapping

from .....profiles.models import MachineModel
from .....profiles.step_time import forward_s
from ....errors import ConfigError
from .plan import AdapterDemand

_PROMPT_TOKENS = 5  # per output token; by hand, about those of Azure's conversations


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
        index = min(bisect_left(self._ranks, adapter.rank), len(self._ranks) - 1)
        return adapter.tokens_per_s / self._tokens_per_s[index]


def estimated_tokens_per_s(
    model: MachineModel, max_num_seqs: int, total_kv_tokens: int, adapter_bytes: int
) -> float:
    """Return the tokens/s of a server that is full of requests for adapters of this size.

    In each step all rows decode, and for each of them five prompt tokens are computed. There is no
    limit of the time to first token, so the server holds less within an SLO.
    """
    rows = max_num_seqs
    num_tokens = (*(1,) * rows, _PROMPT_TOKENS * rows)
    starts = (*(total_kv_tokens // rows,) * rows, 0)
    return sum(num_tokens) / forward_s(model, num_tokens, starts, (adapter_bytes,) * (rows + 1))
