"""Checks whether a tensor's values can be served in a type: finite, and without large loss.

Used by the engine and by ``corun check``. Examines the bits with numpy, so that no torch is needed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import AdapterError
from .resolved import RawTensor

MAX_LOSS = 0.01  # of a tensor's norm
_SAFE_RMS = 2.0**-18  # at this root mean square or more, float16 loses less than MAX_LOSS
_BLOCK_VALUES = 1 << 17  # so that they stay in the cache between two operations


@dataclass(frozen=True, slots=True)
class _Stored:
    """A type of safetensors, as integers."""

    dtype: type[np.unsignedinteger]
    magnitude: int  # all bits but the sign
    infinity: int  # magnitudes of at least this are not finite
    is_short_float32: bool = False  # the upper half of a float32


_STORED = {
    "F32": _Stored(np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "F16": _Stored(np.uint16, 0x7FFF, 0x7C00),
    "BF16": _Stored(np.uint16, 0x7FFF, 0x7F80, is_short_float32=True),
}
# The largest number of a type, and the smallest number that it rounds to infinity.
_RANGES = {
    "float32": (3.4028234663852886e38, math.inf),
    "bfloat16": (3.3895313892515355e38, (2 - 2**-8) * 2.0**127),
    "float16": (65504.0, 65520.0),
}
# Bits of the smallest absolute value that cannot be served in bfloat16, by stored type.
REFUSED_IN_BFLOAT16 = {"F32": 0x7F7F_8000, "BF16": 0x7F80}


def check_values(raw: RawTensor, data: memoryview, dtype: str) -> None:
    """Check that the values of ``raw`` (``data``: its bytes) can be served in ``dtype``.

    ``dtype``: float32, bfloat16 or float16. Raises ``AdapterError`` with the tensor's name if a
    value is not finite or overflows ``dtype``, or if ``dtype`` loses more than ``MAX_LOSS`` of the
    tensor's norm because its values are small.
    """
    stored = _STORED[raw.dtype]
    bits = np.frombuffer(data, dtype=stored.dtype)
    if not len(bits):
        return
    largest_bits = _largest_magnitude(bits, stored)
    if largest_bits >= stored.infinity:
        raise AdapterError(f"{raw.name} has values that are not finite (NaN or infinity)")
    largest = float(_floats(np.array([largest_bits], dtype=stored.dtype), stored)[0])
    limit, overflow = _RANGES[dtype]
    if largest >= overflow:
        raise AdapterError(
            f"{raw.name} has the value {largest:g}, over the largest number of torch.{dtype} "
            f"({limit:g}); use another --dtype"
        )
    loss = _loss_in_float16(bits, stored, largest) if dtype == "float16" else 0.0
    if loss > MAX_LOSS:
        raise AdapterError(
            f"{raw.name} has values up to {largest:g}, too small for torch.{dtype}, which would "
            f"lose {loss:.0%} of its norm; use another --dtype"
        )


def check_magnitudes(raw: RawTensor, data: memoryview) -> None:
    """Check the magnitudes of DoRA (``data``: their bytes): finite, and not zero.

    Raises ``AdapterError`` with the tensor's name.
    """
    check_values(raw, data, "float32")
    stored = _STORED[raw.dtype]
    magnitudes = np.frombuffer(data, dtype=stored.dtype) & stored.dtype(stored.magnitude)
    zeros = np.flatnonzero(magnitudes == 0)
    if len(zeros):
        raise AdapterError(f"{raw.name} is 0 at {zeros[0]}; DoRA's magnitudes are norms of rows of weights")


def float32_of(raw: RawTensor, data: memoryview) -> np.ndarray:
    """Return a copy of a tensor's values (``data``: its bytes), float32 [*raw.shape]."""
    stored = _STORED[raw.dtype]
    values = _floats(np.frombuffer(data, dtype=stored.dtype), stored)
    return values.astype(np.float32).reshape(raw.shape)


def _largest_magnitude(bits: np.ndarray, stored: _Stored) -> int:
    """Return the bits of the largest absolute value; NaN is larger than infinity."""
    largest = 0
    buffer = np.empty(min(len(bits), _BLOCK_VALUES), dtype=bits.dtype)
    for block in _blocks(bits):
        magnitudes = buffer[: len(block)]
        np.bitwise_and(block, stored.dtype(stored.magnitude), out=magnitudes)
        largest = max(largest, int(magnitudes.max()))
    return largest


def _loss_in_float16(bits: np.ndarray, stored: _Stored, largest: float) -> float:
    """Return the share of a tensor's norm that float16 loses.

    Rounding alone loses 3e-4 of it. More is lost only below 2**-14, where numbers are 2**-24 apart
    and values under half of that become zero.
    """
    if stored is _STORED["F16"] or not largest:
        return 0.0
    enough = _SAFE_RMS**2 * len(bits)
    total = 0.0
    for block in _blocks(bits):
        total += float(np.square(_floats(block, stored)).sum())
        if total >= enough:
            return 0.0
    exact = _floats(bits, stored)
    lost = exact.astype(np.float64) - exact.astype(np.float16)
    return float(_norm(lost / largest) / _norm(exact / np.float64(largest)))


def _norm(values: np.ndarray) -> float:
    return math.sqrt(float(np.square(values).sum()))


def _floats(bits: np.ndarray, stored: _Stored) -> np.ndarray:
    """Return the exact values of ``bits``, as float16 or float32."""
    if stored.is_short_float32:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float32 if stored.dtype is np.uint32 else np.float16)


def _blocks(bits: np.ndarray) -> Iterator[np.ndarray]:
    return (bits[start : start + _BLOCK_VALUES] for start in range(0, len(bits), _BLOCK_VALUES))
