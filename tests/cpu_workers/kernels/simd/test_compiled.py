"""Functions of numba that are called by address."""

import numpy as np
from corun.cpu_workers.kernels.simd.compiled import address_of, call_function, function_address, part
from corun.cpu_workers.kernels.simd.memory import store_float32
from numba import njit, types


@part
def _store(tag: int, target: int, index: int, value: float, is_negative: bool) -> None:
    signed = -value if is_negative else value
    store_float32(target, index, np.float32(signed + tag))


@njit  # type: ignore[untyped-decorator]
def _store_all(function: int, tag: int, target: int, count: int) -> None:
    for index in range(count):
        call_function(function, (tag, target, index, 0.5 + index, index == 1))


@njit  # type: ignore[untyped-decorator]
def _find_and_store(target: int) -> None:
    first = (np.int16(100), target, 0, 0.5, False)  # constants are what they are a case of
    function = address_of(_store, first)
    call_function(function, first)
    call_function(function, (np.int16(100), target, 2, 2.5, False))


def test_python_finds_the_address() -> None:
    kinds = (types.int16, types.int64, types.int64, types.float64, types.boolean)
    function = function_address(_store, kinds)
    results = np.zeros(4, np.float32)
    _store_all(function, np.int16(100), results.ctypes.data, 3)
    assert results.tolist() == [100.5, 98.5, 102.5, 0.0]
    assert function_address(_store, kinds) == function


def test_a_kernel_finds_the_address() -> None:
    results = np.zeros(4, np.float32)
    _find_and_store(results.ctypes.data)
    assert results.tolist() == [100.5, 0.0, 102.5, 0.0]
