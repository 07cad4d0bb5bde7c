"""Reads adapter_model.safetensors of a PEFT directory, tensor by tensor in any order.

Files are read, not memory-mapped: truncation of a file in use must be an error, not a signal that
kills the process. Tensors are read one by one, so that at most one of them is in memory beside its
destination. Knows nothing of modules or kernels.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from ..errors import AdapterError
from .peft_config import GGUF_REASON, GGUF_SUFFIX
from .resolved import RawTensor
from .safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    HeaderError,
    header_length,
    parse_header,
)

WEIGHTS_NAME = "adapter_model.safetensors"

_PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_INDEX_NAME = "adapter_model.safetensors.index.json"
_PART_BYTES = 16 << 20  # for tensors that are not needed as a whole


class Checkpoint:
    """An open file of tensors with a checked header. A context manager."""

    def __init__(self, directory: Path, *, max_tensor_bytes: int) -> None:
        """Open ``directory``/adapter_model.safetensors.

        ``max_tensor_bytes``: the largest size of an adapter of this model; a larger file is refused
        before it is read. Raises ``AdapterError`` naming the file.
        """
        self.path = directory / WEIGHTS_NAME
        self._buffer = memoryview(bytearray())
        try:
            _check_format(directory, self.path)
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._open(max_tensor_bytes)
        except BaseException:
            self._file.close()
            raise

    def read(self, tensors: Iterable[RawTensor]) -> Iterator[tuple[RawTensor, memoryview]]:
        """Yield ``tensors`` of this file with their bytes.

        The bytes are writable and valid until the next tensor. Raises ``AdapterError`` if they
        cannot be read. ``check_unchanged`` checks that they all are of one content.
        """
        for tensor in tensors:
            part = self._room(tensor.num_bytes)
            self._read_into(part, self._data_start + tensor.start)
            yield tensor, part

    def read_rows(self, tensor: RawTensor) -> Iterator[memoryview]:
        """Yield the bytes of one tensor, a few whole rows at a time, as ``read`` does."""
        row_bytes = tensor.num_bytes // max(1, tensor.shape[0])
        step = max(1, _PART_BYTES // max(1, row_bytes)) * row_bytes
        for start in range(0, tensor.num_bytes, max(1, step)):
            part = self._room(min(step, tensor.num_bytes - start))
            self._read_into(part, self._data_start + tensor.start + start)
            yield part

    def check_unchanged(self) -> None:
        """Raise ``AdapterError`` if the file was written since it was opened.

        Tensors read before may then belong to two different contents.
        """
        before, after = self._stamp, self._read_stamp()
        if after != before:
            raise self._changed(f"{before[0]} bytes, then {after[0]}")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, max_tensor_bytes: int) -> None:
        self._stamp = self._read_stamp()
        num_bytes, max_bytes = self._stamp[0], max_tensor_bytes + MAX_HEADER_BYTES
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

    def _room(self, num_bytes: int) -> memoryview:
        """Return the buffer to read to, the same each time."""
        if self._buffer.nbytes < num_bytes:
            self._buffer = memoryview(bytearray(num_bytes))
        return self._buffer[:num_bytes]

    def _read_header(self, num_bytes: int) -> tuple[RawTensor, ...]:
        """Read the header of a file of this size. Raises ``HeaderError``."""
        length = bytearray(min(LENGTH_BYTES, num_bytes))
        self._read_into(memoryview(length), 0)
        header = bytearray(header_length(bytes(length), num_bytes))
        self._data_start = LENGTH_BYTES + len(header)
        self._read_into(memoryview(header), LENGTH_BYTES)
        return parse_header(bytes(header), num_bytes - self._data_start)

    def _read_into(self, part: memoryview, position: int) -> None:
        num_read = 0
        while num_read < part.nbytes:
            try:
                num = os.preadv(self._file.fileno(), [part[num_read:]], position + num_read)
            except OSError as error:
                raise self._unreadable(error) from error
            if num == 0:
                self.check_unchanged()
                raise self._changed(f"it ends before byte {position + part.nbytes}")
            num_read += num

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


def is_complete(directory: Path) -> bool:
    """Whether the weights in ``directory`` are as long as their header says."""
    try:
        with (directory / WEIGHTS_NAME).open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header_bytes = header_length(file.read(LENGTH_BYTES), num_bytes)
            parse_header(file.read(header_bytes), num_bytes - LENGTH_BYTES - header_bytes)
    except (OSError, HeaderError):
        return False
    return True


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
    for file in sorted(directory.glob(f"*{GGUF_SUFFIX}")):
        raise AdapterError(f"{file} {GGUF_REASON}")
    raise AdapterError(f"{directory} holds no {WEIGHTS_NAME}")
