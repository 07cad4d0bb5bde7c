"""Reads matrices of bitsandbytes in 4 bits (nf4, fp4).

A matrix is stored as two codes a byte, the first in the upper half, with one scale for each block
of neighbours. These scales may be codes of 8 bits with their own scales (nested). The result is
what bitsandbytes dequantises, bit for bit: table[code] * scale in float32, rounded to the original
type of the matrix.
"""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...cpu_workers.kernels.simd.layout import GROUP_SIZE, NF4_LEVELS
from ..device import huge_pages
from ..linear.quantized import QuantizedWeight
from .full_files import Found, check_finite, unreadable
from .weight_files import WeightFiles

_STATE = ".quant_state.bitsandbytes__"  # after the name of a matrix and before its kind of codes
_KINDS = ("nf4", "fp4")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_DTYPES = ("bfloat16", "float16", "float32")
_STORAGE_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
_ELEMENTS_AT_ONCE = 1 << 22  # converted at a time; a multiple of all sizes of blocks
_MAX_BLOCK_SIZE = 4096


def find_four_bit(files: WeightFiles) -> Found:
    """All matrices in 4 bits; reads their parameters. Raises ``ModelError``."""
    matrices: dict[str, _Matrix] = {}
    parts = set()
    for name in files.names:
        matrix, is_state, kind = name.partition(_STATE)
        if is_state:
            matrices[matrix] = _read_matrix(files, matrix, kind)
            parts |= {matrix, name}
    for name in files.names:
        matrix, _, part = name.rpartition(".")
        if part in _PARTS:
            if matrix not in matrices:
                raise unreadable(matrix, f"no tensor {matrix}{_STATE}{_KINDS[0]}")
            parts.add(name)
        elif matrix in matrices and _STATE not in name:
            raise unreadable(matrix, f"corun does not know its tensor {name}")
    coded = {name: one for name, one in matrices.items() if one.has_levels}
    return Found(matrices, frozenset(parts), coded)


@dataclass(frozen=True, slots=True)
class _Matrix:
    files: WeightFiles
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # before it was quantised
    block_size: int  # elements of a scale
    nested_block_size: int  # scales of a scale; 0 = scales are no codes
    nested_offset: float
    has_levels: bool  # it is nf4, and a block is a group

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_elements // self.block_size)

    def read(self, start: int, stop: int) -> torch.Tensor:
        row_elements = self.num_elements // self.shape[0]
        start, stop = start * row_elements, stop * row_elements
        # In its own mapping, which returns to the system when its linear has been packed.
        found = huge_pages.zeros((stop - start) * self.dtype.itemsize).view(self.dtype)
        table = self.files.read(f"{self.name}.quant_map").float().numpy()
        # Two at once, as a byte has them.
        pairs = np.stack((np.repeat(table, 16), np.tile(table, 16)), axis=-1).view(np.uint64)[:, 0]
        # Codes of a block start at a byte, those of a row may not.
        begin = start - start % self.block_size
        for first in range(begin, stop, _ELEMENTS_AT_ONCE):
            last = min(first + _ELEMENTS_AT_ONCE, -(-stop // self.block_size) * self.block_size)
            values = self._dequantize(pairs, first, last)
            low, high = max(start, first), min(stop, last)
            found[low - start : high - start] = values[low - first : high - first]
        check_finite(self.name, found)
        return found.reshape(-1, *self.shape[1:])

    def as_stored(self) -> QuantizedWeight:
        codes = self._codes(0, self.num_elements)
        halves = np.stack((codes >> 4, codes & 15), axis=-1).reshape(self.shape)
        scales = self._scales(slice(0, self.num_blocks)).numpy().reshape(len(halves), -1)
        return QuantizedWeight(4, halves, scales, levels=NF4_LEVELS)

    def _dequantize(self, pairs: np.ndarray, first: int, last: int) -> torch.Tensor:
        """Whole blocks of elements, float32; of the last one also elements beyond the matrix."""
        codes = self._codes(first, last)
        values = torch.from_numpy(pairs[codes].view(np.float32)).view(-1, self.block_size)
        values *= self._scales(slice(first // self.block_size, last // self.block_size))[:, None]
        return values.flatten()

    def _codes(self, first: int, last: int) -> np.ndarray:
        """Two a byte; zeros beyond the matrix."""
        size = _STORAGE_BYTES[self.files.dtype(self.name)]
        words = self.files.read(self.name, slice(first // 2 // size, -(-last // 2 // size)))
        codes = np.zeros((last - first) // 2, dtype=np.uint8)
        octets = words.view(torch.uint8).flatten().numpy()[: len(codes)]
        codes[: len(octets)] = octets
        return codes

    def _scales(self, blocks: slice) -> torch.Tensor:
        scales = self.files.read(f"{self.name}.absmax", blocks)
        if self.nested_block_size:
            table = self.files.read(f"{self.name}.nested_quant_map").float()
            outer = self.files.read(f"{self.name}.nested_absmax").float()
            places = torch.arange(blocks.start, blocks.start + len(scales))
            scales = table[scales.int()] * outer[places // self.nested_block_size]
            scales += self.nested_offset
        check_finite(self.name, scales)
        return scales.float()


def _read_matrix(files: WeightFiles, name: str, kind: str) -> _Matrix:
    state = f"{name}{_STATE}{kind}"
    if files.shape(name) is None:
        raise unreadable(name, "there is no tensor of its codes")
    try:
        fields = json.loads(files.read(state).numpy().tobytes())
        nested_block_size = 0
        if files.shape(f"{name}.nested_absmax") is not None:
            nested_block_size = int(fields["nested_blocksize"])
        shape, dtype = tuple(map(int, fields["shape"])), str(fields["dtype"])
        block_size, offset = int(fields["blocksize"]), float(fields.get("nested_offset", 0.0))
        found = fields.get("quant_type", kind)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise unreadable(name, f"{state} is not valid: {error!r}") from error
    for one in (kind, found):
        if one not in _KINDS:
            known = ", ".join(_KINDS)
            raise unreadable(name, f"its codes are of the kind {one!r}; corun supports {known}")
    if dtype not in _DTYPES:
        raise unreadable(name, f"its values are {dtype}; corun supports {', '.join(_DTYPES)}")
    matrix = _Matrix(
        files, name, shape, getattr(torch, dtype), block_size, nested_block_size, offset, has_levels=False
    )
    _check(matrix)
    is_in_groups = len(shape) == 2 and block_size == GROUP_SIZE and shape[1] % GROUP_SIZE == 0
    if not is_in_groups:
        return matrix
    table = files.read(f"{name}.quant_map").float().numpy()
    return replace(matrix, has_levels=np.array_equal(table, NF4_LEVELS.values))


def _check(matrix: _Matrix) -> None:
    files, name, size = matrix.files, matrix.name, matrix.block_size
    if not matrix.shape or min(matrix.shape) < 1:
        raise unreadable(name, f"its shape is {list(matrix.shape)}")
    if size < 2 or _MAX_BLOCK_SIZE % size or matrix.nested_block_size < 0:
        limit = f"corun supports powers of 2 up to {_MAX_BLOCK_SIZE}"
        raise unreadable(name, f"its blocks have {size} elements; {limit}")
    storage = files.dtype(name)
    if storage not in _STORAGE_BYTES:
        raise unreadable(name, f"its codes are stored as {storage}")
    num_bytes = -(-matrix.num_elements // 2)
    _check_shape(files, name, (-(-num_bytes // _STORAGE_BYTES[storage]), 1))
    _check_shape(files, f"{name}.absmax", (matrix.num_blocks,))
    _check_shape(files, f"{name}.quant_map", (16,))
    if (files.dtype(f"{name}.absmax") == "U8") != bool(matrix.nested_block_size):
        raise unreadable(name, f"it has nested scales, but no tensor {name}.nested_absmax")
    if matrix.nested_block_size:
        num_scales = -(-matrix.num_blocks // matrix.nested_block_size)
        _check_shape(files, f"{name}.nested_absmax", (num_scales,))
        _check_shape(files, f"{name}.nested_quant_map", (256,))


def _check_shape(files: WeightFiles, name: str, expected: tuple[int, ...]) -> None:
    found = files.shape(name)
    if found is None:
        raise unreadable(name.rpartition(".")[0], f"no tensor {name}")
    if found != expected:
        raise unreadable(name, f"it is {list(found)}, but must be {list(expected)}")
