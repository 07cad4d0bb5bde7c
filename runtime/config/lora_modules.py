"""Reads the values of ``--lora-modules``: ``name=path``, or JSON with both."""

import json
import os
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to serve: its name in the API and its PEFT directory."""

    name: str
    path: str  # a leading ~ is expanded


def parse_lora_modules(items: tuple[str, ...]) -> tuple[LoraModule, ...]:
    """Return the adapters that ``items`` name; raise ``ConfigError`` for a bad or double one."""
    modules = tuple(_parse(item) for item in items)
    seen: dict[str, LoraModule] = {}
    for module in modules:
        if module.name in seen:
            raise ConfigError(
                f"--lora-modules names {module.name!r} twice:"
                f" {seen[module.name].path} and {module.path}"
            )
        seen[module.name] = module
    return modules


def _parse(text: str) -> LoraModule:
    name, path = _parse_json(text) if text.lstrip().startswith("{") else _parse_pair(text)
    if not name.strip() or not path.strip():
        raise ConfigError(f"--lora-modules {text!r}: name and path must not be empty")
    return LoraModule(name.strip(), os.path.expanduser(path.strip()))


def _parse_pair(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator:
        raise ConfigError(
            f"--lora-modules {text!r}: must be NAME=PATH or JSON with name and path"
            " (MODEL comes before the flag)"
        )
    return name, path


def _parse_json(text: str) -> tuple[str, str]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--lora-modules {text!r}: not valid JSON: {error}") from None
    if set(value) != {"name", "path"}:
        raise ConfigError(f"--lora-modules {text!r}: the keys must be name and path")
    name, path = value["name"], value["path"]
    if not isinstance(name, str) or not isinstance(path, str):
        raise ConfigError(f"--lora-modules {text!r}: name and path must be text")
    return name, path
