"""Copies and checks an adapter's files for a store, and computes their digest.

All functions block; call them in threads.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from ...adapters.checkpoint import WEIGHTS_NAME, Checkpoint
from ...adapters.conventions import CONVENTION_NAMES
from ...adapters.folder_files import OWN_FILES, AdapterRoots, open_file
from ...adapters.peft_config import CONFIG_NAME, read_peft_config
from ...adapters.tensor_names import parse_tensor_name
from ...errors import AdapterError
from ...file_calls import FILES, Place
from ...server.errors import HttpError
from ..wire import Manifest, StoredFile

ADAPTER_FILES = (CONFIG_NAME, WEIGHTS_NAME, *CONVENTION_NAMES)
"""All that corun reads of an adapter's directory."""

MANIFEST_NAME = "manifest.json"  # not an adapter file
CHUNK_BYTES = 1 << 20

Write = Callable[[bytes | memoryview], None]


class StoreFullError(HttpError):
    """The store cannot hold the files: the disk or --adapter-cache-gib is full."""

    def __init__(self, message: str) -> None:
        super().__init__(507, message, code="store_full")


def digest_of(files: Iterable[StoredFile]) -> str:
    """Return an adapter's digest: SHA-256 over the names, sizes and digests of its files.

    So a manifest from any peer cannot claim a digest that its files do not have.
    """
    rows = sorted((one.name, one.num_bytes, one.sha256) for one in files)
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


def rank_of(directory: Path, roots: AdapterRoots = OWN_FILES) -> int:
    """Check configuration and tensors without the model; return the largest rank.

    The engine checks whether they fit the model. ``roots``: where links may lead. Raises
    ``AdapterError``.
    """
    spec = read_peft_config(directory, roots)
    num_bytes = _size_of(directory, WEIGHTS_NAME)  # reading raises if there is none
    with Checkpoint(directory, max_tensor_bytes=num_bytes, roots=roots) as checkpoint:
        ranks = [
            tensor.shape[0]
            for tensor in checkpoint.tensors
            if (name := parse_tensor_name(tensor.name)) and name.matrix == "A" and tensor.shape
        ]
    return max(ranks, default=spec.r)


def num_bytes_of(directory: Path) -> int:
    """Return the total size of an adapter's files."""
    return sum(_size_of(directory, name) for name in ADAPTER_FILES)


def _size_of(directory: Path, name: str) -> int:
    """Return the size of a file; 0 if it is absent or unreadable, which reading it reports."""
    try:
        return FILES.call(lambda _: (directory / name).stat().st_size, str(directory))
    except OSError:
        return 0


def copy_adapter(source: Path, target: Path, roots: AdapterRoots = OWN_FILES) -> Manifest:
    """Copy the files of ``source`` that corun reads into the empty directory ``target``.

    Symbolic links are followed as far as ``roots`` permit.

    Raises:
        AdapterError: A file cannot be read, is no regular file, or changed meanwhile.
        StoreFullError: The disk is full.
    """
    files = []
    for name in ADAPTER_FILES:
        # Files that are required were checked before.
        with new_file(target / name) as write:
            stored = _read_all(source, name, roots, write)
        if stored is None:
            (target / name).unlink()
        else:
            files.append(stored)
    return write_manifest(target, files)


def describe(directory: Path, roots: AdapterRoots = OWN_FILES) -> Manifest:
    """Return the manifest of ``directory``; reads all files.

    Raises ``AdapterError`` if a file cannot be read.
    """
    found = (_read_all(directory, name, roots, _drop) for name in ADAPTER_FILES)
    files = [one for one in found if one is not None]
    return Manifest(digest=digest_of(files), files=tuple(files))


def write_manifest(directory: Path, files: list[StoredFile]) -> Manifest:
    """Write the manifest of ``directory``, and return it."""
    manifest = Manifest(digest=digest_of(files), files=tuple(files))
    with new_file(directory / MANIFEST_NAME) as write:
        write(msgspec.json.encode(manifest))
    return manifest


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of ``directory``; None if names or sizes do not match it."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
        sizes = [(directory / one.name).stat().st_size for one in manifest.files]
    except (OSError, msgspec.DecodeError):
        return None
    is_right = (
        is_wellformed(manifest)
        and manifest.digest == directory.name
        and sizes == [one.num_bytes for one in manifest.files]
    )
    return manifest if is_right else None


def is_wellformed(manifest: Manifest) -> bool:
    """Return whether a manifest is of an adapter and its digest matches its files."""
    names = [one.name for one in manifest.files]
    return (
        set(names) <= set(ADAPTER_FILES)
        and len(set(names)) == len(names)
        and {CONFIG_NAME, WEIGHTS_NAME} <= set(names)
        and all(one.num_bytes >= 0 for one in manifest.files)
        and digest_of(manifest.files) == manifest.digest
    )


def holds(directory: Path, manifest: Manifest) -> bool:
    """Return whether the files match the digests of ``manifest``; reads all files."""
    try:
        return all(_read_all(directory, one.name, OWN_FILES, _drop) == one for one in manifest.files)
    except AdapterError:
        return False


@contextmanager
def new_file(path: Path) -> Iterator[Write]:
    """Open a new file; yield its write function. Raises ``StoreFullError`` on a full disk."""
    try:
        file = path.open("xb", buffering=0)
    except OSError as error:
        raise _no_room(path, error) from None

    def write(data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(file.fileno(), view) :]
        except OSError as error:
            raise _no_room(path, error) from None

    with file:
        yield write


def _no_room(path: Path, error: OSError) -> StoreFullError:
    return StoreFullError(f"cannot write {path} (--state-dir): {error.strerror}")


def _drop(_: bytes | memoryview) -> None:
    """Write nothing."""


def _read_all(folder: Path, name: str, roots: AdapterRoots, write: Write) -> StoredFile | None:
    """Pass all of a file to ``write``, and describe it; None if there is no file.

    Raises ``AdapterError`` if it cannot be read, or changes meanwhile.
    """
    try:
        with open_file(folder, name, roots) as file:
            return _pass_on(file.fileno(), folder, name, write)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AdapterError(f"cannot read {folder / name}: {error.strerror}") from None


def _pass_on(descriptor: int, folder: Path, name: str, write: Write) -> StoredFile:
    where = str(folder)
    before = FILES.call(lambda _: os.fstat(descriptor), where)
    sha256, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    num_bytes = 0
    while True:
        num_read = FILES.call(partial(_read_into, descriptor, buffer), where)
        num_bytes += num_read
        if num_read == 0 or num_bytes > before.st_size:
            break
        sha256.update(buffer[:num_read])
        write(buffer[:num_read])
    after = FILES.call(lambda _: os.fstat(descriptor), where)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns) or (
        num_bytes != before.st_size
    ):
        raise AdapterError(f"{folder / name} changed while it was read; load it again once it is written")
    return StoredFile(name=name, num_bytes=num_bytes, sha256=sha256.hexdigest())


def _read_into(descriptor: int, buffer: memoryview, _: Place) -> int:
    return os.readv(descriptor, [buffer])
