"""Products of small integers: codes of quantised weights times codes of x, one register at a time.

Where x has 16 bits (``INT8``, levels), a product adds two neighbours to a sum of 32 bits. Where it
has 8 (``INT4``, ``W8A8``), an instruction that multiplies and adds (``isa.has_integer_dot``) adds
four neighbours to a sum of 32 bits. Without it there is no ``W8A8``, and ``INT4`` adds pairs to
sums of 16 bits. These may wrap around, but the final sums of a group do not: see
``rows._store_sums``.

Sums are held as float32 vectors of the same bits, because LLVM can be kept from regrouping only
additions of floats: if it adds products first, it runs out of registers.
"""

from llvmlite import ir

from .emitter import I16, I32, I64, Emitter
from .isa import has_integer_dot, process_isa
from .layout import CODED, MIDDLE_BYTE, MIDDLE_CODE

I8 = ir.IntType(8)

# By lanes; others are composed of operations that LLVM has for any machine.
_PAIRS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
_QUADS = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_DOT_BITS = {8: 256, 16: 512}


class Integers:
    """Products for a format tag of ``layout.CODED``, in the processor's registers."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit.of_registers()
        self.format = CODED[emit.tag.name]
        self.bits, self.x_bits = self.format.bits, self.format.x_bits
        self.lanes = process_isa().lanes
        self.has_dot = has_integer_dot()
        self.middle = MIDDLE_CODE if self.bits == 4 else MIDDLE_BYTE  # of codes, where x has 8 bits
        self._i8s = ir.VectorType(I8, 4 * self.lanes)
        self._i16s = ir.VectorType(I16, 2 * self.lanes)

    @property
    def has_short_sums(self) -> bool:
        """Whether sums are pairs of 16 bits."""
        return self.bits == 4 and self.x_bits == 8 and not self.has_dot

    def codes(self, address: ir.Value, half: int = 0) -> ir.Value:
        """Codes of one panel for a product, of two or four neighbours of each column.

        Of 4 bits from the low or the high halves of bytes.
        """
        emit, builder = self.emit, self.emit.builder
        if self.x_bits == 16:
            loaded = emit.load(address, ir.VectorType(I8, 2 * self.lanes))
            return builder.sext(loaded, self._i16s)
        words = emit.load(address, emit.i32s)
        if self.bits == 8:
            return words
        if half:
            words = builder.lshr(words, emit.same(4))
        return builder.and_(words, emit.same(0x0F0F0F0F))

    def levels(self, address: ir.Value, step: ir.Value) -> ir.Value:
        """The levels of one of four pairs of neighbours of each column; ``address``: the words."""
        emit, builder = self.emit, self.emit.builder
        shift = builder.trunc(builder.shl(builder.and_(step, I64(3)), I64(2)), I32)
        words = builder.lshr(emit.load(address, emit.i32s), emit.splat(shift, self.lanes))
        levels = self._levels
        if self.lanes == 16:  # reads the lower 5 bits of each half
            table = ir.Constant(self._i16s, levels * 2)
            places = builder.bitcast(words, self._i16s)
            name = "llvm.x86.avx512.permvar.hi.512"
            return emit.call(name, self._i16s, [table, places])
        places = builder.and_(words, emit.same(0x000F000F))
        if self.lanes == 8:
            return self._levels_of_bytes(levels, places)
        places = builder.bitcast(places, self._i16s)
        found = ir.Constant(self._i16s, [levels[0]] * self._i16s.count)
        for pair in enumerate(levels):
            code, level = (ir.Constant(self._i16s, [one] * self._i16s.count) for one in pair)
            found = builder.select(builder.icmp_unsigned("==", places, code), level, found)
        return found

    @property
    def _levels(self) -> list[int]:
        """By the codes of the layout."""
        levels = self.format.levels
        assert levels is not None
        return [round(float(levels.values[code ^ levels.zero]) * levels.unit) for code in range(16)]

    def _levels_of_bytes(self, levels: list[int], places: ir.Value) -> ir.Value:
        """Lower and upper bytes of levels, each beside zeros: place 0 has the level 0."""
        emit, builder = self.emit, self.emit.builder
        halves = []
        for part in range(2):
            octets = [level.to_bytes(2, "little", signed=True)[part] for level in levels]
            table = ir.Constant(self._i8s, octets * (self._i8s.count // len(octets)))
            index = builder.shl(places, emit.same(8 * part))
            operands = [table, builder.bitcast(index, self._i8s)]
            halves.append(emit.call("llvm.x86.avx2.pshuf.b", self._i8s, operands))
        return builder.bitcast(builder.or_(*halves), self._i16s)

    def values(self, address: ir.Value) -> ir.Value:
        """Codes of x for a product: 4 bytes, in all lanes."""
        return self.emit.splat(self.emit.load(address, I32), self.lanes)

    def multiply_add(self, codes: ir.Value, values: ir.Value, total: ir.Value) -> ir.Value:
        emit, builder = self.emit, self.emit.builder
        words = builder.bitcast(total, emit.i32s)
        if self.has_dot:
            name = "vpdpwssd" if self.x_bits == 16 else "vpdpbusd"
            kind = self._i16s if self.x_bits == 16 else self._i8s
            operands = [builder.bitcast(each, kind) for each in (codes, values)]
            name = f"llvm.x86.avx512.{name}.{_DOT_BITS[self.lanes]}"
            return builder.bitcast(emit.call(name, emit.i32s, [words, *operands]), emit.f32s)
        if self.x_bits == 16:
            total = builder.add(words, self._pairs(codes, values))
        else:
            total = builder.add(builder.bitcast(total, self._i16s), self._quads(codes, values))
        fenced = builder.bitcast(total, emit.f32s)
        return emit.call(f"llvm.arithmetic.fence.v{self.lanes}f32", emit.f32s, [fenced])

    def total(self, total: ir.Value) -> ir.Value:
        """The sum of each column as float32."""
        emit, builder = self.emit, self.emit.builder
        words = builder.bitcast(total, emit.i32s)
        if self.has_short_sums:
            ones = ir.Constant(self._i16s, [1] * (2 * self.lanes))
            words = self._pairs(words, ones)
        return builder.sitofp(words, emit.f32s)

    def _pairs(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Products of int16, each even one and the odd one after it added."""
        emit, builder = self.emit, self.emit.builder
        left, right = (builder.bitcast(each, self._i16s) for each in (left, right))
        if self.lanes in _PAIRS:
            return emit.call(_PAIRS[self.lanes], emit.i32s, [left, right])
        wide = ir.VectorType(I32, 2 * self.lanes)
        product = builder.mul(builder.sext(left, wide), builder.sext(right, wide))
        return self._sum_of_neighbours(product)

    def _quads(self, codes: ir.Value, values: ir.Value) -> ir.Value:
        """Products of uint8 below 16 and int8, neighbours added to int16."""
        emit, builder = self.emit, self.emit.builder
        codes, values = (builder.bitcast(each, self._i8s) for each in (codes, values))
        if self.lanes in _QUADS:
            return emit.call(_QUADS[self.lanes], self._i16s, [codes, values])
        wide = ir.VectorType(I16, 4 * self.lanes)
        product = builder.mul(builder.zext(codes, wide), builder.sext(values, wide))
        return self._sum_of_neighbours(product)

    def _sum_of_neighbours(self, vector: ir.Value) -> ir.Value:
        builder, count = self.emit.builder, vector.type.count
        kind, undefined = ir.VectorType(I32, count // 2), ir.Constant(vector.type, ir.Undefined)
        even, odd = (
            builder.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(first, count, 2))))
            for first in (0, 1)
        )
        return builder.add(even, odd)
