"""Register tiles of LoRA products: LLVM code for a few tokens times a few ranks or columns.

Vectors are 64 bytes, which LLVM cuts to what the machine has. The first argument of a tile, a
*format tag* of ``layout``, selects code by its type. Addresses and strides are in bytes.

numba's cache looks for changes at the file of a kernel alone. So ``lora.TILES_DIGEST`` names this
file's content; a test holds it, and a change here thereby becomes a change there.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .layout import COLUMNS_PER_GROUP, RANKS_PER_TILE

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32X16 = ir.VectorType(_F32, 16)
_I32X16 = ir.VectorType(_I32, 16)
_I16X16 = ir.VectorType(ir.IntType(16), 16)

VECTOR_BYTES = 64


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


_BF16X32 = ir.VectorType(_Bfloat(), 32)


class _Emitter:
    """Vector instructions on one LLVM builder, for one format tag."""

    def __init__(self, builder: ir.IRBuilder, tag: types.Type) -> None:
        self.builder = builder
        self.is_float32 = tag == types.float32
        self.has_dot = tag == types.int16

    def load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=2)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=2)

    def offset(self, address: ir.Value, index: ir.Value | int, scale: int = 1) -> ir.Value:
        if isinstance(index, int):
            return self.builder.add(address, _I64(index * scale))
        return self.builder.add(address, self.builder.mul(index, _I64(scale)))

    def splat(self, scalar: ir.Value, lanes: int) -> ir.Value:
        vector = ir.VectorType(scalar.type, lanes)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
        mask = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)

    def call(self, name: str, result: ir.Type, values: list[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(result, [value.type for value in values])
        function = self.builder.module.globals.get(name)
        if function is None:
            function = ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, values)

    def fma(self, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
        return self.call("llvm.fma.v16f32", _F32X16, [a, b, total])

    def halves(self, bits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The even and the odd bfloat16 of 32, as float32."""
        shift = ir.Constant(_I32X16, [16] * 16)
        mask = ir.Constant(_I32X16, [0xFFFF0000] * 16)
        even = self.builder.bitcast(self.builder.shl(bits, shift), _F32X16)
        return even, self.builder.bitcast(self.builder.and_(bits, mask), _F32X16)

    def operands(self, bits: ir.Value) -> tuple[ir.Value, ...]:
        """What ``multiply_add`` takes, from the 64 bytes of 16 pairs or 16 floats."""
        if self.has_dot:
            return (self.builder.bitcast(bits, _BF16X32),)
        if self.is_float32:
            return (self.builder.bitcast(bits, _F32X16),)
        return self.halves(bits)

    def multiply_add(
        self, a: tuple[ir.Value, ...], b: tuple[ir.Value, ...], total: ir.Value
    ) -> ir.Value:
        if self.has_dot:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return self.call(name, _F32X16, [total, a[0], b[0]])
        for left, right in zip(a, b, strict=True):
            total = self.fma(left, right, total)
        return total

    def loop(
        self,
        count: ir.Value,
        totals: int,
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    ) -> list[ir.Value]:
        """Run ``body(index, totals) -> totals`` for index < count (at least once)."""
        builder = self.builder
        before = builder.block
        block = builder.append_basic_block("products")
        after = builder.append_basic_block("sums")
        builder.branch(block)
        builder.position_at_end(block)
        index = builder.phi(_I64)
        phis = [builder.phi(_F32X16) for _ in range(totals)]
        index.add_incoming(_I64(0), before)
        for phi in phis:
            phi.add_incoming(ir.Constant(_F32X16, [0.0] * 16), before)
        results = body(index, list(phis))
        following = builder.add(index, _I64(1))
        index.add_incoming(following, builder.block)
        for phi, result in zip(phis, results, strict=True):
            phi.add_incoming(result, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), block, after)
        builder.position_at_end(after)
        return results

    def add_rounded(self, address: ir.Value, total: ir.Value) -> None:
        """Add 16 float32 to the 16 values of y at ``address``; round to nearest even."""
        builder = self.builder
        if self.is_float32:
            self.store(builder.fadd(self.load(address, _F32X16), total), address)
            return
        sixteen = ir.Constant(_I32X16, [16] * 16)
        old = builder.shl(builder.zext(self.load(address, _I16X16), _I32X16), sixteen)
        new = builder.fadd(builder.bitcast(old, _F32X16), total)
        bits = builder.bitcast(new, _I32X16)
        odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(_I32X16, [1] * 16))
        half = builder.add(odd, ir.Constant(_I32X16, [0x7FFF] * 16))
        rounded = builder.add(bits, half)
        quiet = builder.or_(bits, ir.Constant(_I32X16, [0x400000] * 16))
        chosen = builder.select(builder.fcmp_unordered("uno", new, new), quiet, rounded)
        self.store(builder.trunc(builder.lshr(chosen, sixteen), _I16X16), address)


def _make_shrink(num_tokens: int, num_tiles: int) -> Any:
    """h[token, rank] = scaling * sum over in of x[token, in] A[rank, in], for one register tile."""
    # Sums of few tiles would wait for one another; independent ones hide the latency.
    unroll = max(1, 4 // (num_tokens * num_tiles))

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
            emit = _Emitter(builder, signature.args[0])
            _, a, tile_bytes, x, x_stride, steps, scaling, h, h_stride = args
            tiles = [emit.offset(a, builder.mul(tile_bytes, _I64(g))) for g in range(num_tiles)]
            tokens = [emit.offset(x, builder.mul(x_stride, _I64(t))) for t in range(num_tokens)]

            def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                results = []
                for u in range(unroll):
                    step = builder.add(builder.mul(index, _I64(unroll)), _I64(u))
                    weights = [
                        emit.operands(emit.load(emit.offset(tile, step, VECTOR_BYTES), _I32X16))
                        for tile in tiles
                    ]
                    for t, token in enumerate(tokens):
                        unit = emit.load(emit.offset(token, step, 8), _I64)
                        bits = builder.bitcast(emit.splat(unit, 8), _I32X16)
                        values = emit.operands(bits)
                        for g, weight in enumerate(weights):
                            slot = (u * num_tokens + t) * num_tiles + g
                            results.append(emit.multiply_add(weight, values, totals[slot]))
                return results

            per_step = num_tokens * num_tiles
            count = builder.sdiv(steps, _I64(unroll))
            totals = emit.loop(count, per_step * unroll, body)
            scale = emit.splat(scaling, RANKS_PER_TILE)
            undefined = ir.Constant(_F32X16, ir.Undefined)
            lanes = ir.VectorType(_I32, RANKS_PER_TILE)
            even = ir.Constant(lanes, list(range(0, 16, 2)))
            odd = ir.Constant(lanes, list(range(1, 16, 2)))
            for t in range(num_tokens):
                for g in range(num_tiles):
                    total = totals[t * num_tiles + g]
                    for u in range(1, unroll):
                        total = builder.fadd(total, totals[u * per_step + t * num_tiles + g])
                    both = builder.fadd(
                        builder.shuffle_vector(total, undefined, even),
                        builder.shuffle_vector(total, undefined, odd),
                    )
                    target = emit.offset(h, builder.mul(h_stride, _I64(t)))
                    emit.store(
                        builder.fmul(both, scale), emit.offset(target, g * RANKS_PER_TILE * 4)
                    )
            return context.get_dummy_value()

        return signature, codegen

    return shrink


def _make_expand(num_tokens: int, num_groups: int) -> Any:
    """y[token, column] += sum over ranks of h[token, rank] B[column, rank], one register tile."""

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
            tag = signature.args[0]
            emit = _Emitter(builder, types.uint16 if tag == types.int16 else tag)
            _, b, group_bytes, h, h_stride, steps, y, y_stride = args
            groups = [emit.offset(b, builder.mul(group_bytes, _I64(g))) for g in range(num_groups)]
            tokens = [emit.offset(h, builder.mul(h_stride, _I64(t))) for t in range(num_tokens)]
            ranks = 1 if emit.is_float32 else 2

            def body(step: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                weights = [
                    emit.operands(emit.load(emit.offset(group, step, VECTOR_BYTES), _I32X16))
                    for group in groups
                ]
                results = []
                for t, token in enumerate(tokens):
                    first = emit.offset(token, step, 4 * ranks)
                    values = tuple(
                        emit.splat(emit.load(emit.offset(first, 4 * r), _F32), 16)
                        for r in range(ranks)
                    )
                    for g, weight in enumerate(weights):
                        total = totals[t * num_groups + g]
                        results.append(emit.multiply_add(weight, values, total))
                return results

            totals = emit.loop(steps, num_tokens * num_groups, body)
            column_bytes = COLUMNS_PER_GROUP * (4 if emit.is_float32 else 2)
            for t in range(num_tokens):
                target = emit.offset(y, builder.mul(y_stride, _I64(t)))
                for g in range(num_groups):
                    emit.add_rounded(
                        emit.offset(target, g * column_bytes), totals[t * num_groups + g]
                    )
            return context.get_dummy_value()

        return signature, codegen

    return expand


def _make_load(result: Any, kind: ir.Type, item_bytes: int) -> Any:
    """Read address[index]; raw addresses spare the cost of array objects at every call."""

    @intrinsic
    def load(typingctx: Any, address: types.Type, index: types.Type) -> tuple[Any, Any]:
        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]
        ) -> Any:
            offset = builder.mul(args[1], _I64(item_bytes))
            value = _Emitter(builder, types.uint16).load(builder.add(args[0], offset), kind)
            return builder.sext(value, _I64) if result == types.int64 else value

        return result(types.int64, types.int64), codegen

    return load


int32_at = _make_load(types.int64, _I32, 4)
int64_at = _make_load(types.int64, _I64, 8)
float32_at = _make_load(types.float32, _F32, 4)

shrink_8x2, shrink_8x1 = _make_shrink(8, 2), _make_shrink(8, 1)
shrink_4x2, shrink_4x1 = _make_shrink(4, 2), _make_shrink(4, 1)
shrink_1x2, shrink_1x1 = _make_shrink(1, 2), _make_shrink(1, 1)
expand_4x4, expand_4x1 = _make_expand(4, 4), _make_expand(4, 1)
expand_1x4, expand_1x1 = _make_expand(1, 4), _make_expand(1, 1)
