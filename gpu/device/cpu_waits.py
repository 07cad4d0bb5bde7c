"""Pending waits on words of the CPU device's streams."""

import itertools

from ...shm.atomics import load_acquire, store_release
from ...shm.words import distance, has_reached
from .base import DeviceError
from .cpu_wait import wait_word

_PIECE_NS = 100_000_000


class WordWaits:
    """All waits of a device. Thread-safe without a lock: each step is one dictionary operation."""

    def __init__(self) -> None:
        self._outstanding: dict[int, tuple[int, int]] = {}  # key -> (address, value)
        self._keys = itertools.count()
        self._is_abandoned = False

    def add(self, address: int, value: int) -> int:
        """Add a wait before it is enqueued, so that ``release`` cannot miss it."""
        key = next(self._keys)
        self._outstanding[key] = (address, value)
        return key

    def remove(self, key: int) -> None:
        """Remove a wait that has ended or was skipped."""
        del self._outstanding[key]

    def run(self, key: int) -> None:
        """Wait until the word has reached the value. Raises ``DeviceError`` if abandoned."""
        address, value = self._outstanding[key]
        waited_ns = 0
        while not wait_word(address, value, waited_ns, waited_ns + _PIECE_NS):
            waited_ns += _PIECE_NS
            if self._is_abandoned:
                raise DeviceError("the device was abandoned during a wait")

    def release(self) -> int:
        """Store the awaited value to every word that has not reached it; returns how many."""
        furthest: dict[int, int] = {}
        for address, value in list(self._outstanding.values()):
            if distance(value, furthest.setdefault(address, value)) > 0:
                furthest[address] = value
        num_words = 0
        for address, value in furthest.items():
            if not has_reached(load_acquire(address), value):
                store_release(address, value)
                num_words += 1
        return num_words

    def abandon(self) -> None:
        """Make waits fail that will never be released."""
        self._is_abandoned = True

    def addresses(self) -> set[int]:
        """Addresses of the awaited words."""
        return {address for address, _ in list(self._outstanding.values())}
