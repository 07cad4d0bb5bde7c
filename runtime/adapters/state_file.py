"""A file with the adapters that were loaded while the engine ran, for its next start."""

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ..errors import ConfigError
from ..file_calls import FILES, Place
from ..whole_file import write_whole

_LOG = logging.getLogger(__name__)

_VERSION = 1
_CLOSE_TIMEOUT_S = 30.0  # more than two deadlines of writing


@dataclass(frozen=True, slots=True)
class RememberedAdapter:
    """One adapter of the file."""

    name: str
    path: str
    pinned: bool = False


class AdapterStateFile:
    """The adapters in the file, which a thread rewrites at each change.

    Writing waits for the disk, which the engine's thread must not do.
    """

    def __init__(self, path: Path) -> None:
        """Read it, if it exists.

        Raises ``ConfigError`` if it is invalid, or its directory does not exist.
        """
        self._path = path
        self.on_written: Callable[[], None] = lambda: None  # must not block
        self._newest = self._written = b""
        self._is_writing = False  # whether the thread runs; it ends after the last change
        self._changed = threading.Condition()  # of these three
        if not path.parent.is_dir():
            raise ConfigError(f"--lora-state-file {path}: the directory {path.parent} does not exist")
        self._adapters = {one.name: one for one in _read(path)}

    @property
    def adapters(self) -> tuple[RememberedAdapter, ...]:
        """The adapters, in the order of their first load."""
        return tuple(self._adapters.values())

    @property
    def is_written(self) -> bool:
        """Whether the last change is in the file, or cannot be written."""
        return self._written is self._newest

    def close(self) -> None:
        """Return when the last change is in the file, or cannot be written. Idempotent."""
        with self._changed:
            self.on_written = lambda: None
            self._changed.wait_for(lambda: not self._is_writing, _CLOSE_TIMEOUT_S)

    def put(self, adapter: RememberedAdapter) -> None:
        """Store an adapter that was loaded or pinned, or that has another path."""
        if self._adapters.get(adapter.name) != adapter:
            self._adapters[adapter.name] = adapter
            self._write()

    def pin(self, name: str, *, is_pinned: bool) -> None:
        known = self._adapters.get(name)
        if known is not None:
            self.put(RememberedAdapter(name, known.path, is_pinned))

    def remove(self, name: str) -> None:
        """Remove an adapter that is not served any more."""
        if self._adapters.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        """Begin to write, unless a thread does. A failure is only logged: adapters are served."""
        adapters = [asdict(one) for one in self._adapters.values()]
        text = json.dumps({"version": _VERSION, "adapters": adapters}, indent=1)
        with self._changed:
            self._newest = f"{text}\n".encode()
            if self._is_writing:
                return
            self._is_writing = True
        try:
            FILES.begin(lambda _: self._write_until_newest(), str(self._path))
        except OSError as error:
            self._end_write(self._newest, error)

    def _write_until_newest(self) -> None:
        """Write until the last change is written. Called by the thread."""
        is_newest = False
        while not is_newest:
            data = self._newest
            failure: OSError | None = None
            try:
                FILES.call(partial(self._write_whole, data), str(self._path))
            except OSError as error:
                failure = error
            is_newest = self._end_write(data, failure)

    def _write_whole(self, data: bytes, _: Place) -> None:
        write_whole(self._path, data)

    def _end_write(self, data: bytes, failure: OSError | None) -> bool:
        """Note the end of a write; return whether ``data`` is the last change."""
        if failure is not None:
            _LOG.error(
                "--lora-state-file %s cannot be written; the next start will miss the last change: %s",
                self._path,
                failure.strerror or failure,
            )
        with self._changed:
            self._written = data
            is_newest = data is self._newest
            self._is_writing = not is_newest
            self._changed.notify_all()
            self.on_written()
        return is_newest


def _read(path: Path) -> list[RememberedAdapter]:
    try:
        data = path.read_bytes()
        if not data.strip(b"\0 \t\r\n"):  # as a power cut leaves a file that was just made
            _LOG.warning(
                "--lora-state-file %s is empty: adapters that were loaded over HTTP before are not "
                "served until they are loaded again",
                path,
            )
            return []
        found = json.loads(data)
        if found["version"] != _VERSION:
            raise ValueError(f"it has version {found['version']}, this corun reads version {_VERSION}")
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
