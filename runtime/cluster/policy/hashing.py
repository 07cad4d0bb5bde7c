"""Rendezvous hashing: each key has its own order of servers, whatever servers come and go.

Source: Thaler and Ravishankar, 1998, "Using name-based mappings to increase hit rates"; with
weights: Schindelhauer and Schomaker, 2005, "Weighted distributed hash tables". Pure.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b

from .reports import ServerId

_MASK = 2**64 - 1


@lru_cache(maxsize=65_536)
def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def units_of(key: str, servers: Iterable[ServerId]) -> dict[ServerId, float]:
    """A number in (0, 1) for each server that it always has for this key, as if drawn."""
    key_hash = _hash(f"key {key}")
    return {server_id: _unit(key_hash ^ _hash(server_id)) for server_id in servers}


def _unit(mixed: int) -> float:
    """The finalizer of splitmix64: Steele, Lea and Flood, 2014."""
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return (((mixed ^ mixed >> 31) >> 12) + 0.5) / 2**52


def hashed_order(key: str, servers: Iterable[ServerId]) -> list[ServerId]:
    """All of ``servers`` in the key's own order."""
    units = units_of(key, servers)
    return sorted(units, key=units.__getitem__)


def weighted_order(
    units: Mapping[ServerId, float], shares: Mapping[ServerId, float]
) -> list[ServerId]:
    """Servers with a share, so that each is first for its share of all keys.

    ``units``: a number in (0, 1) for each server with a share > 0, drawn or hashed.
    """
    return sorted(units, key=lambda server_id: -math.log(units[server_id]) / shares[server_id])
