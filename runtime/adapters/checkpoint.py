"""Reads adapter_model.safetensors of a PEFT directory, its tensors in any order.

Files are read, not memory-mapped: truncation of a file in use must be an error, not a signal that
kills the process. Small tensors that are adjacent in the file are read together, because each call
costs time of the interpreter. So at most one large tensor, or a few small ones, are in memory
beside their destination. Knows nothing of modules or kernels.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from io import BufferedReader, FileIO
from math import prod
from pathlib import Path
from typing import Any, Self

from ..errors import AdapterError
from ..file_calls import FILES
from .digest import PART_HEAD_BYTES, part_head
from .folder_files import OWN_FILES, AdapterRoots, NotRegularError, OutsideError, open_file
from .peft_config import GGUF_REASON, GGUF_SUFFIX
from .resolved import RawTensor, Stamp, StoredTensor

WEIGHTS_NAME = "adapter_model.safetensors"

_PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_INDEX_NAME = "adapter_model.safetensors.index.json"
_PART_BYTES = 16 << 20  # for tensors that are not needed as a whole
_CALL_BYTES = 4 << 20  # read in one call, which has a deadline
_BATCH_BYTES = 1 << 20  # of tensors that are read together: these stay in the cache
assert _BATCH_BYTES <= _CALL_BYTES, "one call reads a whole batch"
_MAX_BATCH = 512  # tensors; the kernel accepts 1024 parts
# Errors of file systems that cannot read without waiting.
_NO_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


LENGTH_BYTES = 8  # the header's length, little-endian, before the header
MAX_HEADER_BYTES = 16 << 20  # names, shapes and metadata of the largest adapters are shorter

_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
_METADATA = "__metadata__"
_MAX_NAME_CHARS = 1024
_MAX_DIMENSIONS = 8
_MAX_CHARS_SHOWN = 200
_MAX_KEPT = 32  # cached headers
_MAX_KEPT_BYTES = 1 << 20  # of each; longer ones are not cached


# Read separately from the tensors, so that their bytes can be read directly to their destination.
# As strict as the library: tensors cover the data without gaps or overlaps.
class HeaderError(ValueError):
    """The header is invalid; the message has the reason."""


def parse_header(header: bytes, data_bytes: int) -> tuple[RawTensor, ...]:
    """Return the tensors that ``header`` describes, in the order of their names.

    ``data_bytes``: number of bytes after the header. Headers are cached, as adapters with the same
    shapes share one. Raises ``HeaderError``.
    """
    parse = _parse_once if len(header) <= _MAX_KEPT_BYTES else _parse
    return parse(header, data_bytes)


def header_length(length: bytes, file_bytes: int) -> int:
    """Return the number of bytes of the header, from ``length``, the first bytes of the file.

    Raises ``HeaderError`` if a file of ``file_bytes`` has no such header, or if it is too long.
    """
    header_bytes = int.from_bytes(length, "little")
    if len(length) < LENGTH_BYTES:
        raise HeaderError("it ends before its header")
    if header_bytes > file_bytes - LENGTH_BYTES:
        raise HeaderError(f"its header should have {header_bytes} bytes")
    if header_bytes > MAX_HEADER_BYTES:
        raise HeaderError(f"its header has {header_bytes} bytes, more than {MAX_HEADER_BYTES}")
    return header_bytes


def _parse(header: bytes, data_bytes: int) -> tuple[RawTensor, ...]:
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"its header is not valid: {error}") from error
    if not isinstance(entries, dict):
        raise HeaderError("its header is not a JSON object")
    entries.pop(_METADATA, None)
    tensors = [_tensor(name, fields) for name, fields in entries.items()]
    _check_cover(tensors, data_bytes)
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


_parse_once = lru_cache(_MAX_KEPT)(_parse)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise HeaderError("a name occurs twice in its header")
    return entries


def _tensor(name: str, fields: Any) -> RawTensor:
    if len(name) > _MAX_NAME_CHARS:
        raise HeaderError(f"{_shown(name)} has a name of {len(name)} characters")
    if not isinstance(fields, dict):
        raise HeaderError(f"the entry of {name} is not an object")
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise HeaderError(f"{name} has the unknown type {_shown(dtype)}")
    item_bytes = _ITEM_BYTES[dtype]
    shape, offsets = _sizes(name, fields, "shape"), _sizes(name, fields, "data_offsets")
    if len(shape) > _MAX_DIMENSIONS:  # the product of very many sizes takes very long
        raise HeaderError(f"{name} has {len(shape)} dimensions, more than {_MAX_DIMENSIONS}")
    if len(offsets) != 2:
        raise HeaderError(f"{name} has {len(offsets)} offsets")
    begin, end = offsets
    if end - begin != item_bytes * prod(shape):
        raise HeaderError(f"{name} has {end - begin} bytes for shape {list(shape)} of {dtype}")
    return RawTensor(name, dtype, shape, begin, end - begin)


def _sizes(name: str, fields: dict[str, Any], key: str) -> tuple[int, ...]:
    values = fields.get(key)
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise HeaderError(f"{name} has no valid {key}: {_shown(values)}")
    return tuple(values)


def _shown(value: object) -> str:
    try:
        return repr(value)[:_MAX_CHARS_SHOWN]
    except RecursionError:
        return "a value of very many levels"


def _check_cover(tensors: list[RawTensor], data_bytes: int) -> None:
    position = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != position:
            raise HeaderError(f"{tensor.name} starts at {tensor.start}, not at {position}")
        position += tensor.num_bytes
    if position != data_bytes:
        raise HeaderError(f"its tensors have {position} bytes, the file {data_bytes}")


def _batches(tensors: Iterable[RawTensor]) -> Iterator[list[RawTensor]]:
    """Yield ``tensors``, adjacent small ones together."""
    batch: list[RawTensor] = []
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.num_bytes
        follows = batch and batch[-1].start + batch[-1].num_bytes == tensor.start
        if batch and not (follows and num_bytes <= _BATCH_BYTES and len(batch) < _MAX_BATCH):
            yield batch
            batch, num_bytes = [], tensor.num_bytes
        batch.append(tensor)
    if batch:
        yield batch


class Checkpoint:
    """An open file of tensors with a checked header. A context manager."""

    def __init__(self, directory: Path, *, max_tensor_bytes: int, roots: AdapterRoots = OWN_FILES) -> None:
        """Open ``directory``/adapter_model.safetensors.

        ``max_tensor_bytes``: the largest size of an adapter of this model; a larger file is refused
        before it is read. ``roots``: where links may lead. Raises ``AdapterError`` naming the file.
        """
        self.path = directory / WEIGHTS_NAME
        self._buffer = memoryview(bytearray())
        self._reads_nowait = True
        try:
            # In one call, because each has a thread of its own.
            self._file, self.stamp = FILES.call(lambda _: _open_with_stamp(directory, roots), str(directory))
        except (FileNotFoundError, NotADirectoryError):
            raise AdapterError(FILES.call(lambda _: _missing(directory), str(directory))) from None
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._open(max_tensor_bytes)
        except BaseException:
            self._file.close()
            raise

    def read(self, tensors: Iterable[RawTensor]) -> Iterator[StoredTensor]:
        """Yield ``tensors`` of this file with their bytes; see ``read_batches``."""
        for stored, _ in self.read_batches(tensors):
            yield from stored

    def read_batches(
        self, tensors: Iterable[RawTensor], make_room: Callable[[int], memoryview] | None = None
    ) -> Iterator[tuple[list[StoredTensor], memoryview]]:
        """Yield some of ``tensors`` at a time with their bytes, and both as ``LayerDigest`` takes them.

        ``make_room`` returns writable memory for so many bytes; without it, the bytes are valid
        until the next ones. Raises ``AdapterError`` if they cannot be read. ``check_unchanged``
        checks that they all are of one content.
        """
        make_room = make_room or self._room
        for batch in _batches(tensors):
            room = make_room(sum(PART_HEAD_BYTES + tensor.num_bytes for tensor in batch))
            parts, start = [], 0
            for tensor in batch:
                first = start + PART_HEAD_BYTES
                room[start:first] = part_head(tensor.num_bytes)
                start = first + tensor.num_bytes
                parts.append(room[first:start])
            self._read_into(parts, self._data_start + batch[0].start)
            yield list(zip(batch, parts, strict=True)), room

    def read_rows(self, tensor: RawTensor) -> Iterator[memoryview]:
        """Yield the bytes of one tensor, a few whole rows at a time, as ``read`` does."""
        row_bytes = tensor.num_bytes // max(1, tensor.shape[0])
        step = max(1, _PART_BYTES // max(1, row_bytes)) * row_bytes
        for start in range(0, tensor.num_bytes, max(1, step)):
            part = self._room(min(step, tensor.num_bytes - start))
            self._read_into([part], self._data_start + tensor.start + start)
            yield part

    def check_unchanged(self) -> None:
        """Raise ``AdapterError`` if the file was written since it was opened.

        Tensors read before may then belong to two different contents.
        """
        before, after = self.stamp, self._read_stamp()
        if after != before:
            raise self._changed(f"{before[0]} bytes, then {after[0]}")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, max_tensor_bytes: int) -> None:
        num_bytes, max_bytes = self.stamp[0], max_tensor_bytes + MAX_HEADER_BYTES
        if num_bytes > max_bytes:
            raise AdapterError(
                f"{self.path} has {num_bytes} bytes, more than the {max_bytes} that an adapter of "
                "this model can have within --max-lora-rank"
            )
        try:
            self.tensors = self._read_header(num_bytes)
        except HeaderError as error:
            raise AdapterError(f"{self.path} ({num_bytes} bytes) is truncated or damaged: {error}") from error
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
        self._read_into([memoryview(length)], 0)
        header = bytearray(header_length(bytes(length), num_bytes))
        self._data_start = LENGTH_BYTES + len(header)
        self._read_into([memoryview(header)], LENGTH_BYTES)
        return parse_header(bytes(header), num_bytes - self._data_start)

    def _read_into(self, parts: Sequence[memoryview], position: int) -> None:
        """Fill ``parts`` with adjacent bytes of the file."""
        left = [part for part in parts if part.nbytes]
        end = position + sum(part.nbytes for part in left)
        while left:
            try:
                num = self._read_some(left, position)
            except OSError as error:
                raise self._unreadable(error) from error
            if num == 0:
                self.check_unchanged()
                raise self._changed(f"it ends before byte {end}")
            position += num
            while left and num >= left[0].nbytes:
                num -= left.pop(0).nbytes
            if num:
                left[0] = left[0][num:]

    def _read_some(self, parts: Sequence[memoryview], position: int) -> int:
        """Read cached data in this thread, and other data with a deadline."""
        descriptor = self._file.fileno()
        if self._reads_nowait:
            try:
                num = os.preadv(descriptor, parts, position, os.RWF_NOWAIT)
            except BlockingIOError:
                num = 0
            except OSError as error:
                if error.errno not in _NO_NOWAIT:
                    raise
                self._reads_nowait, num = False, 0
            if num:
                return num
        # After its deadline a call may still write to it, and nothing reads it any more.
        some = [part[:_CALL_BYTES] for part in parts]  # one, or all of a batch
        return FILES.call(lambda _: os.preadv(descriptor, some, position), self._folder)

    @property
    def _folder(self) -> str:
        return str(self.path.parent)

    def _read_stamp(self) -> Stamp:
        try:
            return FILES.call(lambda _: _stamp_of(self._file), self._folder)
        except OSError as error:
            raise self._unreadable(error) from error

    def _changed(self, how: str) -> AdapterError:
        return AdapterError(
            f"{self.path} changed while it was read ({how}); load it again once it is written"
        )

    def _unreadable(self, error: OSError) -> AdapterError:
        return AdapterError(f"cannot read {self.path}: {error.strerror or error}")


def _open_with_stamp(directory: Path, roots: AdapterRoots) -> tuple[FileIO, Stamp]:
    file = open_file(directory, WEIGHTS_NAME, roots)
    try:
        return file, _stamp_of(file)
    except BaseException:
        file.close()
        raise


def _stamp_of(file: FileIO) -> Stamp:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino


def is_complete(directory: Path, roots: AdapterRoots = OWN_FILES) -> bool | None:
    """Whether the weights in ``directory`` are as long as their header says.

    None if they are not a file. True for a link out of ``roots``, since waiting does not help.
    """
    try:
        with open_file(directory, WEIGHTS_NAME, roots) as file:
            return FILES.call(lambda _: _is_whole(file), str(directory))
    except (NotRegularError, FileNotFoundError):
        return None
    except OutsideError:
        return True
    except (OSError, HeaderError):
        return False


def _is_whole(file: FileIO) -> bool:
    num_bytes = os.fstat(file.fileno()).st_size
    with BufferedReader(file) as reader:  # one read of the file may return a part
        header_bytes = header_length(reader.read(LENGTH_BYTES), num_bytes)
        parse_header(reader.read(header_bytes), num_bytes - LENGTH_BYTES - header_bytes)
    return True


def _missing(directory: Path) -> str:
    """Return why there are no weights, by what the directory has instead."""
    for name in _PICKLE_NAMES:
        if (directory / name).exists():
            return (
                f"{directory / name} is refused: pickle files can run code when they are read; "
                f"save the adapter as {WEIGHTS_NAME} (PEFT's default)"
            )
    if (directory / _INDEX_NAME).exists():
        return (
            f"{directory / _INDEX_NAME} is refused: adapters in several files are not served; "
            f"save the adapter as one {WEIGHTS_NAME}"
        )
    for file in sorted(directory.glob(f"*{GGUF_SUFFIX}")):
        return f"{file} {GGUF_REASON}"
    return f"{directory} holds no {WEIGHTS_NAME}"
