"""Scalar reads and writes of raw memory for numba kernels, and a shared counter.

Addresses are integers in bytes; whoever passes one keeps the memory alive.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .emitter import F32, I32, I64, Emitter

_ANY_FORMAT = types.uint16  # of an emitter whose format does not matter


def _make_store(given: Any, kind: ir.Type, item_bytes: int) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, index: Any, value: Any) -> tuple[Any, Any]:
        """Write address[index]."""

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            emit = Emitter(builder, _ANY_FORMAT)
            written = builder.trunc(args[2], kind) if kind == I32 else args[2]
            emit.store(written, emit.offset(args[0], args[1], item_bytes))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, given), codegen

    return store


store_int32 = _make_store(types.int64, I32, 4)
store_int64 = _make_store(types.int64, I64, 8)
store_float32 = _make_store(types.float32, F32, 4)


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> tuple[Any, Any]:
    """Copy memory that does not overlap."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to, origin = builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte)
        cgutils.raw_memcpy(builder, to, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def next_number(typing_context: Any, address: Any) -> tuple[Any, Any]:
    """Return the int64 at ``address`` and count it up, as one step even between threads."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, I64(1), "monotonic")

    return types.int64(types.int64), codegen
