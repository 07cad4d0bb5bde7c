"""Reads a workload by name, or from a YAML file, or from a log of requests."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ..config.yaml_file import read_yaml_mapping
from ..errors import ConfigError
from ..near_names import near_names
from .registry import recipes
from .workload_spec import WorkloadSpec

_YAML = (".yaml", ".yml")
_JSON_LINES = ".jsonl"


def read_workload(name_or_path: str, flag: str = "--workload") -> WorkloadSpec:
    """Return the workload of that name, or of a file: YAML or JSON lines.

    Raises ``ConfigError`` with ``flag``, the file and the mistake.
    """
    if name_or_path in recipes():
        return recipes()[name_or_path].spec
    suffix = Path(name_or_path).suffix
    if suffix == _JSON_LINES:
        return WorkloadSpec(json_lines=name_or_path)
    if suffix in _YAML:
        return _read_yaml(name_or_path, flag)
    hint = near_names(name_or_path, recipes()) or f", must be one of: {', '.join(recipes())}"
    raise ConfigError(f"{flag} is {name_or_path!r}{hint}; or a file that ends in .yaml or {_JSON_LINES}")


def _read_yaml(path: str, flag: str) -> WorkloadSpec:
    """Keys are names of fields; paths are relative to the file's directory."""
    data = read_yaml_mapping(path, flag)
    _check_keys(WorkloadSpec, data, f"{flag} {path}: ")
    json_lines = data.get("json_lines")
    if isinstance(json_lines, str):
        _check_json_lines(data, f"{flag} {path}: ")
        data = data | {"json_lines": str(Path(path).parent / json_lines)}
    try:
        return msgspec.convert(data, WorkloadSpec)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from None


def _check_keys(part: type, data: Mapping[str, Any], where: str) -> None:
    assert is_dataclass(part)
    types = get_type_hints(part)
    known = [one.name for one in fields(part)]
    for key, value in data.items():
        if key not in known:
            hint = near_names(str(key), known) or f", must be one of: {', '.join(known)}"
            raise ConfigError(f"{where}unknown key {key!r}{hint}")
        if is_dataclass(types[key]) and isinstance(value, Mapping):
            _check_keys(types[key], value, f"{where}{key}: ")


def _check_json_lines(data: Mapping[str, Any], where: str) -> None:
    """Refuse keys that the log decides; of the adapters only ranks may be given."""
    for key in ("lengths", "arrivals", "sessions"):
        if key in data:
            raise ConfigError(f"{where}{key} is given, but json_lines has them")
    for key in data.get("adapters") or ():
        if key != "ranks":
            raise ConfigError(f"{where}adapters.{key} is given, but json_lines names the adapters")
