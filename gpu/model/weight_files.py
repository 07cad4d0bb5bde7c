"""Reads the weight files of a base model, by tensor and in parts."""

import hashlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from ...runtime.errors import ModelError
from .source import ModelSource

_DIGESTED_AT_ONCE = 64 << 20

FileStamp = tuple[str, int, int, int]  # path, inode, bytes, time of the last change in ns


class WeightFiles:
    """The *.safetensors of one model, by the names of their tensors.

    A file is mapped only while a part of it is being read, so read data is not held.
    """

    def __init__(self, source: ModelSource) -> None:
        """Find the files and read their headers. Raises ``ModelError``."""
        _check_directory(source)
        try:
            self._paths = _find(source)
            self._of: dict[str, tuple[Path, tuple[int, ...], str]] = {}
            for path in self._paths:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - it is no mapping
                        part = file.get_slice(name)
                        self._of[name] = path, tuple(part.get_shape()), part.get_dtype()
        except Exception as error:  # any error of the files
            raise ModelError(f"cannot load {source.path!r}: {type(error).__name__}: {error}") from error

    @property
    def names(self) -> Collection[str]:
        return self._of.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if there is none of this name."""
        return self._of[name][1] if name in self._of else None

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, named as in safetensors: for example BF16 or I8."""
        return self._of[name][2]

    def read(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        """``rows`` of a tensor, or a single number, in their own memory. Raises ``ModelError``."""
        path, shape, _ = self._of[name]
        try:
            with safe_open(path, framework="pt") as file:
                part: torch.Tensor = file.get_slice(name)[rows] if shape else file.get_tensor(name)
                return part.clone()
        except Exception as error:  # any error of the files
            raise ModelError(f"cannot read {name} of {path}: {error}") from error

    @contextmanager
    def lazily(self, names: Collection[str]) -> Iterator[dict[str, Any]]:
        """A mapping from which transformers loads ``names``, tensor by tensor, while it is open."""
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in {self._of[name][0] for name in names}
            }
            yield {name: files[self._of[name][0]].get_slice(name) for name in names}

    def stamps(self) -> tuple[FileStamp, ...]:
        """Stamps that change when a file is written. Raises ``ModelError``."""
        try:
            found = [(path, path.stat()) for path in self._paths]
        except OSError as error:
            raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
        # Unlike the modification time, this time cannot be set back.
        return tuple((str(path), stat.st_ino, stat.st_size, stat.st_ctime_ns) for path, stat in found)

    def digest(self, num_threads: int) -> str:
        """SHA-256 of the digests of all bytes in parts, independent of file names: hexadecimal."""
        parts = [
            (path, start)
            for path in self._paths
            for start in range(0, path.stat().st_size, _DIGESTED_AT_ONCE)
        ]
        with ThreadPoolExecutor(num_threads, "corun-digests") as threads:
            return hashlib.sha256(b"".join(threads.map(_digest_of, parts))).hexdigest()


def _digest_of(part: tuple[Path, int]) -> bytes:
    """The digest of ``_DIGESTED_AT_ONCE`` bytes of a file from a position on, or of fewer at its end."""
    path, start = part
    digest, left = hashlib.sha256(), _DIGESTED_AT_ONCE
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num := file.readinto(buffer[:left]):
            digest.update(buffer[:num])
            left -= num
    return digest.digest()


def _check_directory(source: ModelSource) -> None:
    """Refuse pickled weights by name: loading them can execute code."""
    directory = Path(source.path)
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        pickled = sorted(file.name for file in directory.glob("*.bin"))
        found = f", only {pickled[0]}, which corun does not load" if pickled else ""
        raise ModelError(
            f"{source.path!r} holds no weights in *.safetensors{found}; save the model again with "
            "transformers' save_pretrained"
        )


def _find(source: ModelSource) -> list[Path]:
    """One file, or the shards of an index; for a hub model its cached ones."""
    try:
        single = cached_file(source.path, SAFE_WEIGHTS_NAME, revision=source.revision)
    except OSError:
        index = cached_file(source.path, SAFE_WEIGHTS_INDEX_NAME, revision=source.revision)
        shards, _ = get_checkpoint_shard_files(source.path, index, revision=source.revision)
        return sorted(Path(shard).resolve() for shard in shards)
    return [Path(single).resolve()]
