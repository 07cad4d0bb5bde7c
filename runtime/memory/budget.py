"""The memory budget that KV blocks and adapters share, in bytes.

It only counts: it knows no addresses, devices or victims.
"""


class MemoryBudget:
    """Bytes allocated by named owners. Their sum never exceeds the capacity.

    Bytes can also be reserved for the expected growth of running requests. A reservation allocates
    nothing, but no other owner gets its bytes. Evictable bytes can be reserved:
    ``reserved <= free + evictable`` holds after each ``reserve_growth``.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes``: limit of all owners together."""
        assert capacity_bytes >= 0, capacity_bytes
        self.capacity_bytes = capacity_bytes
        self._free_bytes = capacity_bytes
        self._evictable_bytes = 0  # allocated, and free as soon as they are needed
        self._reserved_bytes = 0
        self._allocated: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that no owner has allocated."""
        return self._free_bytes

    @property
    def reservable_bytes(self) -> int:
        """Bytes that can be reserved: free or evictable."""
        return self._free_bytes + self._evictable_bytes

    @property
    def unreserved_bytes(self) -> int:
        """Bytes, free or evictable, that are not reserved.

        Negative after reserved evictable bytes came into use. ``reserve_growth`` corrects that.
        """
        return self.reservable_bytes - self._reserved_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that ``allocate`` can take now."""
        return max(0, min(self._free_bytes, self.unreserved_bytes))

    def allocated_bytes(self, owner: str) -> int:
        """Bytes that ``owner`` holds now."""
        return self._allocated.get(owner, 0)

    def allocate(self, owner: str, num_bytes: int, *, reserved_bytes: int = 0) -> bool:
        """Allocate ``num_bytes`` for ``owner`` if they are free. Return whether they were.

        ``reserved_bytes`` of them come from the reservation, the rest from unreserved bytes.
        """
        assert 0 <= reserved_bytes <= min(num_bytes, self._reserved_bytes), reserved_bytes
        if num_bytes > self._free_bytes or num_bytes - reserved_bytes > self.unreserved_bytes:
            return False
        self._reserved_bytes -= reserved_bytes
        self._free_bytes -= num_bytes
        self._allocated[owner] = self._allocated.get(owner, 0) + num_bytes
        return True

    def reserve_growth(self, num_bytes: int) -> int:
        """Reserve ``num_bytes`` for growth, or as many as possible. Return how many.

        The new reservation replaces the previous one.
        """
        assert num_bytes >= 0, num_bytes
        self._reserved_bytes = 0
        self._reserved_bytes = min(num_bytes, self.unreserved_bytes)
        return self._reserved_bytes

    def mark_evictable(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more (fewer, if negative) allocated bytes as evictable."""
        self._evictable_bytes += num_bytes
        assert self._evictable_bytes >= 0, self._evictable_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        """Free ``num_bytes`` of ``owner``."""
        held = self._allocated.get(owner, 0)
        assert 0 <= num_bytes <= held, f"{owner} releases {num_bytes} of {held} bytes"
        self._allocated[owner] = held - num_bytes
        self._free_bytes += num_bytes

    def check_invariants(self) -> None:
        """Assert that the account adds up."""
        assert all(held >= 0 for held in self._allocated.values()), self._allocated
        total = self._free_bytes + sum(self._allocated.values())
        assert total == self.capacity_bytes, (total, self.capacity_bytes)
        assert self._free_bytes >= 0, self._free_bytes
        assert 0 <= self._reserved_bytes <= self.reservable_bytes
