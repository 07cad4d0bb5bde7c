"""The interface of back ends for deltas, and their jobs. Loads neither numba nor torch."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from ...shm.errors import FormatError
from ...shm.region import Region
from .table import DeltaShape

BackendName = Literal["numba", "numpy", "torch"]
BACKEND_NAMES: tuple[BackendName, ...] = get_args(BackendName)

ITEM_BYTES = 2  # x, y and matrices are bfloat16
MAX_RANK = 256


@dataclass(frozen=True, slots=True)
class DeltaJob:
    """Tokens of one (layer, input group) of one adapter. Addresses are of this process.

    x: bfloat16 [num_tokens, in features]; y: bfloat16 [num_tokens, padded columns of all
    targets], which is written and never read. Strides are in bytes from one token to the next.
    """

    region: Region
    region_address: int
    x_address: int
    x_stride_bytes: int
    y_address: int
    y_stride_bytes: int
    num_tokens: int


class DeltaBackend(Protocol):
    """Computes deltas on the calling thread. Owns scratch memory: one per thread."""

    name: str

    def compute(self, job: DeltaJob) -> None:
        """Write y = scaling * (x A^T) B^T of every target of the region, side by side.

        Columns of a target of rank 0 become zeros. Sums are float32.
        """


def shape_of(region: Region, num_tokens: int) -> DeltaShape:
    """The shape of a job, which determines its time.

    Raises ``FormatError`` if workers do not support the region: they need bfloat16, and ranks up to
    256.
    """
    if region.item_bytes != ITEM_BYTES:
        raise FormatError(f"workers need matrices of 2 bytes a value, not {region.item_bytes}")
    largest = max(target.rank for target in region.targets)
    if largest > MAX_RANK:
        raise FormatError(f"workers compute ranks up to {MAX_RANK}, not {largest}")
    num_values = sum(t.rank * (region.in_features + t.padded_columns) for t in region.targets)
    return DeltaShape(num_tokens, region.rank_sum, num_values)


class _Foreign:
    """Borrowed memory for ``np.asarray``: cheaper than an object of ctypes per job."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": "<u2",
            "version": 3,
        }


def rows_at(address: int, num_rows: int, num_columns: int, stride_bytes: int) -> np.ndarray:
    """The uint16 [num_rows, num_columns] at an address, writable, without a copy."""
    return np.asarray(_Foreign(address, (num_rows, num_columns), (stride_bytes, ITEM_BYTES)))


def values_at(address: int, shape: tuple[int, ...]) -> np.ndarray:
    """The contiguous uint16 array at an address, writable, without a copy."""
    strides = tuple(ITEM_BYTES * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return np.asarray(_Foreign(address, shape, strides))


class Scratch:
    """Reusable arrays that grow and never shrink, so jobs of known shapes allocate nothing."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def take(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
        """An array with arbitrary contents, valid until the next call with this name."""
        count = int(np.prod(shape))
        array = self._arrays.get(name)
        if array is None or array.size < count:
            array = self._arrays[name] = np.empty(count, dtype)
        assert array.dtype == dtype, (name, array.dtype)
        return array[:count].reshape(shape)
