"""Steps of a placement: measured demand in, planned shares out. Pure.

Simulated and live clusters share this code.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ..errors import ConfigError
from .policy.placement.forecast import DemandForecast
from .policy.placement.plan import AdapterDemand, PlacementPolicy, StoreServer
from .policy.reports import ServerId, Shares


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
        """Count tokens of prompts and outputs for the current step."""
        self._prompt_tokens[adapter] += prompt_tokens
        self._output_tokens[adapter] += output_tokens

    def end_step(self, lasted_s: float) -> None:
        """End the current step, which lasted ``lasted_s``."""
        self._forecast.add(
            {
                name: (self._prompt_tokens[name] / lasted_s, self._output_tokens[name] / lasted_s)
                for name in self._prompt_tokens | self._output_tokens
            }
        )
        self._prompt_tokens.clear()
        self._output_tokens.clear()

    def remove(self, adapter: str) -> None:
        """Remove an adapter and its demand."""
        self._forecast.remove(adapter)

    def demand_of(self, name: str, rank: int, num_bytes: int) -> AdapterDemand:
        """Return an adapter with its expected demand in the next step."""
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
