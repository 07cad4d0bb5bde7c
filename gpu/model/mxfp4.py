"""Reads matrices in mxfp4: the experts of gpt-oss as published, and linears of compressed-tensors.

Of a matrix [out, in], 32 neighbours along the input share a power of two. Codes are floats of 4
bits, two a byte, the first in the lower half. The model has the matrices of experts transposed. All
values are exact in bfloat16, if they are in its range.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ...cpu_workers.kernels.simd.layout import MXFP4_LEVELS, SMALL_GROUP_SIZE, powers_of_two
from ..linear.quantized import QuantizedWeight
from .full_files import CodedMatrix, Found, StoredMatrix, check_finite, unreadable
from .weight_files import WeightFiles

_EXPERT_CODES, _EXPERT_SCALES = "_blocks", "_scales"  # after the name of the parameter
_CODES, _SCALES = ".weight_packed", ".weight_scale"  # after the path of the linear
_ZERO_POINTS = ".weight_zero_point"
_BLOCK_BYTES = SMALL_GROUP_SIZE // 2
_NOT_A_NUMBER = 255  # as an exponent
_ROWS_AT_ONCE = 1024


def find_mxfp4(files: WeightFiles) -> Found:
    """All matrices in mxfp4. Raises ``ModelError``."""
    matrices: dict[str, StoredMatrix] = {}
    coded: dict[str, CodedMatrix] = {}
    parts = set()
    for name in files.names:
        if files.dtype(name) != "U8" or not name.endswith((_EXPERT_CODES, _CODES)):
            continue
        is_linear = name.endswith(_CODES)
        path = name.removesuffix(_CODES if is_linear else _EXPERT_CODES)
        scales = f"{path}{_SCALES if is_linear else _EXPERT_SCALES}"
        if is_linear:
            matrix = f"{path}.weight"
            _check_linear(files, matrix, name, scales)
            matrices[matrix] = coded[matrix] = _Linear(files, matrix, name, scales)
        else:
            _check_experts(files, path, name, scales)
            matrices[path] = _Experts(files, path, name, scales)
        parts |= {name, scales}
    return Found(matrices, frozenset(parts), coded)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The tensors of a matrix, or of several."""

    files: WeightFiles
    name: str
    codes: str
    scales: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def _codes(self, rows: slice) -> np.ndarray:
        """Of some rows, or experts, a code a byte: uint8 [..., in]."""
        pairs: np.ndarray = self.files.read(self.codes, rows).numpy()
        return np.stack((pairs & 15, pairs >> 4), axis=-1)

    def _scales(self, rows: slice) -> np.ndarray:
        exponents: np.ndarray = self.files.read(self.scales, rows).numpy()
        if exponents.max(initial=0) == _NOT_A_NUMBER:
            raise unreadable(self.name, "it has scales that are no numbers (255)")
        return powers_of_two(exponents)

    def _values(self, rows: slice) -> torch.Tensor:
        """[..., in], bfloat16."""
        scales = self._scales(rows)
        levels = MXFP4_LEVELS.values[self._codes(rows)].reshape(*scales.shape, SMALL_GROUP_SIZE)
        values = torch.from_numpy(levels) * torch.from_numpy(scales)[..., None]
        values = values.flatten(-2).to(self.dtype)
        check_finite(self.name, values)
        return values


@dataclass(frozen=True, slots=True)
class _Experts(_Matrix):
    """Implements ``StoredMatrix``: [experts, in, out]."""

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, out_features, num_groups = _shape(self.files, self.scales)
        return num_experts, num_groups * SMALL_GROUP_SIZE, out_features

    def read(self, start: int, stop: int) -> torch.Tensor:
        found = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for expert in range(start, stop):
            found[expert - start].copy_(self._values(slice(expert, expert + 1))[0].T)
        return found


@dataclass(frozen=True, slots=True)
class _Linear(_Matrix):
    """Implements ``CodedMatrix``: [out, in]."""

    @property
    def shape(self) -> tuple[int, ...]:
        out_features, num_groups = _shape(self.files, self.scales)
        return out_features, num_groups * SMALL_GROUP_SIZE

    def read(self, start: int, stop: int) -> torch.Tensor:
        found = torch.empty((stop - start, self.shape[1]), dtype=self.dtype)
        for first in range(start, stop, _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, stop))
            found[rows.start - start : rows.stop - start] = self._values(rows)
        return found

    def as_stored(self) -> QuantizedWeight:
        rows = slice(0, self.shape[0])
        scales = self._scales(rows)
        check_finite(self.name, torch.from_numpy(scales) * float(MXFP4_LEVELS.values.max()))
        codes = self._codes(rows).reshape(self.shape)
        return QuantizedWeight(4, codes, scales, levels=MXFP4_LEVELS)


def _check_experts(files: WeightFiles, name: str, codes: str, scales: str) -> None:
    found, of_scales = _shape(files, codes), files.shape(scales)
    if len(found) != 4 or found[3] != _BLOCK_BYTES or of_scales != found[:3] or 0 in found:
        raise unreadable(
            name,
            f"its codes are {list(found)}, its scales {of_scales and list(of_scales)}; "
            f"they must be [experts, out, in / 32, {_BLOCK_BYTES}] and [experts, out, in / 32]",
        )
    _check_bytes(files, name, scales)


def _check_linear(files: WeightFiles, name: str, codes: str, scales: str) -> None:
    found, of_scales = _shape(files, codes), files.shape(scales)
    is_matrix = len(found) == 2 and 0 not in found and found[1] % _BLOCK_BYTES == 0
    if not is_matrix or of_scales != (found[0], found[1] // _BLOCK_BYTES):
        raise unreadable(
            name,
            f"its codes are {list(found)}, its scales {of_scales and list(of_scales)}; "
            "they must be [out, in / 2] and [out, in / 32]",
        )
    _check_bytes(files, name, scales)
    if files.shape(f"{name.removesuffix('.weight')}{_ZERO_POINTS}") is not None:
        raise unreadable(name, "it has floats and zero points")


def _check_bytes(files: WeightFiles, name: str, scales: str) -> None:
    if files.dtype(scales) != "U8":
        raise unreadable(name, "its scales are not bytes")


def _shape(files: WeightFiles, name: str) -> tuple[int, ...]:
    found = files.shape(name)
    assert found is not None
    return found
