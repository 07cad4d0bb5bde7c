"""Reads tensors of bytes that scales multiply: 8-bit floats, and bitsandbytes in 8 bits.

A scale belongs to the whole tensor, to a row, or to a block of rows and columns. Products are
computed in float32 and rounded once to the type of the scales, as the formats' own libraries do.
Scales of activations in the same files are not read: activations stay as they are.
"""

from dataclasses import dataclass

import torch

from .full_files import Found, StoredMatrix, check_finite, unreadable
from .weight_files import WeightFiles

_FLOATS, _INTEGERS = "F8_E4M3", "I8"
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E8M0": torch.float32,  # powers of two
}
# After the name of the tensor.
_SCALES = ("_scale_inv", "_scale")
# After the path of its module.
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "output_scale")
_SCALES_OF_INTEGERS, _LAYOUT = "SCB", "weight_format"  # bitsandbytes
_OF_127 = 7.874015718698502e-3  # by which bitsandbytes multiplies instead of dividing by 127
_ELEMENTS_AT_ONCE = 1 << 22  # converted at a time


def find_floats(files: WeightFiles, block: tuple[int, int] | None) -> Found:
    """All tensors of 8-bit floats. Raises ``ModelError``.

    ``block``: rows and columns of a scale, if there is more than one for each row.
    """
    matrices: dict[str, StoredMatrix] = {}
    parts = set()
    for name in files.names:
        if files.dtype(name) != _FLOATS or name.endswith(_OF_ACTIVATIONS):
            continue
        scales = [f"{name}{end}" for end in _SCALES if files.shape(f"{name}{end}") is not None]
        if len(scales) != 1:
            raise unreadable(name, f"it has {len(scales)} tensors of scales, {name}{_SCALES[0]}")
        if files.shape(f"{name}_zero_point") is not None:
            raise unreadable(name, "it has floats and zero points")
        matrices[name] = _matrix(files, name, scales[0], block)
        parts |= {name, scales[0]}
    parts |= {name for name in files.names if name.endswith(_OF_ACTIVATIONS)}
    return Found(matrices, frozenset(parts))


def find_integers(files: WeightFiles) -> Found:
    """All matrices of bitsandbytes in 8 bits. Raises ``ModelError``."""
    matrices: dict[str, StoredMatrix] = {}
    parts = set()
    for name in files.names:
        path, _, part = name.rpartition(".")
        if part != _SCALES_OF_INTEGERS:
            continue
        matrix, layout = f"{path}.weight", f"{path}.{_LAYOUT}"
        if files.shape(matrix) is None or files.dtype(matrix) != _INTEGERS:
            raise unreadable(matrix, f"there is {name}, but no such tensor of 8-bit integers")
        if files.shape(layout) is not None:
            if bool(files.read(layout).any()):
                raise unreadable(matrix, f"{layout} is not 0: its rows are not in order")
            parts.add(layout)
        matrices[matrix] = _matrix(files, matrix, name, None, _OF_127)
        parts |= {matrix, name}
    return Found(matrices, frozenset(parts))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Implements ``StoredMatrix``: [rows, columns], or several of them [n, rows, columns]."""

    files: WeightFiles
    name: str
    scales: str
    block: tuple[int, int]  # rows and columns of a scale
    factor: float  # of all values

    @property
    def shape(self) -> tuple[int, ...]:
        found = self.files.shape(self.name)
        assert found is not None
        return found

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.files.dtype(self.scales)]

    def read(self, start: int, stop: int) -> torch.Tensor:
        found = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        of_scales = _grid(self.shape, self.block)
        scales = self.files.read(self.scales).float().reshape(of_scales)
        check_finite(self.name, scales)
        at_once = max(1, _ELEMENTS_AT_ONCE // max(1, found[:1].numel()))
        for first in range(start, stop, at_once):
            last = min(first + at_once, stop)
            values = self.files.read(self.name, slice(first, last)).float()
            values *= self._of_entries(scales, first, last)
            if self.factor != 1:
                values *= self.factor
            target = found[first - start : last - start]
            target.copy_(values)
            check_finite(self.name, target)
        return found

    def _of_entries(self, scales: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """The scale of each element of entries [first, last)."""
        rows, columns = self.block
        if len(self.shape) == 2:
            scales = scales[torch.arange(first, last) // rows]
        else:
            scales = scales[first:last].repeat_interleave(rows, dim=-2)[:, : self.shape[1]]
        return scales.repeat_interleave(columns, dim=-1)[..., : self.shape[-1]]


def _matrix(
    files: WeightFiles, name: str, scales: str, block: tuple[int, int] | None, factor: float = 1
) -> _Matrix:
    """Compare the sizes of a tensor and of its scales."""
    shape, found = files.shape(name), files.shape(scales)
    assert shape is not None and found is not None
    if len(shape) not in (2, 3) or 0 in shape:
        raise unreadable(name, f"it is {list(shape)}, not one matrix or several")
    if files.dtype(scales) not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise unreadable(name, f"{scales} is {files.dtype(scales)}; corun supports {known}")
    rows, columns = shape[-2:]
    blocks = [(rows, columns), (1, columns)]
    if block:  # its size is only what config.json says
        blocks.append((min(rows, block[0]), min(columns, block[1])))
    for one in blocks:
        # A tool may leave out dimensions of size 1.
        if _without_ones(_grid(shape, one)) == _without_ones(found):
            return _Matrix(files, name, scales, one, factor)
    of_blocks = f", or blocks of {block[0]} x {block[1]}" if block else ""
    raise unreadable(
        name,
        f"{scales} is {list(found)} for {list(shape)}; corun supports one scale for each matrix "
        f"or row{of_blocks}",
    )


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a tensor."""
    rows, columns = shape[-2:]
    return (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
