"""Checks the values of options: type, choice, range. Pure; files are not looked at.

Every message says which option, what it got and which limit it met.
"""

import math
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError
from ..near_names import near_names
from .option import OptionSpec, option_specs

_KIND_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def check_config(config: Any) -> None:
    """Check every option of a frozen configuration dataclass and bring it to its exact type.

    Called from ``__post_init__``. Raises ``ConfigError``.
    """
    config_class: type = type(config)
    for spec in option_specs(config_class):
        value = check_value(spec, getattr(config, spec.name), label=spec.flag)
        object.__setattr__(config, spec.name, value)


def check_value(spec: OptionSpec, value: Any, *, label: str) -> Any:
    """Return ``value`` as the option's type; raise ``ConfigError``, naming ``label``, if it cannot.

    Numbers are not made from text, nor truth values from numbers: what YAML or a caller means
    must be plain. One item is accepted where several may stand.
    """
    if value is None and spec.optional:
        return None
    if spec.repeated:
        items = value if isinstance(value, list | tuple) else (value,)
        return tuple(_check_item(spec, item, label) for item in items)
    return _check_item(spec, value, label)


def parse_text(spec: OptionSpec, text: str) -> Any:
    """Return what ``text`` from the command line means for the option (for one item of it)."""
    if spec.kind is str:
        return text
    try:
        return spec.kind(text)
    except ValueError:
        kind = _KIND_NAMES[spec.kind]
        raise ConfigError(f"{spec.flag} is {text!r}, must be {kind}") from None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean …?)"`` with the nearest known words, or nothing."""
    return near_names(word, known, " (did you mean {}?)", show=str, most=2)


def _check_item(spec: OptionSpec, value: Any, label: str) -> Any:
    if spec.kind is float and type(value) is int:
        value = float(value)
    if spec.number_as_text and type(value) is int:
        value = str(value)
    if not _is_exactly(value, spec.kind):
        kind = _KIND_NAMES[spec.kind]
        raise ConfigError(f"{label} is {value!r}, must be {kind}")
    if spec.choices and value not in spec.choices:
        choices = ", ".join(spec.choices)
        hint = suggestion(value, spec.choices)
        raise ConfigError(f"{label} is {value!r}, must be one of {choices}{hint}")
    if spec.kind in (int, float):
        _check_range(spec, value, label)
    if spec.kind is str and not value:
        raise ConfigError(f"{label} is empty")
    return value


def _is_exactly(value: object, kind: type) -> bool:
    """Tell ``True`` from ``1``, which ``isinstance`` does not."""
    return type(value) is kind


def _check_range(spec: OptionSpec, value: float, label: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{label} is {value}, must be a finite number")
    if spec.minimum is not None and value < spec.minimum:
        raise ConfigError(f"{label} is {value}, must be at least {spec.minimum}")
    if spec.above is not None and value <= spec.above:
        raise ConfigError(f"{label} is {value}, must be more than {spec.above}")
    if spec.maximum is not None and value > spec.maximum:
        raise ConfigError(f"{label} is {value}, must be at most {spec.maximum}")
