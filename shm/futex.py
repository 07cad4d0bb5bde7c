"""Sleeping on a word of shared memory until its sleepers are woken: futex(2), compiled.

The kernel compares the word with the value that the sleeper saw, so a change before the sleep is
not missed. There is nothing to create or pass on, and a killed sleeper leaves nothing behind. A
semaphore would have a name in the file system, or keep counting dead sleepers.
"""

import platform
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .kept_code import keeps_code

_KEPT = keeps_code(__file__)

_I64 = ir.IntType(64)

# Not the private kind, which finds sleepers only by their address in one process.
_WAIT, _WAKE = 0, 1
_NUMBERS = {"x86_64": 202, "AMD64": 202}
_COMMON_NUMBER = 98  # of aarch64, and of all later machines


def _emit_futex(
    builder: ir.IRBuilder, address: ir.Value, operation: int, value: ir.Value, timeout: ir.Value
) -> ir.Value:
    function_type = ir.FunctionType(_I64, [_I64] * 7)
    call = builder.module.globals.get("syscall") or ir.Function(builder.module, function_type, "syscall")
    number = _NUMBERS.get(platform.machine(), _COMMON_NUMBER)
    return builder.call(call, [_I64(number), address, _I64(operation), value, timeout, _I64(0), _I64(0)])


@intrinsic
def _futex_wait(typing_context: Any, address: Any, seen: Any, timeout_ns: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        timespec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        billion = _I64(10**9)
        duration = builder.insert_value(
            ir.Constant(ir.ArrayType(_I64, 2), ir.Undefined), builder.sdiv(args[2], billion), 0
        )
        builder.store(builder.insert_value(duration, builder.srem(args[2], billion), 1), timespec)
        return _emit_futex(
            builder, args[0], _WAIT, builder.zext(args[1], _I64), builder.ptrtoint(timespec, _I64)
        )

    return types.int64(types.int64, types.int32, types.int64), generate


@intrinsic
def _futex_wake(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _emit_futex(builder, args[0], _WAKE, _I64(2**31 - 1), _I64(0))

    return types.int64(types.int64), generate


@numba.njit("void(int64, int32, int64)", nogil=True, cache=_KEPT)
def sleep_on(address: int, seen: int, timeout_ns: int) -> None:
    """Sleep while the 4-byte word at ``address`` is ``seen``, until woken or ``timeout_ns``.

    Returns at once if it has another value, and possibly without reason: the caller checks again.
    """
    _futex_wait(address, seen, timeout_ns)


@numba.njit("int64(int64)", nogil=True, cache=_KEPT)
def wake(address: int) -> int:
    """Wake all sleepers on the word at ``address``, in all processes; returns their number."""
    return int(_futex_wake(address))
