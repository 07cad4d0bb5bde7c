"""The interface of memory policies, which only rank what may leave the device. Pure."""

from collections.abc import Iterator
from typing import Protocol


class MemoryItem(Protocol):
    """What may leave the device: an adapter version, or a full KV block. Hashed by identity."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_adapter(self) -> bool: ...


class MemoryPolicy(Protocol):
    """Ranks what may go. What may go is the memory's to decide, and it calls all of this."""

    def visit(self, item: MemoryItem, now_s: float) -> None:
        """A request uses it: an adapter when it is admitted, a block when its prefix matches."""
        ...

    def offer(self, item: MemoryItem) -> None:
        """It may go from now on: nothing refers to it."""
        ...

    def withdraw(self, item: MemoryItem) -> None:
        """It may not go any more; it was offered."""
        ...

    def remove(self, item: MemoryItem) -> None:
        """It has left the device, or has gone for good; it is not offered (any more)."""
        ...

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        """Yield what is offered, each once, the worst first. Nothing changes meanwhile.

        ``is_adapter``: only adapters, or only blocks, in the order that they have among all; None =
        both. A call for one kind costs nothing for the other.
        """
        ...
