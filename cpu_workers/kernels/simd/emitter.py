"""Vector instructions on one LLVM builder, from which the register tiles of products are built.

Vectors have 16 lanes, which LLVM splits to the machine's width, unless a tile sets the number: with
few registers, a tile must know how many it uses. A *format tag* of ``layout`` selects code by its
type. Addresses are integers in bytes.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .isa import process_features, process_isa

F32 = ir.FloatType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32X16 = ir.VectorType(F32, 16)
I32X16 = ir.VectorType(I32, 16)
I16X16 = ir.VectorType(I16, 16)

VECTOR_BYTES = 64
_LANE_BYTES = 4
_HIGH = 0xFFFF0000  # the bits of a pair's second bfloat16


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BF16X32 = ir.VectorType(_Bfloat(), 32)


def bfloat16_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The bfloat16, as int16, of a result of arithmetic on bfloat16, rounded to nearest even.

    value: one float32 or a vector of them. NaN stays NaN: such a NaN has none of the bits that are
    cut off, so rounding preserves it.
    """
    word, half = I32, I16
    if isinstance(value.type, ir.VectorType):
        word, half = (ir.VectorType(kind, value.type.count) for kind in (I32, I16))

    def same(number: int) -> ir.Constant:
        return ir.Constant(word, number if word is I32 else [number] * word.count)

    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, same(16)), same(1))
    rounded = builder.add(bits, builder.add(odd, same(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, same(16)), half)


def bfloat16_values(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The float32 of bfloat16: int16, or a vector of them."""
    if not isinstance(bits.type, ir.VectorType):
        return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)
    words, count = ir.VectorType(I32, bits.type.count), bits.type.count
    wide = builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * count))
    return builder.bitcast(wide, ir.VectorType(F32, count))


class Emitter:
    """Vector instructions on one LLVM builder, for one format tag.

    ``is_float32_product``: multiply in float32 although the machine supports pairs of bfloat16;
    ``lanes``: float32 values of a vector.
    """

    def __init__(
        self, builder: ir.IRBuilder, tag: types.Type, *, is_float32_product: bool = False, lanes: int = 16
    ) -> None:
        self.builder = builder
        self.tag = tag
        self.lanes = lanes
        self.f32s = ir.VectorType(F32, lanes)
        self.i32s = ir.VectorType(I32, lanes)
        self.i16s = ir.VectorType(I16, lanes)
        self.bytes = _LANE_BYTES * lanes
        self.is_float32 = tag == types.float32
        self.has_rounding = tag in (types.int16, types.int32)  # AVX512_BF16 rounds, too
        self.has_dot = tag == types.int16 and not is_float32_product

    def of_registers(self, *, is_float32_product: bool = False) -> "Emitter":
        """The same for vectors of the processor's register width."""
        return Emitter(
            self.builder, self.tag, is_float32_product=is_float32_product, lanes=process_isa().lanes
        )

    def load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        """A value of ``kind`` from ``address``, which need not be aligned."""
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=2)

    def float16_values(self, address: ir.Value) -> ir.Value:
        """The float32 of finite float16 at ``address``."""
        builder = self.builder
        if "f16c" in process_features():
            kind = ir.VectorType(ir.HalfType(), self.lanes)
            return builder.fpext(self.load(address, kind), self.f32s)
        # LLVM would call a library that is not there. The bits, as those of a float32, are too
        # small by the difference of the exponents' biases, 127 and 15.
        words = builder.sext(self.load(address, self.i16s), self.i32s)
        bits = builder.and_(builder.shl(words, self.same(13)), self.same(0x8FFFE000))
        factor = ir.Constant(self.f32s, [2.0**112] * self.lanes)
        return builder.fmul(builder.bitcast(bits, self.f32s), factor)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        """Write ``value`` to ``address``, which need not be aligned."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=2)

    def prefetch(self, address: ir.Value, *, is_near: bool = False) -> None:
        """Prefetch the cache line at ``address``, which need not be valid.

        Into the second-level cache, or (``is_near``) the first.
        """
        line = self.builder.inttoptr(address, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [line.type, I32, I32, I32])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
        # To read; data.
        self.builder.call(function, [line, I32(0), I32(3 if is_near else 2), I32(1)])

    def offset(self, address: ir.Value, index: ir.Value | int, scale: int = 1) -> ir.Value:
        """The address ``index`` * ``scale`` bytes further."""
        if isinstance(index, int):
            return self.builder.add(address, I64(index * scale))
        return self.builder.add(address, self.builder.mul(index, I64(scale)))

    def row(
        self, base: ir.Value, stride: ir.Value, index: ir.Value | int, last: ir.Value | None = None
    ) -> ir.Value:
        """The address of a row by its number, or of row ``last`` where that comes first."""
        number = I64(index) if isinstance(index, int) else index
        if last is not None:
            is_before = self.builder.icmp_signed("<", number, last)
            number = self.builder.select(is_before, number, last)
        return self.builder.add(base, self.builder.mul(stride, number))

    def copy(self, target: ir.Value, source: ir.Value, num_bytes: ir.Value) -> None:
        """Copy memory that does not overlap."""
        byte = ir.IntType(8).as_pointer()
        to, origin = (self.builder.inttoptr(address, byte) for address in (target, source))
        cgutils.raw_memcpy(self.builder, to, origin, num_bytes, 1)

    def splat(self, scalar: ir.Value, lanes: int) -> ir.Value:
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
        """Give a * b + total, rounded once if the processor supports it, otherwise twice."""
        # ``fma`` would call a library for each value if the processor does not support it.
        name = "fma" if process_isa().has_fma else "fmuladd"
        return self.call(f"llvm.{name}.v{self.lanes}f32", self.f32s, [a, b, total])

    def same(self, value: int) -> ir.Constant:
        """All lanes set to this int32."""
        return ir.Constant(self.i32s, [value] * self.lanes)

    def halves(self, bits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The even and the odd bfloat16 of twice as many as there are lanes, as float32."""
        even = self.builder.bitcast(self.builder.shl(bits, self.same(16)), self.f32s)
        return even, self.builder.bitcast(self.builder.and_(bits, self.same(_HIGH)), self.f32s)

    def sum_of_neighbours(self, vector: ir.Value) -> ir.Value:
        """Each even lane plus the odd one after it: half as many."""
        kind = ir.VectorType(I32, self.lanes // 2)
        undefined = ir.Constant(self.f32s, ir.Undefined)
        even, odd = (
            self.builder.shuffle_vector(
                vector, undefined, ir.Constant(kind, list(range(first, self.lanes, 2)))
            )
            for first in (0, 1)
        )
        return self.builder.fadd(even, odd)

    def operands(self, bits: ir.Value) -> tuple[ir.Value, ...]:
        """The arguments of ``multiply_add``, from the 64 bytes of 16 pairs or 16 floats."""
        if self.has_dot:
            return (self.builder.bitcast(bits, BF16X32),)
        if self.is_float32:
            return (self.builder.bitcast(bits, self.f32s),)
        return self.halves(bits)

    @property
    def num_pieces(self) -> int:
        """Multiplications that 64 bytes of a packed matrix take for each row."""
        return 1 if self.has_dot or self.is_float32 else 2

    def piece_of_columns(self, address: ir.Value, piece: int) -> ir.Value:
        """Columns of a packed matrix for ``multiply_piece``: one of ``num_pieces`` at ``address``.

        With few registers, two bytes before ``address`` are read, too. Each half of pairs then
        takes one operation on memory, and LLVM does not keep the loaded value for the other half,
        for which there is no register beside twelve sums.
        """
        if self.has_dot:
            return self.builder.bitcast(self.load(address, self.i32s), BF16X32)
        if self.is_float32:
            return self.load(address, self.f32s)
        if process_isa().has_many_registers:
            return self.halves(self.load(address, self.i32s))[piece]
        bits = self.load(self.offset(address, -2 if piece == 0 else 0), self.i32s)
        return self.builder.bitcast(self.builder.and_(bits, self.same(_HIGH)), self.f32s)

    def piece_of_apart(self, address: ir.Value, piece: int) -> ir.Value:
        """The same of a matrix with even and odd bfloat16 apart: see ``layout.pack_linear``.

        One operation on memory converts them to float32, with a zero and without a mask.
        """
        kind = ir.VectorType(I16, 2 * self.lanes)
        lanes = []
        for first in range(4 * piece, 2 * self.lanes, 8):
            for word in range(first, first + 4):
                lanes += [word, 2 * self.lanes + word]
        mask = ir.Constant(ir.VectorType(I32, 2 * self.lanes), lanes)
        zeros = ir.Constant(kind, [0] * (2 * self.lanes))
        words = self.builder.shuffle_vector(zeros, self.load(address, kind), mask)
        return self.builder.bitcast(words, self.f32s)

    def piece_of_row(self, address: ir.Value, num_bytes: int) -> ir.Value:
        """The row of ``multiply_piece``: 4 or 8 bytes, in all lanes."""
        unit = self.load(address, I32 if num_bytes == _LANE_BYTES else I64)
        splat = self.splat(unit, self.bytes // num_bytes)
        return self.builder.bitcast(splat, BF16X32 if self.has_dot else self.f32s)

    def multiply_piece(self, columns: ir.Value, row: ir.Value, total: ir.Value) -> ir.Value:
        """Give columns * row + total."""
        if self.has_dot:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return self.call(name, F32X16, [total, columns, row])
        return self.fma(columns, row, total)

    def multiply_add(self, a: tuple[ir.Value, ...], b: tuple[ir.Value, ...], total: ir.Value) -> ir.Value:
        """Give a * b + total for what ``operands`` returns; pairs of bfloat16 add two products."""
        for left, right in zip(a, b, strict=True):
            total = self.multiply_piece(left, right, total)
        return total

    def loop(
        self,
        count: ir.Value,
        totals: int | list[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    ) -> list[ir.Value]:
        """Run ``body(index, totals) -> totals`` for index < count (at least once).

        ``totals``: initial values, or the number of zeros.
        """
        builder = self.builder
        before = builder.block
        block = builder.append_basic_block("products")
        after = builder.append_basic_block("sums")
        builder.branch(block)
        builder.position_at_end(block)
        index = builder.phi(I64)
        if isinstance(totals, int):
            totals = [ir.Constant(self.f32s, [0.0] * self.lanes)] * totals
        phis = [builder.phi(self.f32s) for _ in totals]
        index.add_incoming(I64(0), before)
        for phi, total in zip(phis, totals, strict=True):
            phi.add_incoming(total, before)
        results = body(index, list(phis))
        following = builder.add(index, I64(1))
        index.add_incoming(following, builder.block)
        for phi, result in zip(phis, results, strict=True):
            phi.add_incoming(result, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), block, after)
        builder.position_at_end(after)
        return results

    def add_rounded(self, address: ir.Value, total: ir.Value) -> None:
        """Add float32 to the values of y at ``address``; round to nearest even."""
        builder = self.builder
        if self.is_float32:
            self.store(builder.fadd(self.load(address, self.f32s), total), address)
            return
        old = bfloat16_values(builder, self.load(address, self.i16s))
        self.store_bfloat16(builder.fadd(old, total), address)

    def store_bfloat16(self, value: ir.Value, address: ir.Value) -> None:
        """Write results of arithmetic on bfloat16: see ``bfloat16_bits``."""
        builder = self.builder
        if self.has_rounding:
            # One instruction instead of ten; values below 2^-126 become zero.
            self.store(builder.fptrunc(value, ir.VectorType(_Bfloat(), self.lanes)), address)
            return
        self.store(bfloat16_bits(builder, value), address)
