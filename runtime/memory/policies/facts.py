"""The facts that a memory policy gets, and the rules it has beside ranks. Plain data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .policy import MemoryItem, MemoryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What ranks depend on and only other parts know."""

    reload_cost_s: Callable[[MemoryItem], float]  # what a request waits if it is gone; above 0
    mean_batch_size: Callable[[], float]  # running requests, over the last 5 seconds
    kv_reuse_share: Callable[[], float]  # how often a computed block is found, lately; 0 to 1
    # Of frequency, recency and size of adapters, for ``chameleon``; None = the paper's.
    weights: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """The rules of a memory under this policy, apart from the order of evictions."""

    keeps_idle_adapters: bool = True  # False: an adapter leaves with its last use
    keeps_history: bool = True  # KV of requests that have ended
    ties_kv_to_adapter: bool = True  # no KV is on the device without its adapter
    is_split: bool = False  # blocks take room from blocks alone, adapters from adapters
    ranked_share: float = 0.0  # of the pool that one ranking serves, as it takes long; 0 = one item


class RankingPolicy(MemoryPolicy, Protocol):
    """A memory policy with its rules, as the registry makes them.

    A use shows in the rank when the item is offered next. What is offered without ever having been
    visited counts as used just then, as it was computed or loaded: blocks become leaves long
    after they were filled, so the memory should visit them when it enters them. Requests for the
    base model visit it as an adapter of no bytes, so that visits of adapters are arrivals. Some
    remember adapters for a while that have left: one that comes back is the same object.
    """

    @property
    def rules(self) -> MemoryRules:
        """Never change."""
        ...
