"""Words that processes share: acquire loads, release stores, fences, and a bounded spin.

All functions take raw addresses and are compiled, without the GIL, and callable from Python and
from other compiled functions. A plain load in a compiled loop would be moved out of the loop, which
then never ends, and only an acquire load orders the reads after it.

Values of words count up and wrap around: they are compared cyclically, by ``has_reached``.
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

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

# The clock is read only every few iterations: reading it costs as much as several pauses.
_PAUSES_PER_CLOCK = 32


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def _load_acquire_32(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = _pointer(builder, args[0], _I32)
        return builder.load_atomic(pointer, "acquire", 4, typ=_I32)

    return types.int32(types.int64), generate


@intrinsic
def _store_release_32(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.store_atomic(args[1], _pointer(builder, args[0], _I32), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), generate


@intrinsic
def _load_acquire_64(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = _pointer(builder, args[0], _I64)
        return builder.load_atomic(pointer, "acquire", 8, typ=_I64)

    return types.int64(types.int64), generate


@intrinsic
def _store_release_64(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.store_atomic(args[1], _pointer(builder, args[0], _I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _compare_exchange_32(typing_context: Any, address: Any, seen: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        place = _pointer(builder, args[0], _I32)
        pair = builder.cmpxchg(place, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int32, types.int32), generate


@intrinsic
def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _external(builder: ir.IRBuilder, name: str, result: ir.Type, kinds: list[ir.Type]) -> ir.Value:
    return builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(result, kinds), name
    )


def emit_pause(builder: ir.IRBuilder, machine: str) -> None:
    """Tell the core that a loop waits, if ``machine`` has an instruction for it."""
    if machine in {"x86_64", "AMD64"}:
        builder.call(_external(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
    elif machine in {"aarch64", "arm64"}:
        # 1 means YIELD.
        builder.call(_external(builder, "llvm.aarch64.hint", ir.VoidType(), [_I32]), [_I32(1)])
    # Other machines spin without the hint.


@intrinsic
def _pause(typing_context: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        emit_pause(builder, platform.machine())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _monotonic_ns(typing_context: Any) -> Any:
    """The clock of ``time.monotonic_ns``, by libc, so that it can be cached."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        timespec = ir.ArrayType(_I64, 2)
        read = _external(builder, "clock_gettime", _I32, [_I32, timespec.as_pointer()])
        # At the function's entry: in a loop, every iteration would take more of the stack.
        slot = cgutils.alloca_once(builder, timespec)
        builder.call(read, [_I32(1), slot])
        value = builder.load(slot)
        seconds = builder.extract_value(value, 0)
        return builder.add(builder.mul(seconds, _I64(10**9)), builder.extract_value(value, 1))

    return types.int64(), generate


@numba.njit("int32(int64)", nogil=True, cache=_KEPT)
def load_acquire(address: int) -> int:
    """The 4-byte word at ``address``; what its writer wrote before it is visible afterwards."""
    return int(_load_acquire_32(address))


@numba.njit("void(int64, int32)", nogil=True, cache=_KEPT)
def store_release(address: int, value: int) -> None:
    """Store to the 4-byte word at ``address``, after everything that this thread wrote before.

    The fence is for streaming stores, which memory copies may use and which release does not order.
    """
    _fence()
    _store_release_32(address, value)


@numba.njit("int64(int64)", nogil=True, cache=_KEPT)
def load_acquire_64(address: int) -> int:
    """``load_acquire`` for 8 bytes."""
    return int(_load_acquire_64(address))


@numba.njit("void(int64, int64)", nogil=True, cache=_KEPT)
def store_release_64(address: int, value: int) -> None:
    """``store_release`` for 8 bytes."""
    _fence()
    _store_release_64(address, value)


@numba.njit("boolean(int64, int32, int32)", nogil=True, cache=_KEPT)
def compare_exchange(address: int, seen: int, value: int) -> bool:
    """Store ``value`` to the 4-byte word at ``address`` if it is still ``seen``; whether it was.

    A full fence.
    """
    return bool(_compare_exchange_32(address, seen, value))


@numba.njit("void()", nogil=True, cache=_KEPT)
def fence() -> None:
    """Order all accesses before it with all accesses after it, including streaming stores."""
    _fence()


@numba.njit("void()", nogil=True, cache=_KEPT)
def pause() -> None:
    """Tell the core that it spins, so that its sibling gets the issue slots."""
    _pause()


@numba.njit("int64()", nogil=True, cache=_KEPT)
def monotonic_ns() -> int:
    """The clock of ``time.monotonic_ns``."""
    return int(_monotonic_ns())


@numba.njit("boolean(int32, int32)", nogil=True, cache=_KEPT)
def has_reached(value: int, target: int) -> bool:
    """Whether ``value`` is ``target`` or up to 2^31 - 1 steps past it, cyclically."""
    return bool(numba.int32(value - target) >= 0)


@numba.njit("boolean(int64, int32, int64)", nogil=True, cache=_KEPT)
def spin_until(address: int, target: int, timeout_ns: int) -> bool:
    """Spin until the word at ``address`` has reached ``target``; False after ``timeout_ns``."""
    if has_reached(_load_acquire_32(address), target):
        return True
    deadline = _monotonic_ns() + timeout_ns
    while True:
        for _ in range(_PAUSES_PER_CLOCK):
            _pause()
            if has_reached(_load_acquire_32(address), target):
                return True
        if _monotonic_ns() >= deadline:
            return False
