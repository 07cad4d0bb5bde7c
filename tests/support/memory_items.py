"""Items of memory policies, and facts that are equal for all."""

from collections.abc import Callable
from dataclasses import dataclass

from corun.runtime.memory.policies.policy import MemoryFacts, MemoryItem


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Item:
    """An adapter or a block."""

    name: str
    num_bytes: int = 100
    is_adapter: bool = False
    cost_s: float = 1.0

    @property
    def can_return(self) -> bool:
        return self.is_adapter


def _cost_s(item: MemoryItem) -> float:
    return item.cost_s if isinstance(item, Item) else 1.0


def facts_of(
    *,
    mean_batch_size: float = 1.0,
    kv_reuse_share: float = 1.0,
    reload_cost_s: Callable[[MemoryItem], float] = _cost_s,
) -> MemoryFacts:
    return MemoryFacts(
        reload_cost_s=reload_cost_s,
        mean_batch_size=lambda: mean_batch_size,
        kv_reuse_share=lambda: kv_reuse_share,
        num_blocks=0,
    )
