"""Reads linears in integers with scales: GPTQ, AWQ, compressed-tensors.

Their codes and scales are used unchanged, or multiplied in float32 and rounded once to the type of
the scales, as the formats' own libraries do.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ...cpu_workers.kernels.simd.layout import GROUP_SIZE, SMALL_GROUP_SIZE
from ...runtime.errors import ModelError
from ..linear.quantized import BITS, QuantizedWeight
from .full_files import Found, check_finite
from .stored_quantization import StoredQuantization
from .weight_files import WeightFiles

_WORD_BITS = 32
# The position of AWQ's column c of eight in the word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_WEIGHTS_AT_ONCE = 1 << 22  # dequantised at a time
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # of scales
_PACKED = ("qweight", "weight_packed")
# Tensors of a quantised linear, after its path.
_SUFFIXES = (
    *_PACKED,
    "qzeros",
    "scales",
    "g_idx",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)

# Bits, codes [out, in], scales [out, groups], zero points likewise; codes count from 0.
_Parts = tuple[int, np.ndarray, np.ndarray, np.ndarray | None]


def find_stored_integers(files: WeightFiles, stored: StoredQuantization) -> Found:
    """All linears in integers. Raises ``ModelError``."""
    linears = {path: _StoredLinear(files, path, stored) for path in sorted(stored_paths(files))}

    # Rows of a matrix are read some at a time, by several threads, one matrix after the other.
    is_reading = threading.Lock()

    @lru_cache(maxsize=1)
    def read_once(path: str) -> _Integers:
        return linears[path].read()

    def read(path: str) -> _Integers:
        with is_reading:  # else each thread would read all of the matrix
            return read_once(path)

    matrices: dict[str, _IntegerMatrix] = {}
    parts = set()
    for path, linear in linears.items():
        matrices[f"{path}.weight"] = _IntegerMatrix(path, linear.shape, linear.dtype, read)
        names = {f"{path}.{suffix}" for suffix in (*_SUFFIXES, "weight")}
        parts |= {name for name in names if files.shape(name) is not None}
    coded = {
        f"{path}.weight": matrices[f"{path}.weight"]
        for path, linear in linears.items()
        if not stored.in_full and linear.has_whole_groups
    }
    return Found(matrices, frozenset(parts), coded)


def stored_paths(files: WeightFiles) -> frozenset[str]:
    """Paths of all linears that are integers with scales on disk."""
    paths = set()
    for name in files.names:
        path, _, part = name.rpartition(".")
        is_integer = part == "weight" and files.dtype(name) == "I8"
        is_packed = part in _PACKED and files.dtype(name) != "U8"  # else mxfp4
        if is_packed or (is_integer and files.shape(f"{path}.weight_scale") is not None):
            paths.add(path)
    return frozenset(paths)


@dataclass(frozen=True, slots=True)
class _Integers:
    """A matrix [out, in]: (code - zero point) * scale, with a scale and zero point a group."""

    path: str
    bits: int
    codes: np.ndarray  # uint8 [out, in]
    scales: np.ndarray  # float32 [out, groups]
    zeros: np.ndarray | None  # uint8 [out, groups]; None = the middle everywhere
    order: np.ndarray | None  # group of each input [in]; None = groups are neighbours

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def as_stored(self) -> QuantizedWeight:
        """In groups of corun's sizes. Raises ``ModelError``."""
        codes, order, (width, groups) = (self.codes, None, (self.codes.shape[1], self.scales.shape[1]))
        if self.order is not None:
            if (np.bincount(self.order, minlength=groups) * groups != width).any():
                raise _wrong(self.path, f"its groups have other sizes than {width} / {groups}")
            order = np.argsort(self.order, kind="stable").astype(np.int32)
            codes = codes[:, order]
        size = SMALL_GROUP_SIZE if width // groups % GROUP_SIZE else GROUP_SIZE
        repeats = width // size // groups
        scales = np.ascontiguousarray(np.repeat(self.scales, repeats, axis=1))
        zeros = self.zeros
        zeros = None if zeros is None or (zeros == self._middle).all() else zeros
        if self.bits == 4:
            zeros = None if zeros is None else np.repeat(zeros, repeats, axis=1)
            return QuantizedWeight(4, np.ascontiguousarray(codes), scales, zeros, order=order)
        if zeros is not None:
            raise _wrong(self.path, "it has 8 bits and zero points; --quantization off reads it in full")
        return QuantizedWeight(8, (codes ^ 128).view(np.int8), scales, order=order)

    def in_full(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [start, stop), dequantised."""
        found = torch.empty((stop - start, self.codes.shape[1]), dtype=dtype)
        groups = self.order
        if groups is None:
            groups = np.arange(found.shape[1]) // (found.shape[1] // self.scales.shape[1])
        at_once = max(1, _WEIGHTS_AT_ONCE // found.shape[1])
        for first in range(start, stop, at_once):
            rows = slice(first, min(first + at_once, stop))
            codes = self.codes[rows].astype(np.float32)
            codes -= self._middle if self.zeros is None else self.zeros[rows][:, groups]
            values = torch.from_numpy(codes)
            values *= torch.from_numpy(self.scales[rows][:, groups])
            target = found[rows.start - start : rows.stop - start]
            target.copy_(values)
            check_finite(f"{self.path}.weight", target)
        return found


@dataclass(frozen=True, slots=True)
class _IntegerMatrix:
    path: str
    shape: tuple[int, int]
    dtype: torch.dtype
    integers: Callable[[str], _Integers]

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.integers(self.path).in_full(start, stop, self.dtype)

    def as_stored(self) -> QuantizedWeight:
        return self.integers(self.path).as_stored()


class _StoredLinear:
    """The tensors of one linear on disk. All methods raise ``ModelError``."""

    def __init__(self, files: WeightFiles, path: str, stored: StoredQuantization) -> None:
        """Read shapes."""
        self._files = files
        self._path = path
        self._stored = stored
        self._out, self._in = self._shape_on_disk()

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return self._out, self._in

    @property
    def dtype(self) -> torch.dtype:
        """The type of the scales."""
        self._check(self._scales, tuple(_DTYPES), (1, 2))
        return _DTYPES[self._files.dtype(f"{self._path}.{self._scales}")]

    @property
    def has_whole_groups(self) -> bool:
        """Whether each of its groups is a whole number of corun's groups."""
        shape = self._check(self._scales, tuple(_DTYPES), (1, 2))
        groups = shape[-1] if self._stored.layout == "compressed-tensors" else shape[0]
        return self._in % (SMALL_GROUP_SIZE * (1 if math.prod(shape) == 1 else groups)) == 0

    def read(self) -> _Integers:
        """All of its tensors, checked against each other."""
        read = {"gptq": self._gptq, "awq": self._awq, "compressed-tensors": self._compressed}
        bits, codes, scales, zeros = read[self._stored.layout]()
        if codes.shape != self.shape:
            raise self._wrong(f"codes {list(codes.shape)} for {list(self.shape)}")
        if scales.size == 1:  # one for all
            scales = np.full((self._out, 1), scales.item(), np.float32)
        groups = scales.shape[1] if scales.ndim == 2 else 0
        order = self._order(groups)
        if not groups or len(scales) != self._out or (order is None and self._in % groups):
            raise self._wrong(f"scales {list(scales.shape)} for {list(self.shape)}")
        if not np.isfinite(scales).all():
            raise self._wrong("its scales are not finite (NaN or infinity)")
        if zeros is not None:
            if zeros.size == 1:
                zeros = np.full((self._out, 1), zeros.item(), zeros.dtype)
            zeros = self._zero_points(bits, zeros, (self._out, groups))
        return _Integers(self._path, bits, codes, scales, zeros, order)

    def _gptq(self) -> _Parts:
        words = self._words("qweight")  # [in * bits / 32, out]
        bits = self._bits(len(words), fits=words.shape[1] == self._out)
        scales = self._read_scales().T  # [groups, out]
        codes = _fields(words, bits).transpose(1, 0, 2).reshape(self._out, self._in)
        zeros = _fields(self._words("qzeros"), bits)  # [groups, out * bits / 32, …]
        zeros = zeros.reshape(len(zeros), -1)[:, : self._out].T
        return bits, codes, scales, zeros.astype(np.int16) + self._stored.zero_offset

    def _awq(self) -> _Parts:
        words = self._words("qweight")  # [in, out / 8]
        scales = self._read_scales().T
        codes = _fields(words, 4)[..., _AWQ_PLACES].reshape(len(words), -1).T
        zeros = _fields(self._words("qzeros"), 4)[..., _AWQ_PLACES]
        return 4, codes, scales, zeros.reshape(len(zeros), -1).T

    def _compressed(self) -> _Parts:
        scales = self._read_scales()
        if self._has("weight_packed"):
            words = self._words("weight_packed")  # [out, in * bits / 32]
            bits = self._bits(words.shape[1], fits=len(words) == self._out)
            codes = _fields(words, bits).reshape(self._out, -1)
        else:
            bits = 4 if self._stored.bits == {4} else 8
            codes = self._unsigned("weight", bits)
        zeros = None
        if self._has("weight_zero_point"):
            zeros = self._read("weight_zero_point", ("I32", "I8"), (2,)).numpy()
            if zeros.dtype == np.int32:  # [out * bits / 32, groups]
                packed = _fields(zeros, bits)
                zeros = packed.transpose(0, 2, 1).reshape(-1, packed.shape[1])[: self._out]
            else:
                zeros = zeros.astype(np.int16) + (1 << (bits - 1))
        return bits, codes, scales, zeros

    @property
    def _scales(self) -> str:
        return "weight_scale" if self._stored.layout == "compressed-tensors" else "scales"

    def _shape_on_disk(self) -> tuple[int, int]:
        packed = next((one for one in _PACKED if self._has(one)), "weight")
        first, second = self._check(packed, ("I8",) if packed == "weight" else ("I32",), (2,))
        in_words = _WORD_BITS // max(self._stored.bits, default=4)
        if packed == "weight":
            shape = first, second
        elif packed == "weight_packed":
            shape = first, second * in_words
            if self._has("weight_shape"):
                found = self._read("weight_shape", ("I64", "I32"), (1,)).tolist()
                shape = (first, found[-1]) if len(found) == 2 else (0, 0)
        else:
            shape = (second * in_words, first) if self._stored.layout == "awq" else (second, first * in_words)
        if min(shape) < 1:
            raise self._wrong(f"its shape is {list(shape)}")
        return shape

    def _unsigned(self, name: str, bits: int) -> np.ndarray:
        """Unsigned codes for signed bytes on disk."""
        codes = self._read(name, ("I8",), (2,)).numpy().astype(np.int16) + (1 << (bits - 1))
        if codes.min() < 0 or codes.max() >= 1 << bits:
            raise self._wrong(f"its codes exceed {bits} bits")
        return codes.astype(np.uint8)

    def _zero_points(self, bits: int, zeros: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        if zeros.shape != shape:
            raise self._wrong(f"zero points {list(zeros.shape)} for scales {list(shape)}")
        if zeros.min() < 0 or zeros.max() >= 1 << bits:
            raise self._wrong(
                f"zero points from {zeros.min()} to {zeros.max()}, beyond 0 to {(1 << bits) - 1}"
            )
        return zeros.astype(np.uint8)

    def _bits(self, num_words: int, *, fits: bool) -> int:
        """Bits of a code, if this many words hold a whole row or column."""
        bits = num_words * _WORD_BITS // self._in
        if not fits or bits not in BITS or num_words * _WORD_BITS != bits * self._in:
            raise self._wrong(f"its packed weight is not [{self._out}, {self._in}] in 4 or 8 bits")
        return bits

    def _order(self, groups: int) -> np.ndarray | None:
        """The group of each input, if they are not neighbours."""
        name = next((one for one in ("g_idx", "weight_g_idx") if self._has(one)), None)
        if name is None or not groups:
            return None
        found = self._read(name, ("I32", "I64"), (1,)).long().numpy()
        if found.shape != (self._in,) or found.min() < 0 or found.max() >= groups:
            raise self._wrong(f"{name} does not name one of {groups} groups for each input")
        neighbours = np.arange(self._in) // max(1, self._in // groups)
        return None if np.array_equal(found, neighbours) else found

    def _has(self, name: str) -> bool:
        return self._files.shape(f"{self._path}.{name}") is not None

    def _words(self, name: str) -> np.ndarray:
        words: np.ndarray = self._read(name, ("I32",), (2,)).numpy()
        return words

    def _read_scales(self) -> np.ndarray:
        scales: np.ndarray = self._read(self._scales, tuple(_DTYPES), (1, 2)).float().numpy()
        return scales

    def _read(self, name: str, dtypes: tuple[str, ...], ndims: tuple[int, ...]) -> torch.Tensor:
        self._check(name, dtypes, ndims)
        return self._files.read(f"{self._path}.{name}")

    def _check(self, name: str, dtypes: tuple[str, ...], ndims: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor, if it has one of these types and numbers of dimensions."""
        shape = self._files.shape(f"{self._path}.{name}")
        if shape is None:
            raise self._wrong(f"no tensor {name}")
        dtype = self._files.dtype(f"{self._path}.{name}")
        if dtype not in dtypes or len(shape) not in ndims or 0 in shape:
            raise self._wrong(
                f"{name} is {list(shape)} of {dtype}; it must be {' or '.join(dtypes)} with "
                f"{' or '.join(map(str, ndims))} dimensions"
            )
        return shape

    def _wrong(self, what: str) -> ModelError:
        return _wrong(self._path, what)


def _wrong(path: str, what: str) -> ModelError:
    return ModelError(f"the quantised linear {path} cannot be read: {what}")


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The fields of little-endian words, lowest first: int32 [a, b] -> uint8 [a, b, 32 / bits]."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return np.stack((octets & 15, octets >> 4), axis=-1).reshape(*words.shape, 8)
