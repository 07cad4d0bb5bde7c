"""Options as dataclass fields with help, choices, range and commands.

Command-line flags, YAML keys, checks and the option table of the docs are derived from the
fields. Knows nothing of argparse, YAML or any single option, except those that are gone. Checks
are pure and do not look at files. Every message names the option, its value and the limit.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..errors import ConfigError
from ..near_names import near_names

_KIND_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
# Options of earlier releases, by key, and what replaces them.
_GONE = {
    "queues": "--scheduling-policy chameleon:queues=K",
    "refresh-s": "--scheduling-policy chameleon:refresh=SECONDS",
    "memory-policy-weights": "--memory-policy chameleon:frequency=F,recency=R,size=S",
    "prefetch-expected": "--pin NAME for adapters that are to stay on the device",
    "host-adapter-bytes": "--host-bytes, one budget for adapters and KV",
    "host-kv-bytes": "--host-bytes, one budget for adapters and KV",
}
# Takes a value and its flag or key, which a ``ConfigError`` for a wrong value names.
CheckValue = Callable[[Any, str], object]


class Properties(typing.TypedDict, total=False):
    """Documentation and limits of an option."""

    help: typing.Required[str]
    choices: tuple[str, ...]
    metavar: str | None
    minimum: float | None  # inclusive, as ``maximum``
    maximum: float | None
    above: float | None  # an exclusive lower bound
    positional: bool  # it has no flag
    number_as_text: bool  # a lone number, which YAML does not read as text, is taken as text
    one_each: bool  # each of several values needs the flag before it, so that MODEL may follow
    check: CheckValue | None  # called after the checks of type, choices and range
    commands: tuple[str, ...]  # these have the flag in addition to ``corun serve``


def option(default: Any, **properties: typing.Unpack[Properties]) -> Any:
    """Return a dataclass field with its documentation and limits.

    The flag is the field's name with dashes (``max_model_len`` -> ``--max-model-len``), the YAML
    key is the flag without the leading dashes, dashes or underscores alike.
    """
    return field(default=default, metadata=properties)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """One option, as its field describes it; see ``Properties``."""

    name: str  # of the field
    kind: type  # str, int, float or bool; of one item if repeated
    optional: bool  # None is a value
    repeated: bool  # a tuple of ``kind``
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    positional: bool = False
    number_as_text: bool = False
    one_each: bool = False
    check: CheckValue | None = None
    commands: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """The name on the command line and in messages."""
        return self.name.upper() if self.positional else f"--{self.key}"

    @property
    def value_name(self) -> str:
        """The placeholder of the value in usage lines."""
        if self.metavar is not None:
            return self.metavar
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {str: "TEXT", int: "N", float: "X", bool: ""}[self.kind]


@cache
def option_specs(config_class: type) -> tuple[OptionSpec, ...]:
    """Return the options of a configuration dataclass in the order of its fields."""
    hints = typing.get_type_hints(config_class)
    return tuple(
        _spec(item, hints[item.name]) for item in dataclasses.fields(config_class) if "help" in item.metadata
    )


def _spec(item: "dataclasses.Field[Any]", hint: Any) -> OptionSpec:
    kind, optional, repeated = _parse_hint(hint)
    return OptionSpec(
        name=item.name, kind=kind, optional=optional, repeated=repeated, default=item.default, **item.metadata
    )


def _parse_hint(hint: Any) -> tuple[type, bool, bool]:
    """Return (scalar type, may be None, is a tuple) of a field's annotation."""
    optional = False
    if isinstance(hint, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        assert len(members) == 1, f"an option has one type, or one and None: {hint}"
        hint, optional = members[0], True
    repeated = typing.get_origin(hint) is tuple
    if repeated:
        hint = typing.get_args(hint)[0]
    assert hint in _KIND_NAMES, f"an option is text, a number, a switch or a tuple: {hint}"
    return hint, optional, repeated


def check_config(config: Any) -> None:
    """Check every option of a frozen configuration dataclass, and convert it to its exact type.

    Called from ``__post_init__``. Raises ``ConfigError``.
    """
    config_class: type = type(config)
    for spec in option_specs(config_class):
        value = check_value(spec, getattr(config, spec.name), label=spec.flag)
        object.__setattr__(config, spec.name, value)


def check_value(spec: OptionSpec, value: Any, *, label: str) -> Any:
    """Return ``value`` as the option's type; raise ``ConfigError``, naming ``label``, if it cannot.

    Text is not converted to numbers, nor numbers to truth values. A single item is accepted for a
    repeated option.
    """
    if value is None and spec.optional:
        return None
    if spec.repeated:
        items = value if isinstance(value, list | tuple) else (value,)
        value = tuple(_check_item(spec, item, label) for item in items)
    else:
        value = _check_item(spec, value, label)
    if spec.check is not None:
        spec.check(value, label)
    return value


def parse_text(spec: OptionSpec, text: str, *, label: str) -> Any:
    """Return the value of the option (of one item of it) that ``text`` stands for.

    Raises ``ConfigError`` that names ``label``.
    """
    if spec.kind is str:
        return text
    try:
        return spec.kind(text)
    except ValueError:
        kind = _KIND_NAMES[spec.kind]
        raise ConfigError(f"{label} is {text!r}, must be {kind}") from None


def replacement(word: str) -> str | None:
    """Return what replaces an option that is gone, by its flag, key or variable; else None."""
    return _GONE.get(word.removeprefix("--").lower().replace("_", "-"))


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return what replaces ``word``, or ``" (did you mean …?)"`` with the nearest known words."""
    if (instead := replacement(word)) is not None:
        return f", which is gone: give {instead}"
    return near_names(word, known, " (did you mean {}?)", show=str, most=2)


def _check_item(spec: OptionSpec, value: Any, label: str) -> Any:
    if spec.kind is float and type(value) is int:
        value = float(value)
    if spec.number_as_text and type(value) is int:
        value = str(value)
    given = type(value)
    if given is not spec.kind:  # ``True`` is no ``int`` here
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


def _check_range(spec: OptionSpec, value: float, label: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{label} is {value}, must be a finite number")
    if spec.minimum is not None and value < spec.minimum:
        raise ConfigError(f"{label} is {value}, must be at least {spec.minimum}")
    if spec.above is not None and value <= spec.above:
        raise ConfigError(f"{label} is {value}, must be more than {spec.above}")
    if spec.maximum is not None and value > spec.maximum:
        raise ConfigError(f"{label} is {value}, must be at most {spec.maximum}")
