"""A file with the adapters that were loaded while the engine ran, for its next start."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ConfigError
from ..whole_file import write_whole

_LOG = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RememberedAdapter:
    """One adapter of the file."""

    name: str
    path: str
    pinned: bool = False


class AdapterStateFile:
    """The adapters in the file, which is rewritten at each change."""

    def __init__(self, path: Path) -> None:
        """Read it, if it exists.

        Raises ``ConfigError`` if it is invalid, or its directory does not exist.
        """
        self._path = path
        if not path.parent.is_dir():
            raise ConfigError(
                f"--lora-state-file {path}: the directory {path.parent} does not exist"
            )
        self._adapters = {one.name: one for one in _read(path)}

    @property
    def adapters(self) -> tuple[RememberedAdapter, ...]:
        """The adapters, in the order of their first load."""
        return tuple(self._adapters.values())

    def put(self, adapter: RememberedAdapter) -> None:
        """Store an adapter that was loaded or pinned, or that has another path."""
        if self._adapters.get(adapter.name) != adapter:
            self._adapters[adapter.name] = adapter
            self._write()

    def pin(self, name: str, *, is_pinned: bool) -> None:
        """Store whether an adapter of the file is pinned."""
        known = self._adapters.get(name)
        if known is not None:
            self.put(RememberedAdapter(name, known.path, is_pinned))

    def remove(self, name: str) -> None:
        """Remove an adapter that is not served any more."""
        if self._adapters.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        """Write the file atomically. A failure is only logged: the adapter is served anyway."""
        adapters = [asdict(one) for one in self._adapters.values()]
        text = json.dumps({"version": _VERSION, "adapters": adapters}, indent=1)
        try:
            write_whole(self._path, f"{text}\n".encode())
        except OSError as error:
            _LOG.error(
                "--lora-state-file %s cannot be written; the next start will miss the last change: "
                "%s", self._path, error.strerror or error,
            )  # fmt: skip


def _read(path: Path) -> list[RememberedAdapter]:
    try:
        found = json.loads(path.read_bytes())
        if found["version"] != _VERSION:
            raise ValueError(
                f"it has version {found['version']}, this corun reads version {_VERSION}"
            )
        return [_adapter(one) for one in found["adapters"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"--lora-state-file {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--lora-state-file {path} is not a state file: {error}") from error


def _adapter(fields: dict[str, object]) -> RememberedAdapter:
    match fields:
        case {"name": str(name), "path": str(path), "pinned": bool(pinned), **rest} if not rest:
            return RememberedAdapter(name, path, pinned)
    raise ValueError(f"{fields!r} is not an adapter")
