"""Policies with options in one text, such as ``chameleon:queues=4,refresh=300``. Pure."""

import math
from collections.abc import Collection, Mapping

from .errors import ConfigError
from .near_names import near_names


def parse_policy(text: str, known: Collection[str], flag: str) -> tuple[str, Mapping[str, float]]:
    """Return the name and the options of NAME or NAME:KEY=NUMBER,KEY=NUMBER.

    Raises ``ConfigError`` that names ``flag``.
    """
    name, colon, rest = text.partition(":")
    if name not in known:
        hint = near_names(name, known, " (did you mean {}?)", show=str)
        raise ConfigError(f"{flag} is {text!r}, must be one of: {', '.join(known)}{hint}")
    options: dict[str, float] = {}
    for part in rest.split(",") if colon else ():
        key, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not key or key in options or not math.isfinite(number):
            raise ConfigError(f"{flag} is {text!r}: expected {name}:KEY=NUMBER,KEY=NUMBER with each key once")
        options[key] = number
    return name, options


def check_options(name: str, options: Mapping[str, float], known: Collection[str], flag: str) -> None:
    """Raise ``ConfigError`` for an option that the policy does not have."""
    for key in options:
        if key not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ConfigError(f"{flag}: {name} has no option {key!r}; {has}")


def check_switches(name: str, options: Mapping[str, float], known: Collection[str], flag: str) -> None:
    """Raise ``ConfigError`` for an option that the policy does not have, or that is not 0 or 1."""
    check_options(name, options, known, flag)
    for key, value in options.items():
        if value not in (0.0, 1.0):
            raise ConfigError(f"{flag}: {name} has {key}={value:g}, must be 0 (off) or 1")
