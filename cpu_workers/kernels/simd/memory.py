"""Raw memory in numba kernels: values at addresses, copies, and a shared counter.

Addresses are integers in bytes; the caller keeps the memory alive. Raw addresses avoid the cost of
array objects at every call.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .emitter import F32, I32, I64, Emitter
from .intrinsics import ANY_FORMAT, emits

_BYTES = ir.IntType(8).as_pointer()


def _make_load(result: types.Type, kind: ir.Type, item_bytes: int) -> Any:
    @emits("address index", tag=ANY_FORMAT, result=result)
    def load(emit: Emitter, address: ir.Value, index: ir.Value) -> ir.Value:
        """Read address[index]."""
        value = emit.load(emit.offset(address, index, item_bytes), kind)
        return emit.builder.sext(value, I64) if result == types.int64 else value

    return load


def _make_store(given: types.Type, kind: ir.Type, item_bytes: int) -> Any:
    @emits("address index value", tag=ANY_FORMAT, value=given)
    def store(emit: Emitter, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
        """Write address[index]."""
        written = emit.builder.trunc(value, kind) if kind == I32 else value
        emit.store(written, emit.offset(address, index, item_bytes))

    return store


int32_at = _make_load(types.int64, I32, 4)
int64_at = _make_load(types.int64, I64, 8)
float32_at = _make_load(types.float32, F32, 4)
store_int32 = _make_store(types.int64, I32, 4)
store_int64 = _make_store(types.int64, I64, 8)
store_float32 = _make_store(types.float32, F32, 4)


@emits("address", tag=ANY_FORMAT, result=types.voidptr)
def pointer(emit: Emitter, address: ir.Value) -> ir.Value:
    """For ``numba.carray``."""
    return emit.builder.inttoptr(address, _BYTES)


@emits("target source num_bytes", tag=ANY_FORMAT)
def copy_bytes(emit: Emitter, target: ir.Value, source: ir.Value, num_bytes: ir.Value) -> None:
    """Copy memory that does not overlap."""
    emit.copy(target, source, num_bytes)


@emits("address num_bytes", tag=ANY_FORMAT)
def clear_bytes(emit: Emitter, address: ir.Value, num_bytes: ir.Value) -> None:
    """Write zeros."""
    cgutils.memset(emit.builder, emit.builder.inttoptr(address, _BYTES), num_bytes, 0)


@emits("address", tag=ANY_FORMAT, result=types.int64)
def next_number(emit: Emitter, address: ir.Value) -> ir.Value:
    """Return the int64 at ``address`` and increment it, atomically between threads."""
    place = emit.builder.inttoptr(address, I64.as_pointer())
    return emit.builder.atomic_rmw("add", place, I64(1), "monotonic")
