"""The adapters of ``--lora-dir`` and ``--lora-modules``. Reads no contents of adapter files."""

import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config.notations import LoraModule, parse_lora_modules
from ..errors import AdapterError, ConfigError
from ..file_calls import FILES, Place, SilentError
from .checkpoint import WEIGHTS_NAME
from .dir_changes import FoundAdapter
from .names import check_adapter_name
from .peft_config import CONFIG_NAME

_LOG = logging.getLogger(__name__)

_MAX_DEPTH = 4  # of nested directories, with names joined by slashes
_MAX_NAMES_SHOWN = 5
_LOOK_TIMEOUT_S = 5.0  # for one entry
_MAX_WALKS = 8  # each passes over one more entry that does not answer
# Errors that mean that a file does not exist. Any other error means that this is unknown.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.ENAMETOOLONG})


# Takes the name and path of an adapter; raises ``OSError`` if it is unreadable.
Examine = Callable[[str, Path], FoundAdapter | None]


@dataclass(frozen=True, slots=True)
class LoraDirEntries:
    """The entries of ``--lora-dir`` at one moment. By name, with slashes between parts."""

    adapters: dict[str, Path] = field(default_factory=dict)
    examined: dict[str, FoundAdapter] = field(default_factory=dict)  # of these
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
    file = Path(source.path) / WEIGHTS_NAME
    try:
        return FILES.call(lambda _: file.stat().st_size, source.path)
    except OSError:
        return 0


def discover(
    lora_dir: Path, base_names: Collection[str] = (), examine: Examine = lambda *_: None
) -> LoraDirEntries:
    """Find directories below ``lora_dir`` with an adapter_config.json.

    A directory without one may contain adapters: ``team/sql`` is the name of one in ``team``. An
    unreadable entry does not affect other entries. One on a file system that does not answer counts
    as unreadable. ``examine`` is called with each adapter.
    """
    for _ in range(_MAX_WALKS):
        try:
            return FILES.call(
                lambda place: _Walk(lora_dir, place, base_names, examine).run(),
                str(lora_dir),
                _LOOK_TIMEOUT_S,
            )
        except SilentError as error:
            if error.filename == str(lora_dir):
                break
            # The next walk passes over this entry.
    return LoraDirEntries(unreadable={"": "the file system does not answer"})


def log_entries(lora_dir: Path, before: LoraDirEntries, now: LoraDirEntries) -> None:
    """Warn of entries that became unreadable or unservable, and log those readable again."""
    for reason, names in _by_reason(before.unreadable, now.unreadable).items():
        if "" in names:
            _LOG.warning(
                "--lora-dir %s cannot be read (%s): its adapters stay as they are %s",
                lora_dir,
                reason,
                "for a while" if now.is_missing else "until it can be read",
            )
        else:
            _LOG.warning(
                "--lora-dir %s: %s cannot be read (%s): adapters there stay as they are until it "
                "can be read; all other adapters are served",
                lora_dir,
                _shown(names),
                reason,
            )
    readable = sorted(before.unreadable.keys() - now.unreadable.keys())
    if "" in readable:
        _LOG.info("--lora-dir %s is readable again", lora_dir)
    elif readable and "" not in now.unreadable:
        _LOG.info("--lora-dir %s: %s is readable again or was removed", lora_dir, _shown(readable))
    for name in sorted(now.unservable.keys() - before.unservable.keys()):
        _LOG.warning("skipped in --lora-dir %s: %s", lora_dir, now.unservable[name])


def is_adapter(directory: Path) -> bool:
    """Whether ``directory`` has an adapter_config.json. Raises ``OSError`` if this is unknown."""
    return FILES.call(lambda _: _has_configuration(directory), str(directory))


def _has_configuration(directory: Path) -> bool:
    try:
        return stat.S_ISREG((directory / CONFIG_NAME).stat().st_mode)
    except OSError as error:
        if why_unknown(error) is None:
            return False
        raise


def why_unknown(error: OSError) -> str | None:
    """Return the system's reason why a file's existence is unknown; None if it does not exist."""
    return None if error.errno in _NOT_THERE else error.strerror or str(error)


class _Walk:
    """One walk through --lora-dir, in one call. It passes over entries that did not answer."""

    def __init__(self, lora_dir: Path, place: Place, base_names: Collection[str], examine: Examine) -> None:
        self._lora_dir = lora_dir
        self._place = place
        self._base_names = base_names
        self._examine = examine
        self._entries = LoraDirEntries(is_missing=_is_missing(lora_dir))

    def run(self) -> LoraDirEntries:
        for name, path in sorted(self._below(self._lora_dir, ())):
            self._take(name, path)
        return self._entries

    def _take(self, name: str, path: Path) -> None:
        try:
            check_adapter_name(name, self._base_names)
        except AdapterError as error:
            self._entries.unservable[name] = str(error)
            return
        self._entries.adapters[name] = path
        try:
            self._move(path)
            if (found := self._examine(name, path)) is not None:
                self._entries.examined[name] = found
        except OSError as error:
            self._entries.adapters.pop(name, None)
            self._entries.unreadable[name] = error.strerror or str(error)

    def _below(self, directory: Path, parents: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
        """Yield the adapters in ``directory``; ``parents``: the parts of its name."""
        try:
            self._move(directory)
            with os.scandir(directory) as entries:
                for entry in entries:
                    yield from self._in_entry(entry, (*parents, entry.name))
        except OSError as error:
            reason = why_unknown(error)
            if not parents:
                reason = error.strerror or str(error)
            if reason is not None:
                self._entries.unreadable["/".join(parents)] = reason

    def _in_entry(self, entry: "os.DirEntry[str]", names: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
        path = Path(entry.path)
        try:
            self._move(path)
            if _has_configuration(path):
                yield "/".join(names), path
            elif len(names) < _MAX_DEPTH and _may_hold_others(entry):
                yield from self._below(path, names)
        except OSError as error:
            self._entries.unreadable["/".join(names)] = error.strerror or str(error)

    def _move(self, path: Path) -> None:
        """Go on to another path. Raises ``SilentError`` if an earlier call still waits there."""
        if path != self._lora_dir and FILES.is_silent(str(path)):
            raise SilentError(str(path), _LOOK_TIMEOUT_S)
        self._place.move(str(path))


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
