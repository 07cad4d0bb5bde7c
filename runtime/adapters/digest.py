"""The digest of what an adapter computes, in parts that are known one after the other.

One part is of the configuration and of what the tensors are, and known from the file's header; one
is of each layer's values. So each layer can be held to what was registered as soon as it has been
read, and be used before the next one is. Plain data and hashing; knows no files.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

TensorKind = tuple[str, str, tuple[int, ...]]  # name, type, shape


@dataclass(frozen=True)
class ContentDigest:
    """SHA-256 of each part.

    The same content has the same digest in any directory; a field that changes nothing in the
    result (the base model's name, dropout, PEFT's version) does not enter.
    """

    head: bytes  # configuration; names, types and shapes of all tensors
    layers: tuple[bytes, ...]  # values, by layer, ascending

    @cached_property
    def hexadecimal(self) -> str:
        """One digest of all parts, which names the content."""
        return _digest_of((self.head, *self.layers)).hex()


def digest_head(configuration: Mapping[str, object], tensors: Iterable[TensorKind]) -> bytes:
    """The part that is known before any value has been read."""
    parts = (json.dumps(configuration, sort_keys=True), json.dumps(sorted(tensors)))
    return _digest_of(part.encode() for part in parts)


class LayerDigest:
    """The part of one layer's values, while they are read."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, data: memoryview) -> None:
        """Go on with a tensor's bytes; a layer's tensors must come in the order of their names."""
        _add_part(self._digest, data)

    def digest(self) -> bytes:
        """The digest of all that was added."""
        return self._digest.digest()


def _digest_of(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        _add_part(digest, part)
    return digest.digest()


def _add_part(digest: "hashlib._Hash", part: bytes | memoryview) -> None:
    """Add a part with its length, so that no two sequences of parts are the same bytes."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
