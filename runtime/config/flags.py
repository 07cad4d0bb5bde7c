"""Builds command-line flags from configuration dataclasses and reads them back.

Flags arrive as text and are parsed here, not by argparse, so that the message for a wrong value is
the same for a flag, a file and a call.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .option import OptionSpec, check_value, option_specs, parse_text
from .simulate import takes
from .variables import read_variables


def add_flag(parser: argparse.ArgumentParser, spec: OptionSpec) -> tuple[str, ...]:
    """Add the flag of one option and return its spellings; a flag not given leaves no trace."""
    arguments: dict[str, Any] = {"default": argparse.SUPPRESS}
    if spec.kind is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    else:
        arguments["metavar"] = spec.flag if spec.positional else spec.value_name
    if spec.positional:
        arguments["nargs"] = "?"
    elif spec.one_each:
        arguments["action"] = "append"
    elif spec.repeated:
        arguments |= {"nargs": "*", "action": "extend"}
    name = spec.name if spec.positional else spec.flag
    return tuple(parser.add_argument(name, **arguments).option_strings)


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
