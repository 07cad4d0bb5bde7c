"""The digest of an adapter's content, in parts that become known one after the other.

One part covers the configuration and the header of the tensors; one part covers the values of each
layer. So each layer can be verified as soon as it has been read, and be used before the next one
is read. Plain data and hashing; knows no files.
"""

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Self

PART_HEAD_BYTES = 8

TensorKind = tuple[str, str, tuple[int, ...]]  # name, type, shape


@dataclass(frozen=True)
class ContentDigest:
    """SHA-256 of each part.

    The same content has the same digest in any directory; fields that do not change results (the
    base model's name, dropout, PEFT's version) are not included.
    """

    head: bytes  # configuration; names, types and shapes of all tensors
    layers: tuple[bytes, ...]  # values, by layer, ascending
    parts: tuple["ContentDigest", ...] = ()  # of the adapters of a mix, which has no layers here
    # Tokens with rows of saved weights that differ from the base's: spans, by path of the module.
    kept: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()

    @cached_property
    def hexadecimal(self) -> str:
        """One digest of all parts, which identifies the content."""
        parts = (bytes.fromhex(part.hexadecimal) for part in self.parts)
        kept = [json.dumps(self.kept).encode()] if self.kept else []
        return _digest_of((self.head, *self.layers, *kept, *parts)).hex()


def digest_head(configuration: Mapping[str, object], tensors: Iterable[TensorKind]) -> bytes:
    """Return the part that is known before any value is read."""
    parts = (json.dumps(configuration, sort_keys=True), json.dumps(sorted(tensors)))
    return _digest_of(part.encode() for part in parts)


class LayerDigest:
    """Computes the part of one layer while its values are read."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, parts: memoryview) -> None:
        """Add tensors' bytes, each behind its ``part_head``, in the order of their names."""
        self._digest.update(parts)

    def digest(self) -> bytes:
        return self._digest.digest()


class LateDigests:
    """The parts of all layers, computed once their bytes have been used. A context manager.

    To hash bytes takes several times as long as to read them from the page cache. So the bytes are
    kept, and are hashed at the end or when they fill the memory.
    """

    def __init__(self, num_layers: int) -> None:
        self._layers = [LayerDigest() for _ in range(num_layers)]
        self._unhashed: list[tuple[LayerDigest, memoryview]] = []
        self._memory = _take_memory()
        self._end = 0  # of what is in use

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for bytes to ``add``. It is not used again before the next call."""
        if self._end + num_bytes > self._memory.nbytes:
            self._hash()
        if num_bytes > self._memory.nbytes:
            self._end = self._memory.nbytes
            return memoryview(bytearray(num_bytes))
        start, self._end = self._end, self._end + num_bytes
        return self._memory[start : self._end]

    def add(self, number: int, parts: memoryview) -> None:
        """Add to layer ``number`` what ``LayerDigest.add`` takes; it must stay as it is."""
        self._unhashed.append((self._layers[number], parts))

    def digests(self) -> list[bytes]:
        self._hash()
        return [layer.digest() for layer in self._layers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._unhashed.clear()
        if not _spare_memory:
            _spare_memory.append(self._memory)

    def _hash(self) -> None:
        for layer, parts in self._unhashed:
            layer.add(parts)
        self._unhashed.clear()
        self._end = 0


_KEPT_BYTES = 32 << 20
# Of an earlier use, at most one: fresh pages would take longer than reading to them.
_spare_memory: list[memoryview] = []


def _take_memory() -> memoryview:
    try:
        return _spare_memory.pop()
    except IndexError:
        mapping = mmap.mmap(-1, _KEPT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel has no huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def _digest_of(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        _add_part(digest, part)
    return digest.digest()


def part_head(num_bytes: int) -> bytes:
    """Return what precedes a part, so that no two sequences of parts are the same bytes."""
    return num_bytes.to_bytes(PART_HEAD_BYTES, "little")


def _add_part(digest: "hashlib._Hash", part: bytes) -> None:
    digest.update(part_head(len(part)))
    digest.update(part)
