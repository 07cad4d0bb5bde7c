"""Vector instructions on one LLVM builder: what the register tiles of products are made of.

Vectors are 64 bytes, which LLVM cuts to what the machine has. A *format tag* of ``layout`` selects
code by its type. Addresses are integers in bytes.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types

F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32X16 = ir.VectorType(F32, 16)
I32X16 = ir.VectorType(I32, 16)
I16X16 = ir.VectorType(I16, 16)

VECTOR_BYTES = 64


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BF16X16 = ir.VectorType(_Bfloat(), 16)
BF16X32 = ir.VectorType(_Bfloat(), 32)


class Emitter:
    """Vector instructions on one LLVM builder, for one format tag.

    ``is_float32_product``: multiply in float32 although the machine could do pairs of bfloat16.
    """

    def __init__(
        self, builder: ir.IRBuilder, tag: types.Type, *, is_float32_product: bool = False
    ) -> None:
        self.builder = builder
        self.is_float32 = tag == types.float32
        self.has_rounding = tag == types.int16  # AVX512_BF16 rounds, too
        self.has_dot = self.has_rounding and not is_float32_product

    def load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        """A value of ``kind`` from ``address``, which need not be aligned."""
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=2)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        """Write ``value`` to ``address``, which need not be aligned."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=2)

    def prefetch(self, address: ir.Value) -> None:
        """Ask for the cache line at ``address``, which need not be valid."""
        line = self.builder.inttoptr(address, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [line.type, I32, I32, I32])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
        # To read, into the second-level cache, data.
        self.builder.call(function, [line, I32(0), I32(2), I32(1)])

    def offset(self, address: ir.Value, index: ir.Value | int, scale: int = 1) -> ir.Value:
        """The address ``index`` * ``scale`` bytes further."""
        if isinstance(index, int):
            return self.builder.add(address, I64(index * scale))
        return self.builder.add(address, self.builder.mul(index, I64(scale)))

    def splat(self, scalar: ir.Value, lanes: int) -> ir.Value:
        """A vector of ``lanes`` times ``scalar``."""
        vector = ir.VectorType(scalar.type, lanes)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
        mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)

    def call(self, name: str, result: ir.Type, values: list[ir.Value]) -> ir.Value:
        """Call the LLVM function ``name``, declared where it is not yet."""
        kind = ir.FunctionType(result, [value.type for value in values])
        function = self.builder.module.globals.get(name)
        if function is None:
            function = ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, values)

    def fma(self, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
        """Give a * b + total for 16 float32, rounded once."""
        return self.call("llvm.fma.v16f32", F32X16, [a, b, total])

    def halves(self, bits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The even and the odd bfloat16 of 32, as float32."""
        shift = ir.Constant(I32X16, [16] * 16)
        mask = ir.Constant(I32X16, [0xFFFF0000] * 16)
        even = self.builder.bitcast(self.builder.shl(bits, shift), F32X16)
        return even, self.builder.bitcast(self.builder.and_(bits, mask), F32X16)

    def operands(self, bits: ir.Value) -> tuple[ir.Value, ...]:
        """What ``multiply_add`` takes, from the 64 bytes of 16 pairs or 16 floats."""
        if self.has_dot:
            return (self.builder.bitcast(bits, BF16X32),)
        if self.is_float32:
            return (self.builder.bitcast(bits, F32X16),)
        return self.halves(bits)

    def multiply_add(
        self, a: tuple[ir.Value, ...], b: tuple[ir.Value, ...], total: ir.Value
    ) -> ir.Value:
        """Give a * b + total for what ``operands`` returns; pairs of bfloat16 add two products."""
        if self.has_dot:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return self.call(name, F32X16, [total, a[0], b[0]])
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
        index = builder.phi(I64)
        phis = [builder.phi(F32X16) for _ in range(totals)]
        index.add_incoming(I64(0), before)
        for phi in phis:
            phi.add_incoming(ir.Constant(F32X16, [0.0] * 16), before)
        results = body(index, list(phis))
        following = builder.add(index, I64(1))
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
            self.store(builder.fadd(self.load(address, F32X16), total), address)
            return
        sixteen = ir.Constant(I32X16, [16] * 16)
        old = builder.shl(builder.zext(self.load(address, I16X16), I32X16), sixteen)
        self.store_bfloat16(builder.fadd(builder.bitcast(old, F32X16), total), address)

    def store_bfloat16(self, value: ir.Value, address: ir.Value) -> None:
        """Write 16 float32 as bfloat16, rounded to nearest even; NaN stays NaN."""
        builder = self.builder
        if self.has_rounding:
            # One instruction instead of ten; values below 2^-126 become zero.
            self.store(builder.fptrunc(value, BF16X16), address)
            return
        sixteen = ir.Constant(I32X16, [16] * 16)
        bits = builder.bitcast(value, I32X16)
        odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(I32X16, [1] * 16))
        half = builder.add(odd, ir.Constant(I32X16, [0x7FFF] * 16))
        rounded = builder.add(bits, half)
        quiet = builder.or_(bits, ir.Constant(I32X16, [0x400000] * 16))
        chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
        self.store(builder.trunc(builder.lshr(chosen, sixteen), I16X16), address)
