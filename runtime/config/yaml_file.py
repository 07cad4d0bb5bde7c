"""Reads option values from a YAML file (``--config``).

The file is one mapping; a key is a flag without its leading dashes, dashes or underscores alike.
Options are known only through their specs.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from .option import OptionSpec, check_value, suggestion


def read_yaml_options(path: str, specs: Iterable[OptionSpec]) -> dict[str, Any]:
    """Return {field name: checked value} of the file's options.

    Raises ``ConfigError`` for a file that cannot be read or is not a YAML mapping, for an unknown
    or repeated key, and for a value of the wrong type or out of range.
    """
    by_name = {spec.name: spec for spec in specs}
    values: dict[str, Any] = {}
    for key, raw in read_yaml_mapping(path, "--config").items():
        name = key.replace("-", "_")
        if name not in by_name:
            near = suggestion(key.replace("_", "-"), [spec.key for spec in by_name.values()])
            raise ConfigError(f"{path}: unknown key {key!r}{near}")
        if name in values:
            raise ConfigError(f"{path}: {key} is given twice")
        value = _as_text_items(raw) if by_name[name].repeated else raw
        values[name] = check_value(by_name[name], value, label=f"{path}: {key}")
    return values


def _as_text_items(raw: Any) -> Any:
    """Convert the mappings of a list (adapters with name and path) to JSON, as a flag takes it."""
    if isinstance(raw, dict):
        return json.dumps(raw)
    if isinstance(raw, list):
        return [json.dumps(item) if isinstance(item, dict) else item for item in raw]
    return raw


def read_yaml_mapping(path: str, flag: str) -> dict[str, Any]:
    """Return the mapping in the file that ``flag`` names; an empty file gives an empty one.

    Raises ``ConfigError`` for a file that cannot be read, is not a YAML mapping or repeats a key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: not UTF-8 text: {error}") from None
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{flag} {path}: not valid YAML: {reason}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{flag} {path}: must be a mapping of names to values")
    return data


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key, of which YAML would take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return mapping
