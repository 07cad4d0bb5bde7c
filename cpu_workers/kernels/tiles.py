"""Register tiles of LoRA products: LLVM code for a few tokens times a few ranks or columns.

The first argument of a tile, a *format tag* of ``layout``, selects code by its type. Addresses and
strides are in bytes.

numba's cache looks for changes at the file of a kernel alone. So the ``TILES_DIGEST`` of kernels
names the content of ``compiled``, ``emitter``, ``layout``, ``token_blocks`` and both files of
tiles; a test holds it, and a change here thereby becomes a change there.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .emitter import F32, F32X16, I16X16, I32, I32X16, I64, VECTOR_BYTES, Emitter
from .layout import COLUMNS_PER_GROUP, RANKS_PER_TILE


def _make_shrink(num_tokens: int, num_tiles: int) -> Any:
    """h[token, rank] = scaling * sum over in of x[token, in] A[rank, in], for one register tile.

    One sum for each, in every tile: what a token gets must not depend on who comes with it.
    """

    @intrinsic
    def shrink(
        typingctx: Any,
        tag: types.Type,
        a: types.Type,
        tile_bytes: types.Type,
        x: types.Type,
        x_stride: types.Type,
        steps: types.Type,
        scaling: types.Type,
        h: types.Type,
        h_stride: types.Type,
    ) -> tuple[Any, Any]:
        address = types.int64
        signature = types.void(
            tag, address, address, address, address, address, types.float32, address, address
        )

        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]
        ) -> Any:
            emit = Emitter(builder, signature.args[0])
            _, a, tile_bytes, x, x_stride, steps, scaling, h, h_stride = args
            tiles = [emit.offset(a, builder.mul(tile_bytes, I64(g))) for g in range(num_tiles)]
            tokens = [emit.offset(x, builder.mul(x_stride, I64(t))) for t in range(num_tokens)]

            def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                results = []
                if num_tiles > 1:  # the next ranks; those of one tile are the last
                    for tile in tiles:
                        ahead = builder.add(tile, builder.mul(tile_bytes, I64(num_tiles)))
                        emit.prefetch(emit.offset(ahead, index, VECTOR_BYTES))
                weights = [
                    emit.operands(emit.load(emit.offset(tile, index, VECTOR_BYTES), I32X16))
                    for tile in tiles
                ]
                for t, token in enumerate(tokens):
                    unit = emit.load(emit.offset(token, index, 8), I64)
                    values = emit.operands(builder.bitcast(emit.splat(unit, 8), I32X16))
                    for g, weight in enumerate(weights):
                        total = totals[t * num_tiles + g]
                        results.append(emit.multiply_add(weight, values, total))
                return results

            totals = emit.loop(steps, num_tokens * num_tiles, body)
            scale = emit.splat(scaling, RANKS_PER_TILE)
            undefined = ir.Constant(F32X16, ir.Undefined)
            lanes = ir.VectorType(I32, RANKS_PER_TILE)
            even = ir.Constant(lanes, list(range(0, 16, 2)))
            odd = ir.Constant(lanes, list(range(1, 16, 2)))
            for t in range(num_tokens):
                for g in range(num_tiles):
                    total = totals[t * num_tiles + g]
                    both = builder.fadd(
                        builder.shuffle_vector(total, undefined, even),
                        builder.shuffle_vector(total, undefined, odd),
                    )
                    target = emit.offset(h, builder.mul(h_stride, I64(t)))
                    emit.store(
                        builder.fmul(both, scale), emit.offset(target, g * RANKS_PER_TILE * 4)
                    )
            return context.get_dummy_value()

        return signature, codegen

    return shrink


def _make_expand(num_tokens: int, num_groups: int, *, is_stored: bool = False) -> Any:
    """y[token, column] += sum over ranks of h[token, rank] B[column, rank], one register tile.

    ``is_stored``: y is bfloat16 and written instead of added to; what it held is not read.
    """

    @intrinsic
    def expand(
        typingctx: Any,
        tag: types.Type,
        b: types.Type,
        group_bytes: types.Type,
        h: types.Type,
        h_stride: types.Type,
        steps: types.Type,
        y: types.Type,
        y_stride: types.Type,
    ) -> tuple[Any, Any]:
        address = types.int64
        signature = types.void(tag, address, address, address, address, address, address, address)

        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]
        ) -> Any:
            # h is float32, so the products are, too.
            emit = Emitter(builder, signature.args[0], is_float32_product=True)
            _, b, group_bytes, h, h_stride, steps, y, y_stride = args
            groups = [emit.offset(b, builder.mul(group_bytes, I64(g))) for g in range(num_groups)]
            tokens = [emit.offset(h, builder.mul(h_stride, I64(t))) for t in range(num_tokens)]
            ranks = 1 if emit.is_float32 else 2

            def body(step: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                # The next columns: runs of B are too short for the machine to guess what follows.
                if num_groups > 1:
                    for group in groups:
                        ahead = builder.add(group, builder.mul(group_bytes, I64(num_groups)))
                        emit.prefetch(emit.offset(ahead, step, VECTOR_BYTES))
                weights = [
                    emit.operands(emit.load(emit.offset(group, step, VECTOR_BYTES), I32X16))
                    for group in groups
                ]
                results = []
                for t, token in enumerate(tokens):
                    first = emit.offset(token, step, 4 * ranks)
                    values = tuple(
                        emit.splat(emit.load(emit.offset(first, 4 * r), F32), 16)
                        for r in range(ranks)
                    )
                    for g, weight in enumerate(weights):
                        total = totals[t * num_groups + g]
                        results.append(emit.multiply_add(weight, values, total))
                return results

            totals = emit.loop(steps, num_tokens * num_groups, body)
            column_bytes = COLUMNS_PER_GROUP * (4 if emit.is_float32 else 2)
            for t in range(num_tokens):
                target = emit.offset(y, builder.mul(y_stride, I64(t)))
                for g in range(num_groups):
                    columns = emit.offset(target, g * column_bytes)
                    if is_stored:
                        emit.store_bfloat16(totals[t * num_groups + g], columns)
                    else:
                        emit.add_rounded(columns, totals[t * num_groups + g])
            return context.get_dummy_value()

        return signature, codegen

    return expand


@intrinsic
def store_zeros(typingctx: Any, address: types.Type) -> tuple[Any, Any]:
    """Write zeros to the 16 bfloat16 of a group of columns at ``address``."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        zeros = ir.Constant(I16X16, [0] * COLUMNS_PER_GROUP)
        Emitter(builder, types.uint16).store(zeros, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _make_load(result: Any, kind: ir.Type, item_bytes: int) -> Any:
    """Read address[index]; raw addresses spare the cost of array objects at every call."""

    @intrinsic
    def load(typingctx: Any, address: types.Type, index: types.Type) -> tuple[Any, Any]:
        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]
        ) -> Any:
            offset = builder.mul(args[1], I64(item_bytes))
            value = Emitter(builder, types.uint16).load(builder.add(args[0], offset), kind)
            return builder.sext(value, I64) if result == types.int64 else value

        return result(types.int64, types.int64), codegen

    return load


int32_at = _make_load(types.int64, I32, 4)
int64_at = _make_load(types.int64, I64, 8)
float32_at = _make_load(types.float32, F32, 4)

shrink_8x2, shrink_8x1 = _make_shrink(8, 2), _make_shrink(8, 1)
shrink_4x2, shrink_4x1 = _make_shrink(4, 2), _make_shrink(4, 1)
shrink_2x2, shrink_2x1 = _make_shrink(2, 2), _make_shrink(2, 1)
shrink_1x2, shrink_1x1 = _make_shrink(1, 2), _make_shrink(1, 1)
expand_4x4, expand_4x1 = _make_expand(4, 4), _make_expand(4, 1)
expand_2x4, expand_2x1 = _make_expand(2, 4), _make_expand(2, 1)
expand_1x4, expand_1x1 = _make_expand(1, 4), _make_expand(1, 1)
store_4x4, store_4x1 = _make_expand(4, 4, is_stored=True), _make_expand(4, 1, is_stored=True)
store_2x4, store_2x1 = _make_expand(2, 4, is_stored=True), _make_expand(2, 1, is_stored=True)
store_1x4, store_1x1 = _make_expand(1, 4, is_stored=True), _make_expand(1, 1, is_stored=True)
