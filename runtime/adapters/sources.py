"""Which adapters ``--lora-dir`` and ``--lora-modules`` name. Touches no adapter file's content."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ..config.notations import LoraModule, parse_lora_modules
from ..errors import AdapterError, ConfigError
from .checkpoint import WEIGHTS_NAME
from .names import check_adapter_name
from .peft_config import CONFIG_NAME

_MAX_DEPTH = 4  # of directories whose names are joined by slashes


def collect_sources(
    lora_dir: str | None, lora_modules: Sequence[str], base_names: Collection[str] = ()
) -> tuple[LoraModule, ...]:
    """All adapters to load at start, those of ``--lora-dir`` first.

    Raises ``ConfigError`` naming the flag: bad names, a name given twice, another base model.
    """
    sources: dict[str, LoraModule] = {}
    named = [("--lora-modules", module) for module in parse_lora_modules(tuple(lora_modules))]
    if lora_dir is not None:
        found = [LoraModule(name, str(path)) for name, path in discover(Path(lora_dir))]
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


def stored_bytes(source: LoraModule) -> int:
    """Size of the file of an adapter's weights; 0 if there is none."""
    try:
        return (Path(source.path) / WEIGHTS_NAME).stat().st_size
    except OSError:
        return 0


def discover(lora_dir: Path) -> list[tuple[str, Path]]:
    """List (name, path) of the directories below that hold an adapter_config.json, by name.

    A directory without one may hold others: ``team/sql`` is the name of what lies there. Raises
    ``ConfigError`` if ``lora_dir`` is no readable directory.
    """
    try:
        found = sorted(_below(lora_dir, ()))
    except OSError as error:
        raise ConfigError(f"--lora-dir {lora_dir}: {error.strerror or error}") from error
    return found


def _below(directory: Path, parents: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Raises ``OSError`` for ``directory`` alone: what is below may go, or be another's."""
    for entry in directory.iterdir():
        names = (*parents, entry.name)
        if (entry / CONFIG_NAME).is_file():
            yield "/".join(names), entry
        elif len(names) < _MAX_DEPTH and _may_hold_others(entry):
            try:
                yield from _below(entry, names)
            except OSError:
                continue


def _may_hold_others(entry: Path) -> bool:
    """Links could lead in circles, and hidden directories are caches of tools."""
    return not entry.name.startswith(".") and not entry.is_symlink() and entry.is_dir()
