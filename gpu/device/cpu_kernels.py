"""Compiled steps of ``coexec.host_handover``: all take addresses, and run without the GIL."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...shm.atomics import store_release

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


@intrinsic
def _copy_bytes(typing_context: Any, destination: Any, source: Any, num_bytes: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointers = [builder.inttoptr(args[n], cgutils.voidptr_t) for n in (0, 1)]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    result = types.CPointer(types.uint16)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64), generate


@intrinsic
def _add_bfloat16(typing_context: Any, left: Any, right: Any) -> Any:
    """Bits of the sum of two bfloat16, rounded to nearest even as torch does; NaN stays NaN."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        wide = (builder.shl(builder.zext(bits, _I32), _I32(16)) for bits in args)
        total = builder.fadd(*(builder.bitcast(bits, _F32) for bits in wide))
        bits = builder.bitcast(total, _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
        quiet = builder.or_(bits, _I32(0x400000))
        chosen = builder.select(builder.fcmp_unordered("uno", total, total), quiet, rounded)
        return builder.trunc(builder.lshr(chosen, _I32(16)), _I16)

    return types.uint16(types.uint16, types.uint16), generate


@numba.njit("void(int64, int64, int64, int64, int32)", nogil=True, cache=True)
def send_bytes(destination: int, source: int, num_bytes: int, word: int, value: int) -> None:
    """Copy bytes, and store ``value`` to ``word`` for whoever reads them then."""
    _copy_bytes(destination, source, num_bytes)
    store_release(word, value)


@numba.njit("void(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def add_rows(
    sums: int, sums_stride: int, terms: int, terms_stride: int, num_rows: int, num_columns: int
) -> None:
    """Add bfloat16 rows to others, in place; strides in bytes."""
    for row in range(num_rows):
        total = numba.carray(_pointer(sums + row * sums_stride), num_columns, np.uint16)
        term = numba.carray(_pointer(terms + row * terms_stride), num_columns, np.uint16)
        for column in range(num_columns):
            total[column] = _add_bfloat16(total[column], term[column])
