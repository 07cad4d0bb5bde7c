"""Builds command-line flags from configuration dataclasses and reads them back.

Flags arrive as text and are parsed here, not by argparse, so that a mistake reads the same
whether it was made in a flag, in a file or in a call.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .option import OptionSpec, check_value, option_specs, parse_text
from .simulate import takes
from .variables import read_variables


def add_flags(parser: argparse.ArgumentParser, config_class: type, *, title: str) -> None:
    """Add one flag per option of ``config_class``; a flag that is not given leaves no trace."""
    group = parser.add_argument_group(title)
    for spec in option_specs(config_class):
        add_flag(group, spec)


def add_flag(group: "argparse._ActionsContainer", spec: OptionSpec) -> None:
    """Add the flag of one option."""
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(spec)}
    if spec.positional:
        group.add_argument(spec.name, nargs="?", metavar=spec.flag, **common)
    elif spec.kind is bool:
        group.add_argument(spec.flag, action=argparse.BooleanOptionalAction, **common)
    elif spec.one_each:
        group.add_argument(spec.flag, action="append", metavar=spec.value_name, **common)
    elif spec.repeated:
        group.add_argument(spec.flag, nargs="*", action="extend", metavar=spec.value_name, **common)
    else:
        group.add_argument(spec.flag, metavar=spec.value_name, **common)


def build_configs(
    given: Mapping[str, Any],
    config_classes: tuple[type, ...],
    *,
    environment: Mapping[str, str],
    yaml_path: str | None = None,
    command: str = "serve",
) -> tuple[Any, ...]:
    """Return one instance per class: the file's values, the environment over them, flags on top.

    ``given`` holds the parsed arguments of ``command`` (``vars(namespace)``). Raises
    ``ConfigError``.
    """
    specs = [spec for cls in config_classes for spec in option_specs(cls)]
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names)), "two options share a name"
    values: dict[str, Any] = {}
    if yaml_path is not None:
        from .yaml_file import read_yaml_options

        values = read_yaml_options(yaml_path, specs)
    values |= read_variables(environment, [spec for spec in specs if takes(spec, command)])
    return tuple(_build(cls, values, given) for cls in config_classes)


def _build(config_class: type, values: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    names = {spec.name for spec in option_specs(config_class)}
    own = {name: value for name, value in values.items() if name in names}
    return config_class(**(own | _read_flags(given, config_class)))


def _read_flags(given: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """Return {field name: checked value} of the options among the parsed arguments."""
    values = {}
    for spec in option_specs(config_class):
        if spec.name in given:
            values[spec.name] = check_value(spec, _parsed(spec, given[spec.name]), label=spec.flag)
    return values


def _parsed(spec: OptionSpec, raw: Any) -> Any:
    if spec.kind is bool:
        return raw
    if spec.repeated:
        return tuple(parse_text(spec, text, label=spec.flag) for text in raw)
    if not isinstance(raw, str):
        raise ConfigError(f"{spec.flag} needs a value")
    return parse_text(spec, raw, label=spec.flag)


def _help(spec: OptionSpec) -> str:
    text = spec.help
    if spec.kind is not bool and spec.default not in (None, ()):
        text += f" Default: {spec.default}."
    return text.replace("%", "%%")
