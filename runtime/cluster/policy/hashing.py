"""Rendezvous hashing: a key's order of servers stays when other servers join or leave.

Source: Thaler and Ravishankar, 1998, "Using name-based mappings to increase hit rates"; with
weights: Schindelhauer and Schomaker, 2005, "Weighted distributed hash tables". Pure.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from .reports import ServerId

_MASK = 2**64 - 1
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _12 = (np.uint64(bits) for bits in (30, 27, 31, 12))


@lru_cache(maxsize=65_536)
def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def units_of(key: str, servers: Iterable[ServerId]) -> dict[ServerId, float]:
    """Return a pseudorandom number in (0, 1) per server, fixed for this key."""
    key_hash = _hash(f"key {key}")
    return {server_id: _unit(key_hash ^ _hash(server_id)) for server_id in servers}


def _unit(mixed: int) -> float:
    """The finalizer of splitmix64: Steele, Lea and Flood, 2014."""
    mixed = ((mixed ^ mixed >> 30) * int(_FACTOR_1)) & _MASK
    mixed = ((mixed ^ mixed >> 27) * int(_FACTOR_2)) & _MASK
    return (((mixed ^ mixed >> 31) >> 12) + 0.5) / 2**52


def hashed_order(key: str, servers: Iterable[ServerId]) -> list[ServerId]:
    """Return ``servers`` in the order of ``key``."""
    return list(_hashed_order(key, tuple(servers)))


@lru_cache(maxsize=4096)  # keys repeat, and servers seldom change
def _hashed_order(key: str, servers: tuple[ServerId, ...]) -> tuple[ServerId, ...]:
    """Compute ``_unit`` of all servers at once."""
    mixed = np.array([_hash(one) for one in servers], dtype=np.uint64)
    mixed ^= np.uint64(_hash(f"key {key}"))
    mixed = (mixed ^ mixed >> _30) * _FACTOR_1
    mixed = (mixed ^ mixed >> _27) * _FACTOR_2
    units = (mixed ^ mixed >> _31) >> _12
    return tuple([servers[index] for index in np.argsort(units, kind="stable").tolist()])


def weighted_order(units: Mapping[ServerId, float], shares: Mapping[ServerId, float]) -> list[ServerId]:
    """Return servers such that each is first for its share of all keys.

    ``units``: a number in (0, 1) for each server with a share > 0, drawn or hashed.
    """
    return sorted(units, key=lambda server_id: -math.log(units[server_id]) / shares[server_id])
