"""Which adapters ``--lora-dir`` and ``--lora-modules`` name. Touches no adapter file's content."""

import errno
import logging
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config.notations import LoraModule, parse_lora_modules
from ..errors import AdapterError, ConfigError
from .checkpoint import WEIGHTS_NAME
from .names import check_adapter_name
from .peft_config import CONFIG_NAME

_LOG = logging.getLogger(__name__)

_MAX_DEPTH = 4  # of directories whose names are joined by slashes
_MAX_NAMES_SHOWN = 5
# What the system says of what is not there. Anything else says that it cannot be known.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.ENAMETOOLONG})


@dataclass(frozen=True, slots=True)
class LoraDirEntries:
    """What can be seen below ``--lora-dir`` at one moment. By name, with slashes between parts."""

    adapters: dict[str, Path] = field(default_factory=dict)
    # Entries whose state cannot be read, and why; "" is the directory itself. What lies there or
    # below is not known.
    unreadable: dict[str, str] = field(default_factory=dict)
    unservable: dict[str, str] = field(default_factory=dict)  # names that no adapter may have
    is_missing: bool = False  # there is no such directory


def collect_sources(
    lora_dir: str | None, lora_modules: Sequence[str], base_names: Collection[str] = ()
) -> tuple[LoraModule, ...]:
    """All adapters to load at start, those of ``--lora-dir`` first.

    What of ``--lora-dir`` cannot be read or served is passed over with a warning. Raises
    ``ConfigError`` naming the flag: a directory that cannot be read, and of ``--lora-modules`` bad
    names, a name given twice, another base model.
    """
    sources: dict[str, LoraModule] = {}
    for source in parse_lora_modules(tuple(lora_modules)):
        try:
            check_adapter_name(source.name, base_names)
        except AdapterError as error:
            raise ConfigError(f"--lora-modules: {error}") from error
        if source.base_model_name not in (None, *base_names):
            raise ConfigError(
                f"--lora-modules: adapter {source.name!r} is for base model "
                f"{source.base_model_name!r}, but {', '.join(base_names)} is served"
            )
        sources[source.name] = source
    if lora_dir is None:
        return tuple(sources.values())
    entries = discover(Path(lora_dir), base_names)
    if "" in entries.unreadable:
        raise ConfigError(f"--lora-dir {lora_dir}: {entries.unreadable['']}")
    log_entries(Path(lora_dir), LoraDirEntries(), entries)
    found = []
    for name, path in entries.adapters.items():
        if name in sources:
            _LOG.warning("%s is not served: --lora-modules names another %r", path, name)
        else:
            found.append(LoraModule(name, str(path)))
    return (*found, *sources.values())


def stored_bytes(source: LoraModule) -> int:
    """Size of the file of an adapter's weights; 0 if there is none."""
    try:
        return (Path(source.path) / WEIGHTS_NAME).stat().st_size
    except OSError:
        return 0


def discover(lora_dir: Path, base_names: Collection[str] = ()) -> LoraDirEntries:
    """Look for directories below that hold an adapter_config.json.

    A directory without one may hold others: ``team/sql`` is the name of what lies there. What
    cannot be read concerns itself alone.
    """
    entries = LoraDirEntries(is_missing=_is_missing(lora_dir))
    for name, path in sorted(_below(lora_dir, (), entries.unreadable)):
        try:
            check_adapter_name(name, base_names)
            entries.adapters[name] = path
        except AdapterError as error:
            entries.unservable[name] = str(error)
    return entries


def log_entries(lora_dir: Path, before: LoraDirEntries, now: LoraDirEntries) -> None:
    """Warn of what cannot be read or served and could before, and say what can be read again."""
    for reason, names in _by_reason(before.unreadable, now.unreadable).items():
        if "" in names:
            _LOG.warning(
                "--lora-dir %s cannot be read (%s): its adapters stay as they are%s",
                lora_dir, reason, " for a while" if now.is_missing else " until it can be",
            )  # fmt: skip
        else:
            _LOG.warning(
                "--lora-dir %s: %s cannot be read (%s): adapters there stay as they are until it "
                "can be, all others are served", lora_dir, _shown(names), reason,
            )  # fmt: skip
    readable = sorted(before.unreadable.keys() - now.unreadable.keys())
    if "" in readable:
        _LOG.info("--lora-dir %s can be read again", lora_dir)
    elif readable and "" not in now.unreadable:
        _LOG.info("--lora-dir %s: %s can be read again or is gone", lora_dir, _shown(readable))
    for name in sorted(now.unservable.keys() - before.unservable.keys()):
        _LOG.warning("passed over in --lora-dir %s: %s", lora_dir, now.unservable[name])


def is_adapter(directory: Path) -> bool:
    """Whether it holds an adapter_config.json. Raises ``OSError`` if that cannot be known."""
    try:
        return stat.S_ISREG((directory / CONFIG_NAME).stat().st_mode)
    except OSError as error:
        if why_unknown(error) is None:
            return False
        raise


def why_unknown(error: OSError) -> str | None:
    """The system's reason why it is not known whether a file is there; None if it is not there."""
    return None if error.errno in _NOT_THERE else error.strerror or str(error)


def _below(
    directory: Path, parents: tuple[str, ...], unreadable: dict[str, str]
) -> Iterator[tuple[str, Path]]:
    """Adapters in ``directory``, whose name below --lora-dir has the parts ``parents``."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                yield from _in_entry(entry, (*parents, entry.name), unreadable)
    except OSError as error:
        reason = why_unknown(error)
        if not parents:
            reason = error.strerror or str(error)
        if reason is not None:
            unreadable["/".join(parents)] = reason


def _in_entry(
    entry: "os.DirEntry[str]", names: tuple[str, ...], unreadable: dict[str, str]
) -> Iterator[tuple[str, Path]]:
    path = Path(entry.path)
    try:
        if is_adapter(path):
            yield "/".join(names), path
        elif len(names) < _MAX_DEPTH and _may_hold_others(entry):
            yield from _below(path, names, unreadable)
    except OSError as error:
        unreadable["/".join(names)] = error.strerror or str(error)


def _is_missing(directory: Path) -> bool:
    try:
        directory.stat()
    except OSError as error:
        return why_unknown(error) is None
    return False


def _may_hold_others(entry: "os.DirEntry[str]") -> bool:
    """Links could lead in circles, and hidden directories are caches of tools."""
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def _by_reason(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[str]]:
    """Names that are new, by the reason."""
    names: dict[str, list[str]] = {}
    for name in sorted(now):
        if name not in before:
            names.setdefault(now[name], []).append(name)
    return names


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES_SHOWN
    shown = ", ".join(map(repr, names[:_MAX_NAMES_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown
