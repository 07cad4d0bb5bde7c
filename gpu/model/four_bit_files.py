"""Reads checkpoints of bitsandbytes in 4 bits (nf4, fp4) as full matrices.

A matrix is stored as two codes a byte, the first in the upper half, with one scale for each block
of neighbours. These scales may be codes of 8 bits with their own scales (nested). The result is
what bitsandbytes dequantises, bit for bit: table[code] * scale in float32, rounded to the original
type of the matrix.
"""

import json
import logging
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...runtime.errors import ModelError
from ..device import huge_pages
from .source import ModelSource
from .weight_files import WeightFiles

_LOG = logging.getLogger(__name__)

_STATE = ".quant_state.bitsandbytes__"  # after the name of a matrix and before its kind of codes
_KINDS = ("nf4", "fp4")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors names them
_STORAGE_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
_ELEMENTS_AT_ONCE = 1 << 22  # converted at a time; a multiple of all sizes of blocks
_MAX_BLOCK_SIZE = 4096


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The parameters of a matrix, known before its codes are read."""

    shape: tuple[int, ...]
    dtype: str  # before it was quantised, as torch names it
    block_size: int  # elements of a scale
    nested_block_size: int  # scales of a scale; 0 = scales are no codes
    nested_offset: float

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_elements // self.block_size)


class FourBitFiles(WeightFiles):
    """The *.safetensors of a model, with a full matrix in place of each one in 4 bits."""

    def __init__(self, source: ModelSource) -> None:
        """Read all parameters of matrices except codes and scales. Raises ``ModelError``."""
        super().__init__(source)
        self._matrices: dict[str, _Matrix] = {}
        parts = set()
        for name in super().names:
            matrix, is_state, kind = name.partition(_STATE)
            if is_state:
                self._matrices[matrix] = self._read_matrix(matrix, kind)
                parts.add(name)
        for name in super().names:
            matrix, _, part = name.rpartition(".")
            if part in _PARTS:
                if matrix not in self._matrices:
                    raise _wrong(matrix, f"no tensor {matrix}{_STATE}{_KINDS[0]}")
                parts.add(name)
        self._names = frozenset(super().names) - parts
        self._transposed: frozenset[str] = frozenset()
        for name in self._names:
            if name.rpartition(".")[0] in self._matrices:
                raise _wrong(name.rpartition(".")[0], f"corun does not know its tensor {name}")
            if super().dtype(name) == "U8" and name not in self._matrices:
                raise _wrong(name, f"no tensor {name}{_STATE}{_KINDS[0]}")
        if self._matrices:
            _LOG.info(
                "%d matrices of the checkpoint are in 4 bits (bitsandbytes); they are dequantised",
                len(self._matrices),
            )  # fmt: skip
        else:
            _LOG.warning(
                "config.json of %s says that the checkpoint is in 4 bits (bitsandbytes), but no "
                "tensor is; the weights are served as stored", source.path,
            )  # fmt: skip

    @property
    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._matrices.get(name)
        return super().shape(name) if found is None else found.shape

    def dtype(self, name: str) -> str:
        found = self._matrices.get(name)
        return super().dtype(name) if found is None else _DTYPES[found.dtype]

    def read(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        matrix = self._matrices.get(name)
        if matrix is None:
            return super().read(name, rows)
        start, stop, _ = rows.indices(matrix.shape[0])
        row_elements = matrix.num_elements // matrix.shape[0]
        start, stop = start * row_elements, stop * row_elements
        dtype = getattr(torch, matrix.dtype)
        # In its own mapping, which returns to the system when its linear has been packed.
        found = huge_pages.zeros((stop - start) * dtype.itemsize).view(dtype)
        table = super().read(f"{name}.quant_map").float().numpy()
        # Two at once, as a byte has them.
        pairs = np.stack((np.repeat(table, 16), np.tile(table, 16)), axis=-1).view(np.uint64)[:, 0]
        # Codes of a block start at a byte, those of a row may not.
        begin = start - start % matrix.block_size
        for first in range(begin, stop, _ELEMENTS_AT_ONCE):
            last = min(first + _ELEMENTS_AT_ONCE, -(-stop // matrix.block_size) * matrix.block_size)
            values = self._dequantize(name, matrix, pairs, first, last)
            low, high = max(start, first), min(stop, last)
            found[low - start : high - start] = values[low - first : high - first]
        return found.reshape(-1, *matrix.shape[1:])

    def transpose(self, paths: Iterable[str]) -> None:
        """Make transformers load the matrices of these modules in the layout of ``Conv1D``.

        On disk they have the layout of linears, because bitsandbytes replaces ``Conv1D``.
        """
        weights = tuple(f".{path}.weight" for path in paths)
        self._transposed = frozenset(
            name for name in self._matrices if any(one.endswith(f".{name}") for one in weights)
        )

    @contextmanager
    def lazily(self, names: Collection[str]) -> Iterator[dict[str, Any]]:
        full = [name for name in names if name not in self._matrices]
        with super().lazily(full) as tensors:
            yield tensors | {
                name: _Lazy(self, name, is_transposed=name in self._transposed)
                for name in self._matrices.keys() & names
            }

    def _dequantize(
        self, name: str, matrix: _Matrix, pairs: np.ndarray, first: int, last: int
    ) -> torch.Tensor:
        """Whole blocks of elements, float32; of the last one also elements beyond the matrix."""
        size = _STORAGE_BYTES[super().dtype(name)]
        words = super().read(name, slice(first // 2 // size, -(-last // 2 // size)))
        codes = np.zeros((last - first) // 2, dtype=np.uint8)
        octets = words.view(torch.uint8).flatten().numpy()[: len(codes)]
        codes[: len(octets)] = octets
        blocks = slice(first // matrix.block_size, last // matrix.block_size)
        values = pairs[codes].view(np.float32).reshape(-1, matrix.block_size)
        values *= self._scales(name, matrix, blocks)[:, None]
        return torch.from_numpy(values).flatten()

    def _scales(self, name: str, matrix: _Matrix, blocks: slice) -> np.ndarray:
        scales = super().read(f"{name}.absmax", blocks)
        if matrix.nested_block_size:
            table = super().read(f"{name}.nested_quant_map").float()
            outer = super().read(f"{name}.nested_absmax").float()
            places = torch.arange(blocks.start, blocks.start + len(scales))
            scales = table[scales.int()] * outer[places // matrix.nested_block_size]
            scales += matrix.nested_offset
        if not bool(scales.isfinite().all()):
            raise _wrong(name, "it has scales that are not finite (NaN or infinity)")
        return scales.float().numpy()

    def _read_matrix(self, name: str, kind: str) -> _Matrix:
        state = f"{name}{_STATE}{kind}"
        if super().shape(name) is None:
            raise _wrong(name, "there is no tensor of its codes")
        try:
            fields = json.loads(super().read(state).numpy().tobytes())
            nested_block_size = 0
            if super().shape(f"{name}.nested_absmax") is not None:
                nested_block_size = int(fields["nested_blocksize"])
            matrix = _Matrix(
                tuple(map(int, fields["shape"])), str(fields["dtype"]), int(fields["blocksize"]),
                nested_block_size, float(fields.get("nested_offset", 0.0)),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _wrong(name, f"{state} is not valid: {error!r}") from error
        for found in (kind, fields.get("quant_type", kind)):
            if found not in _KINDS:
                known = ", ".join(_KINDS)
                raise _wrong(name, f"its codes are of the kind {found!r}; corun supports {known}")
        self._check(name, matrix)
        return matrix

    def _check(self, name: str, matrix: _Matrix) -> None:
        """Compare the tensors of a matrix with its parameters."""
        if matrix.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise _wrong(name, f"its values are {matrix.dtype}; corun supports {known}")
        if not matrix.shape or min(matrix.shape) < 1:
            raise _wrong(name, f"its shape is {list(matrix.shape)}")
        size = matrix.block_size
        if size < 2 or _MAX_BLOCK_SIZE % size or matrix.nested_block_size < 0:
            limit = f"corun supports powers of 2 up to {_MAX_BLOCK_SIZE}"
            raise _wrong(name, f"its blocks have {size} elements; {limit}")
        storage = super().dtype(name)
        if storage not in _STORAGE_BYTES:
            raise _wrong(name, f"its codes are stored as {storage}")
        num_bytes = -(-matrix.num_elements // 2)
        self._check_shape(name, (-(-num_bytes // _STORAGE_BYTES[storage]), 1))
        self._check_shape(f"{name}.absmax", (matrix.num_blocks,))
        self._check_shape(f"{name}.quant_map", (16,))
        if (super().dtype(f"{name}.absmax") == "U8") != bool(matrix.nested_block_size):
            raise _wrong(name, f"it has nested scales, but no tensor {name}.nested_absmax")
        if matrix.nested_block_size:
            num_scales = -(-matrix.num_blocks // matrix.nested_block_size)
            self._check_shape(f"{name}.nested_absmax", (num_scales,))
            self._check_shape(f"{name}.nested_quant_map", (256,))

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        found = super().shape(name)
        if found is None:
            raise _wrong(name.rpartition(".")[0], f"no tensor {name}")
        if found != expected:
            raise _wrong(name, f"it is {list(found)}, but must be {list(expected)}")


class _Lazy:
    """A matrix that is read when transformers slices it."""

    def __init__(self, files: FourBitFiles, name: str, *, is_transposed: bool) -> None:
        self._files = files
        self._name = name
        self._is_transposed = is_transposed

    def __getitem__(self, index: Any) -> torch.Tensor:
        matrix = self._files.read(self._name)
        return (matrix.T if self._is_transposed else matrix)[index]


def _wrong(name: str, what: str) -> ModelError:
    return ModelError(f"the quantised tensor {name} cannot be read: {what}")
