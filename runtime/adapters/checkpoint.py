"""Reads adapter_model.safetensors of a PEFT directory, and digests what an adapter computes.

Files are read and never memory-mapped: a file that is truncated while it is in use must be an
error, not a signal that kills the process. Tensors are read one by one, so that the largest of
them is all that is held beside their destination. Knows nothing of modules or kernels.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from ..errors import AdapterError
from .lora_spec import LoraSpec
from .resolved import RawTensor
from .safetensors_header import LENGTH_BYTES, HeaderError, parse_header

WEIGHTS_NAME = "adapter_model.safetensors"

_PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_INDEX_NAME = "adapter_model.safetensors.index.json"
_HEADER_SLACK_BYTES = 16 << 20  # names, shapes and metadata of the largest adapters stay below


class Checkpoint:
    """An open file of tensors, whose header has been read and checked. A context manager."""

    def __init__(self, directory: Path, *, max_tensor_bytes: int) -> None:
        """Open ``directory``/adapter_model.safetensors.

        ``max_tensor_bytes`` is the most that an adapter of this model can hold; a larger file is
        refused before it is read. Raises ``AdapterError`` naming the file.
        """
        self.path = directory / WEIGHTS_NAME
        _check_format(directory, self.path)
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._open(max_tensor_bytes)
        except BaseException:
            self._file.close()
            raise

    def read(self) -> Iterator[tuple[RawTensor, memoryview]]:
        """Yield every tensor with its bytes, in the order of the names.

        The bytes are writable and valid until the next tensor. Raises ``AdapterError`` if the
        file has changed since it was opened; so the last bytes count only once this has ended.
        """
        buffer = memoryview(bytearray(max(tensor.num_bytes for tensor in self.tensors)))
        for tensor in self.tensors:
            part = buffer[: tensor.num_bytes]
            self._read_into(part, self._data_start + tensor.start)
            yield tensor, part
        self._check_unchanged()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, max_tensor_bytes: int) -> None:
        self._stamp = self._read_stamp()
        num_bytes, max_bytes = self._stamp[0], max_tensor_bytes + _HEADER_SLACK_BYTES
        if num_bytes > max_bytes:
            raise AdapterError(
                f"{self.path} has {num_bytes} bytes, more than the {max_bytes} that an adapter of "
                "this model can have within --max-lora-rank"
            )
        try:
            self.tensors = self._read_header(num_bytes)
        except HeaderError as error:
            raise AdapterError(
                f"{self.path} ({num_bytes} bytes) is truncated or damaged: {error}"
            ) from error
        if not self.tensors:
            raise AdapterError(f"{self.path} holds no tensors")

    def _read_header(self, num_bytes: int) -> tuple[RawTensor, ...]:
        """Read the header of a file of this size. Raises ``HeaderError``."""
        length = bytearray(LENGTH_BYTES)
        if num_bytes < LENGTH_BYTES:
            raise HeaderError("it ends before its header")
        self._read_into(memoryview(length), 0)
        header_bytes = int.from_bytes(length, "little")
        self._data_start = LENGTH_BYTES + header_bytes
        if self._data_start > num_bytes:
            raise HeaderError(f"its header should have {header_bytes} bytes")
        header = bytearray(header_bytes)
        self._read_into(memoryview(header), LENGTH_BYTES)
        return parse_header(bytes(header), num_bytes - self._data_start)

    def _read_into(self, part: memoryview, position: int) -> None:
        """Read the bytes from ``position`` on, as many as ``part`` has."""
        num_read = 0
        while num_read < part.nbytes:
            try:
                num = os.preadv(self._file.fileno(), [part[num_read:]], position + num_read)
            except OSError as error:
                raise self._unreadable(error) from error
            if num == 0:
                self._check_unchanged()
                raise self._changed(f"it ends before byte {position + part.nbytes}")
            num_read += num

    def _check_unchanged(self) -> None:
        """Whoever writes the file now may have mixed two adapters."""
        before, after = self._stamp, self._read_stamp()
        if after != before:
            raise self._changed(f"{before[0]} bytes, then {after[0]}")

    def _read_stamp(self) -> tuple[int, int]:
        try:
            status = os.fstat(self._file.fileno())
        except OSError as error:
            raise self._unreadable(error) from error
        return status.st_size, status.st_mtime_ns

    def _changed(self, how: str) -> AdapterError:
        return AdapterError(
            f"{self.path} changed while it was read ({how}); load it again once it is written"
        )

    def _unreadable(self, error: OSError) -> AdapterError:
        return AdapterError(f"cannot read {self.path}: {error.strerror or error}")


class ContentDigest:
    """Hexadecimal SHA-256 of what an adapter computes: configuration and tensors.

    The same content has the same digest in any directory; a field that changes nothing in the
    result (the base model's name, dropout, PEFT's version) does not enter.
    """

    def __init__(self, spec: LoraSpec) -> None:
        """Begin with the configuration."""
        self._digest = hashlib.sha256()
        self._add_part(json.dumps(spec.effective_fields(), sort_keys=True).encode())

    def add(self, tensor: RawTensor, data: memoryview) -> None:
        """Go on with a tensor; they must come in the order of their names."""
        self._add_part(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        self._add_part(data)

    def hexdigest(self) -> str:
        """The digest of all that was added."""
        return self._digest.hexdigest()

    def _add_part(self, part: bytes | memoryview) -> None:
        """Add a part with its length, so that no two sequences of parts are the same bytes."""
        self._digest.update(len(part).to_bytes(8, "little"))
        self._digest.update(part)


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
