"""KV namespaces: hashes of everything that shapes KV values."""

import hashlib
import struct
from collections.abc import Iterable


def kv_namespace(
    base_fingerprint: str, dtype: str, adapters: tuple[tuple[str, float], ...], cache_salt: str
) -> bytes:
    """Return the SHA-256 of a request's KV namespace, 32 bytes.

    ``base_fingerprint`` names the base model and its revision, ``adapters`` is the ordered list of
    (digest of configuration and tensors, scale). Two requests may share KV only if this is equal.
    Every field is preceded by its length, so no two different inputs are encoded alike.
    """
    parts = [base_fingerprint.encode(), dtype.encode(), cache_salt.encode()]
    for digest, scale in adapters:
        parts += [digest.encode(), struct.pack(">d", scale)]
    return hashlib.sha256(_length_prefixed(parts)).digest()


def _length_prefixed(parts: Iterable[bytes]) -> bytes:
    """Join ``parts``, each behind its length, so that no two lists give equal bytes."""
    return b"".join(struct.pack(">Q", len(part)) + part for part in parts)
