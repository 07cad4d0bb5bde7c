"""The header of a safetensors file: names, types, shapes and positions of tensors.

Read separately from the tensors, so that their bytes can be read directly to their destination. As
strict as the library: tensors cover the data without gaps or overlaps.
"""

import json
from functools import lru_cache
from math import prod
from typing import Any

from .resolved import RawTensor

LENGTH_BYTES = 8  # the header's length, little-endian, before the header
MAX_HEADER_BYTES = 16 << 20  # names, shapes and metadata of the largest adapters are shorter

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_METADATA = "__metadata__"
_MAX_NAME_CHARS = 1024
_MAX_DIMENSIONS = 8
_MAX_CHARS_SHOWN = 200
_MAX_KEPT = 32  # cached headers
_MAX_KEPT_BYTES = 1 << 20  # of each; longer ones are not cached


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
