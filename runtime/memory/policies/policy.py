"""Interface of memory policies, which rank evictable items, with their facts and rules. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class MemoryItem(Protocol):
    """An evictable item: an adapter version, or a full KV block. Hashed by identity."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_adapter(self) -> bool: ...

    @property
    def can_return(self) -> bool:
        """Whether it can be copied to the device again after it has left."""


class MemoryPolicy(Protocol):
    """Ranks evictable items. The memory decides which items are evictable."""

    def visit(self, item: MemoryItem, now_s: float) -> None:
        """Record a use: of an adapter or found block at admission, of a block that is stored."""

    def offer(self, item: MemoryItem) -> None:
        """Make an item evictable: nothing refers to it."""

    def withdraw(self, item: MemoryItem) -> None:
        """Make an offered item not evictable."""

    def remove(self, item: MemoryItem) -> None:
        """Remove an item that has left the device, and its offer if it has one."""

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        """Yield offered items in order of eviction. No other method is called meanwhile.

        ``is_adapter``: True = only adapters, False = only blocks, in the same order; None = both. A
        call for one kind costs nothing for the other.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Facts of other parts of the engine, which ranks depend on."""

    reload_cost_s: Callable[[MemoryItem], float]  # delay if the item is gone; above 0
    mean_batch_size: Callable[[], float]  # running requests, over the last 5 seconds
    kv_reuse_share: Callable[[], float]  # share of recent blocks that are found again; 0 to 1
    num_blocks: int  # of the pool, for policies that do not split memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """The shares of the memory that its use is kept between."""

    low: float  # below, what has left comes back
    high: float  # above, what is idle leaves
    interval_s: float  # between two looks


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """The rules of a memory under this policy, apart from the order of evictions."""

    keeps_idle_adapters: bool = True  # False: adapters are evicted after their last use
    keeps_history: bool = True  # KV of requests that have ended
    ties_kv_to_adapter: bool = True  # no KV is on the device without its adapter
    is_split: bool = False  # blocks and adapters have separate memory
    watermarks: Watermarks | None = None  # None = nothing is moved but for requests


class RankingPolicy(MemoryPolicy, Protocol):
    """A memory policy with its rules, as returned by the registry.

    A visit changes the rank when the item is offered next. An item that is offered without a visit
    counts as used at that time. The memory visits blocks when it stores them, because they become
    leaves, and are offered, much later. Requests for the base model visit an adapter of zero bytes,
    so each arrival is one visit of an adapter. Policies may remember adapters that have left: an
    adapter that is loaded again is the same object.
    """

    @property
    def rules(self) -> MemoryRules:
        """The rules, which never change."""


@runtime_checkable
class SwappingPolicy(RankingPolicy, Protocol):
    """A policy with watermarks. It also ranks items that have left the device."""

    def returns(self) -> Iterator[MemoryItem]:
        """Yield remembered items that are away and can return, the first to return first.

        No other method is called meanwhile.
        """
