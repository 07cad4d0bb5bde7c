"""Reads adapter_model.safetensors of a PEFT directory, and digests what an adapter computes.

Files are read and never memory-mapped: a file that is truncated while it is in use must be an
error, not a signal that kills the process. Knows nothing of modules or kernels.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from ..errors import AdapterError
from .lora_spec import LoraSpec
from .resolved import RawTensor

WEIGHTS_NAME = "adapter_model.safetensors"

_PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_INDEX_NAME = "adapter_model.safetensors.index.json"
_HEADER_SLACK_BYTES = 16 << 20  # names, shapes and metadata of the largest adapters stay below


def read_checkpoint(directory: Path, *, max_tensor_bytes: int) -> tuple[RawTensor, ...]:
    """Read all tensors of ``directory``/adapter_model.safetensors, in the order of their names.

    ``max_tensor_bytes`` is the most that an adapter of this model can hold; a larger file is
    refused before it is read. Raises ``AdapterError`` naming the file.
    """
    path = directory / WEIGHTS_NAME
    _check_format(directory, path)
    raw = _read_bytes(path, max_tensor_bytes + _HEADER_SLACK_BYTES)
    try:
        entries = deserialize(raw)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AdapterError(f"{path} ({len(raw)} bytes) is truncated or damaged: {error}") from error
    if not entries:
        raise AdapterError(f"{path} holds no tensors")
    return tuple(sorted((_raw_tensor(entry) for entry in entries), key=lambda raw: raw.name))


def content_digest(spec: LoraSpec, tensors: Sequence[RawTensor]) -> str:
    """Hexadecimal SHA-256 of what the adapter computes: configuration and tensors.

    The same content has the same digest in any directory; a field that changes nothing in the
    result (the base model's name, dropout, PEFT's version) does not enter.
    """
    digest = hashlib.sha256()
    _add_part(digest, json.dumps(spec.effective_fields(), sort_keys=True).encode())
    for tensor in sorted(tensors, key=lambda raw: raw.name):
        _add_part(digest, json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        _add_part(digest, tensor.data)
    return digest.hexdigest()


def _add_part(digest: Any, part: bytes | memoryview) -> None:
    """Add a part with its length, so that no two sequences of parts are the same bytes."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _raw_tensor(entry: tuple[str, dict[str, Any]]) -> RawTensor:
    name, fields = entry
    data = fields["data"]
    return RawTensor(
        name=name,
        dtype=str(fields["dtype"]),
        shape=tuple(fields["shape"]),
        data=memoryview(data if isinstance(data, bytearray) else bytearray(data)),
    )


def _check_format(directory: Path, path: Path) -> None:
    if path.is_file():
        return
    for name in _PICKLE_NAMES:
        if (directory / name).exists():
            raise AdapterError(
                f"{directory / name} is refused: pickle files can run code when they are read; "
                f"save the adapter as {WEIGHTS_NAME} (PEFT's default)"
            )
    if (directory / _INDEX_NAME).exists():
        raise AdapterError(
            f"{directory / _INDEX_NAME} is refused: adapters in several files are not served; "
            f"save the adapter as one {WEIGHTS_NAME}"
        )
    raise AdapterError(f"{directory} holds no {WEIGHTS_NAME}")


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a file whose size does not change meanwhile."""
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > max_bytes:
                raise AdapterError(
                    f"{path} has {num_bytes} bytes, more than the {max_bytes} that an adapter of "
                    "this model can have within --max-lora-rank"
                )
            raw = file.read(num_bytes + 1)
            num_bytes_after = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) != num_bytes or num_bytes_after != num_bytes:
        raise AdapterError(
            f"{path} changed while it was read ({num_bytes} bytes, then {num_bytes_after}); "
            "load it again once it is written"
        )
    return raw
