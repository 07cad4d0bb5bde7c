"""Which adapters ``--lora-dir`` and ``--lora-modules`` name. Touches no adapter file's content."""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import AdapterError, ConfigError
from .names import check_adapter_name
from .peft_config import CONFIG_NAME

_JSON_KEYS = frozenset({"name", "path", "base_model_name"})


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A name and the PEFT directory to load under it."""

    name: str
    path: str
    base_model_name: str | None = None  # the base model the user means, if stated


def collect_sources(
    lora_dir: str | None, lora_modules: Sequence[str], base_names: Collection[str] = ()
) -> tuple[AdapterSource, ...]:
    """All adapters to load at start, those of ``--lora-dir`` first.

    Raises ``ConfigError`` naming the flag: bad names, a name given twice, another base model.
    """
    sources: dict[str, AdapterSource] = {}
    named = [("--lora-modules", parse_lora_module(text)) for text in lora_modules]
    if lora_dir is not None:
        found = [AdapterSource(name, str(path)) for name, path in discover(Path(lora_dir))]
        named = [*(("--lora-dir", source) for source in found), *named]
    for flag, source in named:
        try:
            check_adapter_name(source.name, base_names)
        except AdapterError as error:
            raise ConfigError(f"{flag}: {error}") from error
        if source.name in sources:
            other = sources[source.name].path
            raise ConfigError(
                f"{flag}: adapter {source.name!r} is given twice: {other} and {source.path}"
            )
        if source.base_model_name not in (None, *base_names):
            raise ConfigError(
                f"{flag}: adapter {source.name!r} is for base model {source.base_model_name!r}, "
                f"but {', '.join(base_names)} is served"
            )
        sources[source.name] = source
    return tuple(sources.values())


def discover(lora_dir: Path) -> list[tuple[str, Path]]:
    """List (name, path) of the sub-directories that hold an adapter_config.json, sorted by name.

    Raises ``ConfigError`` if ``lora_dir`` is no readable directory.
    """
    try:
        entries = sorted(lora_dir.iterdir())
    except OSError as error:
        raise ConfigError(f"--lora-dir {lora_dir}: {error.strerror or error}") from error
    return [(entry.name, entry) for entry in entries if (entry / CONFIG_NAME).is_file()]


def parse_lora_module(text: str) -> AdapterSource:
    """Parse ``name=path`` or ``{"name": …, "path": …, "base_model_name": …}``.

    Raises ``ConfigError`` naming --lora-modules.
    """
    if text.lstrip().startswith("{"):
        return _parse_json(text)
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise ConfigError(
            f'--lora-modules {text!r}: expected name=path or JSON such as {{"name": "a", '
            '"path": "dir"}'
        )
    return AdapterSource(name, os.path.expanduser(path))


def _parse_json(text: str) -> AdapterSource:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--lora-modules {text!r} is not valid JSON: {error}") from error
    unknown = sorted(set(fields) - _JSON_KEYS)
    if unknown:
        raise ConfigError(f"--lora-modules {text!r}: unknown key {', '.join(unknown)}")
    for key in ("name", "path"):
        if not isinstance(fields.get(key), str) or not fields[key]:
            raise ConfigError(f"--lora-modules {text!r}: {key!r} must be a non-empty string")
    base_model_name = fields.get("base_model_name")
    if not isinstance(base_model_name, str | None):
        raise ConfigError(f"--lora-modules {text!r}: 'base_model_name' must be a string")
    path = os.path.expanduser(fields["path"])
    return AdapterSource(fields["name"], path, base_model_name)
