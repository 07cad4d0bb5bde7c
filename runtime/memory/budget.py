"""The one memory budget that KV blocks and adapters share, in bytes.

Owns the account and nothing else: it knows no addresses, no devices and no victims.
"""


class MemoryBudget:
    """Bytes taken by named owners; their sum never exceeds the capacity.

    Bytes can be promised, too: to growth that is expected, and that must find them. A promise takes
    nothing yet, but no other owner gets what it needs. What is evictable may back it:
    ``promised <= free + evictable`` always holds.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes``: what all owners together may take."""
        assert capacity_bytes >= 0, capacity_bytes
        self.capacity_bytes = capacity_bytes
        self._free_bytes = capacity_bytes
        self._evictable_bytes = 0  # taken, and free as soon as they are needed
        self._promised_bytes = 0
        self._reserved: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that no owner has taken."""
        return self._free_bytes

    @property
    def backed_bytes(self) -> int:
        """Bytes, free or evictable, that promises may be made of."""
        return self._free_bytes + self._evictable_bytes

    @property
    def unpromised_bytes(self) -> int:
        """Bytes, free or evictable, that are not promised.

        Less than 0 while a promise has to be made again: what backed it is in use again.
        """
        return self.backed_bytes - self._promised_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that ``reserve`` would find now."""
        return max(0, min(self._free_bytes, self.unpromised_bytes))

    def reserved_bytes(self, owner: str) -> int:
        """Bytes that ``owner`` holds now."""
        return self._reserved.get(owner, 0)

    def reserve(self, owner: str, num_bytes: int, *, promised_bytes: int = 0) -> bool:
        """Take ``num_bytes`` for ``owner`` if they are free; say whether they were.

        Of these ``promised_bytes`` fulfil a promise; the others must not be promised.
        """
        assert 0 <= promised_bytes <= min(num_bytes, self._promised_bytes), promised_bytes
        if num_bytes > self._free_bytes or num_bytes - promised_bytes > self.unpromised_bytes:
            return False
        self._promised_bytes -= promised_bytes
        self._free_bytes -= num_bytes
        self._reserved[owner] = self._reserved.get(owner, 0) + num_bytes
        return True

    def promise(self, num_bytes: int) -> int:
        """Keep ``num_bytes`` for growth, or as many as there are; return how many.

        It takes the place of what was promised before.
        """
        assert num_bytes >= 0, num_bytes
        self._promised_bytes = 0
        self._promised_bytes = min(num_bytes, self.unpromised_bytes)
        return self._promised_bytes

    def mark_evictable(self, num_bytes: int) -> None:
        """So many bytes more (or less, if negative) can be freed whenever they are needed."""
        self._evictable_bytes += num_bytes
        assert self._evictable_bytes >= 0, self._evictable_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        """Give back ``num_bytes`` of what ``owner`` holds."""
        held = self._reserved.get(owner, 0)
        assert 0 <= num_bytes <= held, f"{owner} returns {num_bytes} of {held} bytes"
        self._reserved[owner] = held - num_bytes
        self._free_bytes += num_bytes

    def check_invariants(self) -> None:
        """Assert that the account adds up."""
        assert all(held >= 0 for held in self._reserved.values()), self._reserved
        total = self._free_bytes + sum(self._reserved.values())
        assert total == self.capacity_bytes, (total, self.capacity_bytes)
        assert self._free_bytes >= 0, self._free_bytes
        assert 0 <= self._promised_bytes <= self.backed_bytes
