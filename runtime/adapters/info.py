"""The published state of registered adapters: plain data, which front ends copy."""

from collections.abc import Iterable

import msgspec

from ..engine_state import Residency
from .conventions import AdapterConventions
from .names import READY

LEVELS = ("device", "partial", "host", "disk")  # of a version, the fastest first
LEVEL_ALIASES = {"gpu": "device", "cpu": "host"}  # names of earlier releases, accepted in filters


class DrainingVersion(msgspec.Struct, frozen=True, array_like=True):
    """A version that finishes its requests and accepts no new ones."""

    version: str  # content digest, hexadecimal
    rank: int
    num_bytes: int
    residency: Residency


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """One registered adapter as the API shows it."""

    name: str
    path: str
    state: str  # loading | ready | draining | failed
    reason: str | None  # of a failure
    rank: int  # the largest of its targets
    num_bytes: int  # on the device
    version: str  # digest of configuration and tensors, hexadecimal
    pinned: bool = False  # kept on the device
    residency: Residency = Residency()
    draining: tuple[DrainingVersion, ...] = ()  # beside the version in service
    left_out: tuple[str, ...] = ()  # parts of its file without effect on text, with reasons: phrases
    conventions: AdapterConventions | None = None  # None = not read yet

    @property
    def is_resident(self) -> bool:
        """Whether rows can use it now."""
        return self.residency.level == LEVELS[0]


def num_fitting(adapters: Iterable[AdapterInfo], room_bytes: int) -> int:
    """Return how many ready adapters fit on the device at once, the smallest first."""
    used_bytes = number = 0
    for num_bytes in sorted(one.num_bytes for one in adapters if one.state == READY):
        used_bytes += num_bytes
        if used_bytes > room_bytes:
            break
        number += 1
    return number
