"""The one memory budget that KV blocks and adapters share, in bytes.

Owns the account and nothing else: it knows no addresses, no devices and no victims.
"""


class MemoryBudget:
    """Bytes taken by named owners; their sum never exceeds the capacity."""

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes``: what all owners together may take."""
        assert capacity_bytes >= 0, capacity_bytes
        self.capacity_bytes = capacity_bytes
        self._free_bytes = capacity_bytes
        self._reserved: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has taken."""
        return self._free_bytes

    def reserved_bytes(self, owner: str) -> int:
        """Bytes that ``owner`` holds now."""
        return self._reserved.get(owner, 0)

    def reserve(self, owner: str, num_bytes: int) -> bool:
        """Take ``num_bytes`` for ``owner`` if they are free; say whether they were."""
        assert num_bytes >= 0, num_bytes
        if num_bytes > self._free_bytes:
            return False
        self._free_bytes -= num_bytes
        self._reserved[owner] = self._reserved.get(owner, 0) + num_bytes
        return True

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
