"""Functions of numba that are called through their address."""

import numpy as np
from corun.cpu_workers.kernels.compiled import call_function, function_address
from corun.gpu.attention.memory_ops import store_float32
from numba import njit, types


@njit  # type: ignore[untyped-decorator]
def _store(tag: int, target: int, index: int, value: float) -> None:
    store_float32(target, index, np.float32(value + tag))


@njit  # type: ignore[untyped-decorator]
def _store_all(function: int, tag: int, target: int, count: int, value: float) -> None:
    for index in range(count):
        call_function(function, (tag, target, index, value + index))


def test_a_function_is_called_through_its_address() -> None:
    kinds = (types.int16, types.int64, types.int64, types.float64)
    function = function_address(_store, kinds)
    results = np.zeros(4, np.float32)
    _store_all(function, np.int16(100), results.ctypes.data, 3, 0.5)
    assert results.tolist() == [100.5, 101.5, 102.5, 0.0]
    assert function_address(_store, kinds) == function
