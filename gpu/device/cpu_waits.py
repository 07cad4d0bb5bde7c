"""Waits on words that streams of the CPU device have ahead of them or are in."""

import itertools

from ...shm.atomics import load_acquire, store_release
from ...shm.words import distance, has_reached
from .base import DeviceError
from .cpu_wait import wait_word

_PIECE_NS = 100_000_000


class WordWaits:
    """All of a device. Thread-safe without a lock: every step is one operation on a dictionary."""

    def __init__(self) -> None:
        self._outstanding: dict[int, tuple[int, int]] = {}  # key -> (address, value)
        self._keys = itertools.count()
        self._is_abandoned = False

    def add(self, address: int, value: int) -> int:
        """Note a wait before it is enqueued, so that whoever releases cannot miss it."""
        key = next(self._keys)
        self._outstanding[key] = (address, value)
        return key

    def remove(self, key: int) -> None:
        """Forget a wait that is over, or was left out."""
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
        """Store what is waited for to every word that has not reached it; returns how many."""
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
        """Let waits fail that nobody will release any more."""
        self._is_abandoned = True

    def addresses(self) -> set[int]:
        """Of the words that are waited on."""
        return {address for address, _ in list(self._outstanding.values())}
