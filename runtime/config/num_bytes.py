"""Reads amounts of memory such as ``4GiB``, the value of ``--host-adapter-bytes``."""

import re

from ..errors import ConfigError

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}IB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)},
}


def parse_num_bytes(text: str, flag: str) -> int:
    """Return the bytes; a number alone counts bytes. Raises ``ConfigError`` that names ``flag``."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise ConfigError(
            f"{flag} is {text!r}, must be a number of bytes, for instance 4GiB or 4294967296"
        )
    num_bytes = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if num_bytes != int(num_bytes):
        raise ConfigError(f"{flag} is {text!r}, which is no whole number of bytes")
    return int(num_bytes)
