"""The adapters of ``--lora-dir`` and ``--lora-modules``. Reads no contents of adapter files."""

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

_MAX_DEPTH = 4  # of nested directories, with names joined by slashes
_MAX_NAMES_SHOWN = 5
# Errors that mean that a file does not exist. Any other error means that this is unknown.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.ENAMETOOLONG})


@dataclass(frozen=True, slots=True)
class LoraDirEntries:
    """The entries of ``--lora-dir`` at one moment. By name, with slashes between parts."""

    adapters: dict[str, Path] = field(default_factory=dict)
    # Unreadable entries, with the reason; "" is the directory itself. Their contents are unknown.
    unreadable: dict[str, str] = field(default_factory=dict)
    unservable: dict[str, str] = field(default_factory=dict)  # names that no adapter may have
    is_missing: bool = False  # the directory does not exist


def collect_sources(
    lora_dir: str | None, lora_modules: Sequence[str], base_names: Collection[str] = ()
) -> tuple[LoraModule, ...]:
    """Return all adapters to load at start, those of ``--lora-dir`` first.

    Entries of ``--lora-dir`` that cannot be read or served are skipped with a warning. Raises
    ``ConfigError`` with the flag for an unreadable directory, and for bad names, repeated names or
    another base model in ``--lora-modules``.
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
            _LOG.warning("skipped %s: --lora-modules has another adapter %r", path, name)
        else:
            found.append(LoraModule(name, str(path)))
    return (*found, *sources.values())


def stored_bytes(source: LoraModule) -> int:
    """Return the size of the file of an adapter's weights; 0 if there is none."""
    try:
        return (Path(source.path) / WEIGHTS_NAME).stat().st_size
    except OSError:
        return 0


def discover(lora_dir: Path, base_names: Collection[str] = ()) -> LoraDirEntries:
    """Find directories below ``lora_dir`` with an adapter_config.json.

    A directory without one may contain adapters: ``team/sql`` is the name of one in ``team``. An
    unreadable entry does not affect other entries.
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
    """Warn of entries that became unreadable or unservable, and log those readable again."""
    for reason, names in _by_reason(before.unreadable, now.unreadable).items():
        if "" in names:
            _LOG.warning(
                "--lora-dir %s cannot be read (%s): its adapters stay as they are %s",
                lora_dir, reason, "for a while" if now.is_missing else "until it can be read",
            )  # fmt: skip
        else:
            _LOG.warning(
                "--lora-dir %s: %s cannot be read (%s): adapters there stay as they are until it "
                "can be read; all other adapters are served", lora_dir, _shown(names), reason,
            )  # fmt: skip
    readable = sorted(before.unreadable.keys() - now.unreadable.keys())
    if "" in readable:
        _LOG.info("--lora-dir %s is readable again", lora_dir)
    elif readable and "" not in now.unreadable:
        _LOG.info("--lora-dir %s: %s is readable again or was removed", lora_dir, _shown(readable))
    for name in sorted(now.unservable.keys() - before.unservable.keys()):
        _LOG.warning("skipped in --lora-dir %s: %s", lora_dir, now.unservable[name])


def is_adapter(directory: Path) -> bool:
    """Whether ``directory`` has an adapter_config.json. Raises ``OSError`` if this is unknown."""
    try:
        return stat.S_ISREG((directory / CONFIG_NAME).stat().st_mode)
    except OSError as error:
        if why_unknown(error) is None:
            return False
        raise


def why_unknown(error: OSError) -> str | None:
    """Return the system's reason why a file's existence is unknown; None if it does not exist."""
    return None if error.errno in _NOT_THERE else error.strerror or str(error)


def _below(
    directory: Path, parents: tuple[str, ...], unreadable: dict[str, str]
) -> Iterator[tuple[str, Path]]:
    """Yield the adapters in ``directory``; ``parents``: the parts of its name in --lora-dir."""
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
    """Whether to search an entry: not links (cycles) nor hidden directories (caches of tools)."""
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def _by_reason(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the new names, by reason."""
    names: dict[str, list[str]] = {}
    for name in sorted(now):
        if name not in before:
            names.setdefault(now[name], []).append(name)
    return names


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES_SHOWN
    shown = ", ".join(map(repr, names[:_MAX_NAMES_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown
