"""The digest of an adapter's content, in parts that become known one after the other.

One part covers the configuration and the header of the tensors; one part covers the values of each
layer. So each layer can be verified as soon as it has been read, and be used before the next one
is read. Plain data and hashing; knows no files.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

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
