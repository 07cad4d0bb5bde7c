"""One place where an option is written: a dataclass field with help, choices and range.

Command-line flags, YAML keys, checks and the option table of the docs are derived from the
fields. Knows nothing of argparse, YAML or any single option.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache
from typing import Any

_SCALAR_TYPES = (str, int, float, bool)


def option(  # noqa: PLR0913 - one keyword per property
    default: Any = MISSING,
    *,
    help: str,
    choices: Sequence[str] = (),
    metavar: str | None = None,
    default_factory: Callable[[], Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    positional: bool = False,
    number_as_text: bool = False,
) -> Any:
    """Return a dataclass field that carries its own documentation and limits.

    The flag is the field's name with dashes (``max_model_len`` -> ``--max-model-len``), the YAML
    key is the flag without the leading dashes, dashes or underscores alike. ``minimum`` and
    ``maximum`` are inclusive, ``above`` is a lower bound that is not. A ``positional`` option has
    no flag: on the command line it stands alone. ``number_as_text``: a lone number, which
    YAML does not take for text, is meant as text.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "metavar": metavar,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "positional": positional,
        "number_as_text": number_as_text,
    }
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """Everything known of one option, read from its field."""

    name: str  # of the field
    kind: type  # str, int, float or bool; of one item if repeated
    optional: bool  # None is a value
    repeated: bool  # a tuple of ``kind``
    default: Any
    help: str
    choices: tuple[str, ...]
    metavar: str | None
    minimum: float | None
    maximum: float | None
    above: float | None
    positional: bool
    number_as_text: bool

    @property
    def key(self) -> str:
        """The YAML key."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """How the command line names it, and so every message."""
        return self.name.upper() if self.positional else f"--{self.key}"

    @property
    def value_name(self) -> str:
        """What stands for the value in usage lines."""
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
        _spec(item, hints[item.name])
        for item in dataclasses.fields(config_class)
        if "help" in item.metadata
    )


def _spec(item: "dataclasses.Field[Any]", hint: Any) -> OptionSpec:
    kind, optional, repeated = _parse_hint(hint)
    default = item.default
    if default is MISSING and item.default_factory is not MISSING:
        default = item.default_factory()
    assert default is not MISSING, f"option {item.name} has no default"
    return OptionSpec(
        name=item.name,
        kind=kind,
        optional=optional,
        repeated=repeated,
        default=default,
        **item.metadata,
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
    assert hint in _SCALAR_TYPES, f"an option is text, a number, a switch or a tuple: {hint}"
    return hint, optional, repeated
