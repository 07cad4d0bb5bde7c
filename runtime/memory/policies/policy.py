"""Interface of memory policies, which rank evictable items. Pure."""

from collections.abc import Iterator
from typing import Protocol


class MemoryItem(Protocol):
    """An evictable item: an adapter version, or a full KV block. Hashed by identity."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_adapter(self) -> bool: ...

    @property
    def can_return(self) -> bool:
        """Whether it can be copied to the device again after it has left."""
        ...


class MemoryPolicy(Protocol):
    """Ranks evictable items. The memory decides which items are evictable."""

    def visit(self, item: MemoryItem, now_s: float) -> None:
        """Record a use: of an adapter or found block at admission, of a block that is stored."""
        ...

    def offer(self, item: MemoryItem) -> None:
        """Make an item evictable: nothing refers to it."""
        ...

    def withdraw(self, item: MemoryItem) -> None:
        """Make an offered item not evictable."""
        ...

    def remove(self, item: MemoryItem) -> None:
        """Remove an item that has left the device, and its offer if it has one."""
        ...

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        """Yield offered items in order of eviction. No other method is called meanwhile.

        ``is_adapter``: True = only adapters, False = only blocks, in the same order; None = both. A
        call for one kind costs nothing for the other.
        """
        ...
