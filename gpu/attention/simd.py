"""Vectors of 16 float32 for numba kernels: loads from raw addresses, arithmetic, reductions.

numba vectorises plain loops, but neither reductions over several rows at once nor exp. These
intrinsics emit LLVM vector operations instead. Owns no memory and knows nothing of attention.

Elements in memory are named by a *tag*, a scalar whose numba type is that of the element: float32,
or uint16 for the bits of a bfloat16. Addresses are integers and need no alignment beyond that of
the element; whoever passes one keeps the memory alive.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from . import vector_ir as vir
from .vector_ir import LANES

_FLOAT32_BYTES = 4


class VectorType(types.Type):
    """The numba type of a vector of 16 float32."""

    def __init__(self) -> None:
        super().__init__("float32x16")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, vir.VECTOR)


vector: Any = VectorType()
_ANY_TAG = None


def _is_bfloat16(tag: Any) -> bool:
    if tag == types.uint16:
        return True
    if tag == types.float32:
        return False
    raise TypeError(f"a tag is a float32 or uint16 scalar, not {tag}")


def _declare(result: Any, **arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a numba intrinsic of ``emit(builder, *values)``.

    ``arguments`` gives each parameter's name and numba type. One of type ``_ANY_TAG`` is a tag:
    it reaches ``emit`` as the keyword ``bfloat16``.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *given: Any) -> Any:
            expected = arguments.values()
            tags = [g for g, e in zip(given, expected, strict=True) if e is _ANY_TAG]
            options = {"bfloat16": _is_bfloat16(tags[0])} if tags else {}
            signature = result(*(e or g for g, e in zip(given, expected, strict=True)))

            def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                kept = [v for v, e in zip(values, arguments.values(), strict=True) if e]
                emitted = emit(builder, *kept, **options)
                return context.get_dummy_value() if emitted is None else emitted

            return signature, codegen

        parameters = ("typing_context", *arguments)
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in parameters]
        )
        return intrinsic(typed)

    return decorate


@_declare(vector, address=types.int64, tag=_ANY_TAG)
def load(builder: ir.IRBuilder, address: Any, *, bfloat16: bool) -> Any:
    """Sixteen elements from ``address``."""
    return vir.load(builder, address, bfloat16=bfloat16)


@_declare(vector, address=types.int64, count=types.int64, tag=_ANY_TAG)
def load_first(builder: ir.IRBuilder, address: Any, count: Any, *, bfloat16: bool) -> Any:
    """The first ``count`` < 16 elements; the other lanes are zero and not read."""
    return vir.load_first(builder, address, count, bfloat16=bfloat16)


@_declare(types.void, address=types.int64, value=vector, tag=_ANY_TAG)
def store(builder: ir.IRBuilder, address: Any, value: Any, *, bfloat16: bool) -> None:
    """Write sixteen elements, rounded to nearest even where they are bfloat16."""
    if bfloat16:
        value = vir.round_to_bfloat16(builder, value)
    target = vir.pointer(builder, address, value.type)
    builder.store(value, target, align=2 if bfloat16 else 4)


@_declare(types.void, address=types.int64, value=vector, count=types.int64, tag=_ANY_TAG)
def store_first(
    builder: ir.IRBuilder, address: Any, value: Any, count: Any, *, bfloat16: bool
) -> None:
    """Write the first ``count`` < 16 elements."""
    if bfloat16:
        value = vir.round_to_bfloat16(builder, value)
    vir.store_first(builder, address, value, count, align=2 if bfloat16 else 4)


@_declare(vector, scalar=types.float32)
def splat(builder: ir.IRBuilder, scalar: Any) -> Any:
    """All lanes ``scalar``."""
    return vir.splat(builder, scalar)


@_declare(types.float32, address=types.int64)
def load_float(builder: ir.IRBuilder, address: Any) -> Any:
    """One float32."""
    return builder.load(vir.pointer(builder, address, vir.F32), align=4)


@_declare(types.void, address=types.int64, value=types.float32)
def store_float(builder: ir.IRBuilder, address: Any, value: Any) -> None:
    """Write one float32."""
    builder.store(value, vir.pointer(builder, address, vir.F32), align=4)


@_declare(types.int64, address=types.int64)
def load_int32(builder: ir.IRBuilder, address: Any) -> Any:
    """One int32, as an int64."""
    return builder.sext(builder.load(vir.pointer(builder, address, vir.I32), align=4), vir.I64)


@_declare(types.int64, address=types.int64)
def load_int64(builder: ir.IRBuilder, address: Any) -> Any:
    """One int64."""
    return builder.load(vir.pointer(builder, address, vir.I64), align=8)


@_declare(types.void, target=types.int64, source=types.int64, num_bytes=types.int64)
def copy_bytes(builder: ir.IRBuilder, target: Any, source: Any, num_bytes: Any) -> None:
    """Copy memory that does not overlap."""
    byte = ir.IntType(8)
    destination, origin = vir.pointer(builder, target, byte), vir.pointer(builder, source, byte)
    cgutils.raw_memcpy(builder, destination, origin, num_bytes, 1)


@_declare(vector, a=vector, b=vector)
def add(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """A + b."""
    return builder.fadd(a, b)


@_declare(vector, a=vector, b=vector)
def subtract(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """A - b."""
    return builder.fsub(a, b)


@_declare(vector, a=vector, b=vector)
def multiply(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """A * b."""
    return builder.fmul(a, b)


@_declare(vector, a=vector, b=vector, c=vector)
def multiply_add(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """A * b + c, fused where the machine can."""
    return vir.multiply_add(builder, a, b, c)


@_declare(vector, x=vector)
def exp(builder: ir.IRBuilder, x: Any) -> Any:
    """e**x to 2 units in the last place; 0 below -87, clamped above 88; NaN stays NaN."""
    return vir.exp(builder, x)


@_declare(vector, x=vector)
def tanh(builder: ir.IRBuilder, x: Any) -> Any:
    """The hyperbolic tangent to 3e-7 relative; NaN stays NaN."""
    return vir.tanh(builder, x)


@_declare(types.float32, x=vector)
def first_lane(builder: ir.IRBuilder, x: Any) -> Any:
    """Lane 0."""
    return builder.extract_element(x, vir.I32(0))


@_declare(types.float32, x=vector)
def max_lane(builder: ir.IRBuilder, x: Any) -> Any:
    """The largest lane."""
    return vir.reduce_lanes(builder, x, lambda a, b: vir.maximum(builder, a, b))


@_declare(types.float32, x=vector)
def sum_lanes(builder: ir.IRBuilder, x: Any) -> Any:
    """The sum of all lanes."""
    return vir.reduce_lanes(builder, x, builder.fadd)


@_declare(vector, x=vector, count=types.int64)
def keep_first(builder: ir.IRBuilder, x: Any, count: Any) -> Any:
    """The first ``count`` lanes of x; the others -inf."""
    limit = vir.splat(builder, builder.trunc(count, vir.I32), like=vir.VECTOR_I32)
    kept = builder.icmp_signed("<", vir.lane_numbers(), limit)
    return builder.select(kept, x, vir.constant(float("-inf")))


@_declare(types.void, address=types.int64)
def prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Ask for the cache line at ``address`` to be brought into the second-level cache.

    The first level takes few requests at a time and stalls the kernel that asks for whole blocks.
    Any address is allowed.
    """
    byte_pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte_pointer] + [vir.I32] * 3)
    name = "llvm.prefetch.p0"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    pointer = builder.inttoptr(address, byte_pointer)
    read, second_level, data = vir.I32(0), vir.I32(2), vir.I32(1)
    builder.call(function, [pointer, read, second_level, data])


def _declare_scores(num_heads: int) -> Any:
    """A tile of dot products of ``num_heads`` float32 rows with 16 / ``num_heads`` other rows."""
    num_keys = LANES // num_heads

    @_declare(
        types.void,
        queries=types.int64,
        query_stride=types.int64,
        keys=types.int64,
        key_stride=types.int64,
        last_key=types.int64,
        dim=types.int64,
        scores=types.int64,
        tag=_ANY_TAG,
    )
    def score(builder: ir.IRBuilder, *values: Any, bfloat16: bool) -> None:
        """Write the products of each query with ``keys`` to 16-element rows of ``scores``.

        Strides are in bytes. Keys after ``last_key`` repeat it, so nothing behind it is read.
        Queries are float32, padded with zeros to a multiple of 16 elements.
        """
        queries, query_stride, keys, key_stride, last_key, dim, scores = values
        key_addresses = []
        for number in range(num_keys):
            index = vir.I64(number)
            index = builder.select(builder.icmp_signed("<", index, last_key), index, last_key)
            key_addresses.append(builder.add(keys, builder.mul(index, key_stride)))
        query_addresses = [
            builder.add(queries, builder.mul(query_stride, vir.I64(head)))
            for head in range(num_heads)
        ]
        sums = vir.dot_products(builder, query_addresses, key_addresses, dim, bfloat16=bfloat16)
        for head in range(num_heads):
            lanes = list(range(head * num_keys, (head + 1) * num_keys))
            part = vir.shuffle(builder, sums, sums, lanes)
            offset = vir.I64(head * LANES * _FLOAT32_BYTES)
            target = vir.pointer(builder, builder.add(scores, offset), part.type)
            builder.store(part, target, align=4)

    return score


score_1x16 = _declare_scores(1)
score_2x8 = _declare_scores(2)
score_4x4 = _declare_scores(4)
