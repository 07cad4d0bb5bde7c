"""Keeps what transformers finds in the folder of its models, which takes it half a second.

While it is imported, transformers reads the sources of all its models, twice, to learn which names
they define. What it finds is a function of these files. So it is kept in the user's cache, with
their sizes and times of change, and taken from there while these are the same. If transformers
has no such function, or the cache cannot be used, it reads its files as ever.
"""

import functools
import hashlib
import logging
import marshal
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .amend import amend_when_imported

_LOG = logging.getLogger(__name__)

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "create_import_structure_from_path"
_HASH_BYTES = hashlib.sha256().digest_size

# Of a folder, or of a file in it; what it returns belongs to the caller.
Scan = Callable[[str | Path], Any]


def keep_model_index(environment: Mapping[str, str] = os.environ) -> None:
    """Let a later import of transformers in this process use the cache, and fill it."""
    if "transformers" not in sys.modules:
        amend_when_imported(_MODULE, functools.partial(_amend, _cache_directory(environment)))


def _cache_directory(environment: Mapping[str, str]) -> Path:
    """Where this user's caches lie. Source: XDG base directory specification."""
    cache = environment.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(cache) if cache.startswith("/") else Path("~/.cache")) / "corun"


class KeptScan:
    """Stands for ``scan``: what that finds in ``folder`` is kept in a file of ``cache``."""

    def __init__(self, scan: Scan, source: Path, folder: Path, cache: Path) -> None:
        """``source``: of the scan. ``folder``: with all below it. ``cache`` may begin with ~."""
        self._scan = scan
        self._source = source
        self._folder = folder
        self._cache = cache
        self._name = f"models-{hashlib.sha256(bytes(folder)).hexdigest()[:16]}"
        self._key: bytes | None = None  # of the files
        self._content: bytes | None = None

    def __call__(self, module_path: str | Path) -> Any:
        """Return what ``scan`` returns."""
        path = Path(module_path)
        if path not in (self._folder, self._folder / "__init__.py"):
            return self._scan(module_path)
        found = self._kept()
        if found is None:
            found = self._scan(module_path)
            self._keep(found)
        return found

    def _kept(self) -> Any:
        try:
            if self._key is None:
                self._key = _key_of(self._source, self._folder)
                self._content = self._read(self._key)
            # Copies, because callers may change what they get.
            return None if self._content is None else marshal.loads(self._content)  # noqa: S302 -- our own
        except (OSError, RuntimeError, ValueError, EOFError, TypeError) as error:
            _LOG.info("what transformers finds among its models is not cached: %s", error)
            return None

    def _keep(self, found: Any) -> None:
        if self._key is None:  # the files cannot be told
            return
        try:
            self._content = marshal.dumps(found)
            self._write(self._key, self._content)
        except (OSError, RuntimeError, ValueError) as error:
            _LOG.info("what transformers finds among its models is not cached: %s", error)

    def _read(self, key: bytes) -> bytes | None:
        path = self._cache.expanduser() / self._name
        kept = path.read_bytes() if path.exists() else b""
        content = kept[2 * _HASH_BYTES :]
        return content if kept[: 2 * _HASH_BYTES] == key + _hash(content) else None

    def _write(self, key: bytes, content: bytes) -> None:
        directory = self._cache.expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(key + _hash(content) + content)
        Path(file.name).replace(directory / self._name)  # whole, for who reads it meanwhile


def _key_of(source: Path, folder: Path) -> bytes:
    """Changes with any of the files, and with the interpreter, whose format is used."""
    files = [_describe(str(source), source.stat()), *sorted(_files(str(folder)))]
    return _hash("\n".join([sys.version, *files]).encode())


def _files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield entry.path
                    yield from _files(entry.path)
            else:
                yield _describe(entry.path, entry.stat())


def _describe(path: str, state: os.stat_result) -> str:
    return f"{path} {state.st_size} {state.st_mtime_ns}"


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _amend(cache: Path, module: ModuleType) -> None:
    scan = getattr(module, _FUNCTION, None)
    if not callable(scan) or module.__file__ is None:
        _LOG.info("%s has no %s: what it finds is not cached", _MODULE, _FUNCTION)
        return
    source = Path(module.__file__)
    setattr(module, _FUNCTION, KeptScan(scan, source, source.parents[1] / "models", cache))
