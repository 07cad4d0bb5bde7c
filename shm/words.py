"""Arithmetic of 4-byte words that count up indefinitely: signed, wrapping at 2^31."""


def wrap(value: int) -> int:
    """The int32 with the same low 32 bits as ``value``."""
    return (value + 2**31) % 2**32 - 2**31


def has_reached(value: int, target: int) -> bool:
    """Whether ``value`` is ``target`` or up to 2^31 - 1 steps past it, cyclically."""
    return (value - target) % 2**32 < 2**31


def distance(newer: int, older: int) -> int:
    """How many steps ``newer`` is ahead of ``older``; negative if it is behind."""
    return wrap(newer - older)
