"""Register tiles of dense products: LLVM code for a few tokens times 32 or 64 columns, AVX512_BF16.

Addresses and strides are in bytes. A change here must become a change of the kernels'
``TILES_DIGEST``: see ``tiles``.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .emitter import F32X16, I32, I32X16, I64, VECTOR_BYTES, Emitter
from .layout import COLUMNS_PER_GROUP, LINEAR_STEPS_UNROLLED

_PAIR_BYTES = 4  # two bfloat16 of x, which one instruction multiplies by those of 16 columns


def _make_product(num_tokens: int, num_groups: int, *, lines_ahead: int = 0) -> Any:
    """y[token, column] = bias[column] + sum over k of x[token, k] W[column, k], one register tile.

    Tokens behind ``last_token`` are computed and written as that one once more, so that few shapes
    serve any number of tokens. All shapes add in the same order: a token's result does not depend
    on how many are computed with it.

    ``lines_ahead``: for every LINEAR_STEPS_UNROLLED steps, ask for so many cache lines from
    ``ahead`` on, an address that need not be valid.
    """

    @intrinsic
    def product(
        typingctx: Any,
        weights: types.Type,
        group_bytes: types.Type,
        x: types.Type,
        x_stride: types.Type,
        steps: types.Type,
        bias: types.Type,
        y: types.Type,
        y_stride: types.Type,
        last_token: types.Type,
        ahead: types.Type,
    ) -> tuple[Any, Any]:
        signature = types.void(*[types.int64] * 10)

        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]
        ) -> Any:
            emit = Emitter(builder, types.int16)
            weights, group_bytes, x, x_stride, steps, bias, y, y_stride, last_token, ahead = args
            groups = [
                emit.offset(weights, builder.mul(group_bytes, I64(g))) for g in range(num_groups)
            ]
            rows = [
                builder.select(builder.icmp_signed("<", I64(t), last_token), I64(t), last_token)
                for t in range(num_tokens)
            ]
            tokens = [emit.offset(x, builder.mul(x_stride, row)) for row in rows]

            def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                results = totals
                asked = emit.offset(ahead, index, lines_ahead * VECTOR_BYTES)
                for line in range(lines_ahead):
                    emit.prefetch(emit.offset(asked, line * VECTOR_BYTES))
                for u in range(LINEAR_STEPS_UNROLLED):
                    step = builder.add(builder.mul(index, I64(LINEAR_STEPS_UNROLLED)), I64(u))
                    columns = [
                        emit.operands(emit.load(emit.offset(group, step, VECTOR_BYTES), I32X16))
                        for group in groups
                    ]
                    for t, token in enumerate(tokens):
                        pair = emit.load(emit.offset(token, step, _PAIR_BYTES), I32)
                        values = emit.operands(emit.splat(pair, 16))
                        for g, column in enumerate(columns):
                            slot = t * num_groups + g
                            results[slot] = emit.multiply_add(column, values, results[slot])
                return results

            count = builder.sdiv(steps, I64(LINEAR_STEPS_UNROLLED))
            totals = emit.loop(count, num_tokens * num_groups, body)
            for g in range(num_groups):
                added = emit.load(emit.offset(bias, g * VECTOR_BYTES), F32X16)
                for t, row in enumerate(rows):
                    total = builder.fadd(totals[t * num_groups + g], added)
                    target = emit.offset(y, builder.mul(y_stride, row))
                    emit.store_bfloat16(total, emit.offset(target, g * COLUMNS_PER_GROUP * 2))
            return context.get_dummy_value()

        return signature, codegen

    return product


product_1x4 = _make_product(1, 4)
product_2x4 = _make_product(2, 4)
product_4x4 = _make_product(4, 4)
product_8x2 = _make_product(8, 2)
# All weights of the next 32 columns are asked for during one block of tokens, or during two.
product_8x2_ahead_in_1 = _make_product(8, 2, lines_ahead=2 * LINEAR_STEPS_UNROLLED)
product_8x2_ahead_in_2 = _make_product(8, 2, lines_ahead=LINEAR_STEPS_UNROLLED)
