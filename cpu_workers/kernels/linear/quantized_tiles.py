"""Register tiles of products with quantised weights: a few tokens times a few panels of columns.

Sums of a group are integers in registers. Multiplied with the scales of the weights' group and of
x's, they are added to float32 sums on the stack. All tiles add groups in one order.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..simd.emitter import F32, I64, VECTOR_BYTES, Emitter
from ..simd.integers import I8, Integers
from ..simd.intrinsics import emits
from ..simd.layout import EXPONENT_SHIFT, MIDDLE_CODE, SMALLEST_POWER, CodedFormat
from .rows import CODE_SUM, CODED_TAIL_BYTES, FIRST, ROW_FORMATS, SCALE
from .tiles import choose_tile, write_sums


@dataclass(frozen=True)
class _Tile:
    """One tile; panels, x, sums are addresses; float32 sums are [token, panel]."""

    integers: Integers
    num_tokens: int
    panels: list[ir.Value]
    x: ir.Value
    num_groups: ir.Value
    beside: ir.Value  # see ``quantized_product``
    sums: ir.Value

    @property
    def emit(self) -> Emitter:
        return self.integers.emit

    @property
    def num_sums(self) -> int:
        return self.num_tokens * len(self.panels)

    @property
    def format(self) -> CodedFormat:
        return self.integers.format

    @property
    def num_products(self) -> int:
        """Products of a group with one panel."""
        return self.format.group_size * self.format.x_bits // 32

    @property
    def num_unrolled(self) -> int:
        """Products per iteration of the loop.

        With more of them LLVM spills sums from their registers. Two ``vpdpwssd`` that depend on one
        another are split by LLVM because of their latency.
        """
        integers = self.integers
        return 1 if self.format.levels or (integers.x_bits == 16 and integers.has_dot) else 2

    @property
    def num_turns(self) -> int:
        """Iterations of the loop over the products of a group."""
        return self.num_products // self.num_unrolled

    def sum_place(self, token: int, panel: int) -> ir.Value:
        """The address of the float32 sums of a token and a panel."""
        return self.emit.offset(self.sums, (token * len(self.panels) + panel) * self.emit.bytes)

    def tail(self, token: int, group: ir.Value, field: int) -> ir.Value:
        """The address of a field behind the codes of a group of x."""
        distance = (token + 1) * self._chunk_bytes - CODED_TAIL_BYTES + field
        return self.emit.offset(self._chunks(group), distance)

    def code(self, panel: int, group: ir.Value) -> ir.Value:
        return self.emit.offset(self.panels[panel], group, self.format.block_bytes)

    @property
    def _chunk_bytes(self) -> int:
        return ROW_FORMATS[self.emit.tag.name].chunk_bytes

    def _chunks(self, group: ir.Value) -> ir.Value:
        return self.emit.offset(self.x, group, self.num_tokens * self._chunk_bytes)

    @property
    def _opaque_zero(self) -> ir.Value:
        """A zero that LLVM cannot fold: addresses have 47 bits."""
        return self.emit.builder.lshr(self.x, I64(62))

    def add_group(self, group: ir.Value, prefetch: Callable[[ir.Value], None]) -> None:
        """Add the products of a group. ``prefetch`` is called in each inner iteration."""
        emit, builder = self.emit, self.emit.builder
        chunks = self._chunks(group)
        starts = [self.code(p, group) for p in range(len(self.panels))]

        def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            results = list(totals)
            prefetch(builder.add(builder.mul(group, I64(self.num_turns)), index))
            step = builder.mul(index, I64(self.num_unrolled))
            values = emit.offset(chunks, step, 4)
            for u in range(self.num_unrolled):
                self._add_products(starts, values, step, u, results)
            return results

        # LLVM must not know the number of iterations: it would unroll the whole loop.
        count = builder.add(I64(self.num_turns), self._opaque_zero)
        totals: list[ir.Value] = []
        for t in range(self.num_tokens):
            first = ir.Constant(emit.f32s, [0.0] * emit.lanes)
            if self.integers.x_bits == 8:
                word = self.integers.values(self.tail(t, group, FIRST))
                first = builder.bitcast(word, emit.f32s)
            totals += [first] * len(self.panels)
        totals = emit.loop(count, totals, body)
        self._scale(group, totals)

    def _add_products(
        self, starts: list[ir.Value], values: ir.Value, step: ir.Value, u: int, totals: list[ir.Value]
    ) -> None:
        """One product of each token with each panel; the shorter side stays in registers."""
        emit, integers, num_panels = self.emit, self.integers, len(self.panels)

        def codes(panel: int) -> ir.Value:
            if self.format.levels:  # four products read one vector of words
                own = emit.builder.add(step, I64(u))
                words = emit.builder.lshr(own, I64(2))
                return integers.levels(emit.offset(starts[panel], words, 4 * integers.lanes), own)
            if integers.bits == 8:
                product_bytes = 32 // integers.x_bits * integers.lanes
                start = emit.offset(starts[panel], step, product_bytes)
                return integers.codes(emit.offset(start, u * product_bytes))
            # First the low halves of bytes, then the high ones, which are read again: LLVM would
            # keep all of them in registers, of which there are too few.
            start = emit.offset(starts[panel], step, 2 * integers.lanes)
            if u % 2:
                start = emit.builder.add(start, self._opaque_zero)
            return integers.codes(emit.offset(start, u // 2 * 4 * integers.lanes), u % 2)

        def value(token: int) -> ir.Value:
            return integers.values(emit.offset(values, token * self._chunk_bytes + 4 * u))

        def add(token: int, panel: int, code: ir.Value, of_x: ir.Value) -> None:
            slot = token * num_panels + panel
            totals[slot] = integers.multiply_add(code, of_x, totals[slot])

        if self.num_tokens < num_panels:
            held = [value(t) for t in range(self.num_tokens)]
            for p in range(num_panels):
                code = codes(p)
                for t, of_x in enumerate(held):
                    add(t, p, code, of_x)
            return
        held = [codes(p) for p in range(num_panels)]
        for t in range(self.num_tokens):
            of_x = value(t)
            for p, code in enumerate(held):
                add(t, p, code, of_x)

    def _scale(self, group: ir.Value, totals: list[ir.Value]) -> None:
        """Add the sums of a group, times its scales, to those on the stack."""
        if not self.format.may_have_zero_points:
            self._add_scaled(group, totals, has_zero_points=False)
            return
        builder = self.emit.builder
        are_given = builder.icmp_unsigned("!=", self.beside, I64(0))
        with builder.if_else(are_given) as (given, missing):
            for branch, has_zero_points in ((given, True), (missing, False)):
                with branch:
                    self._add_scaled(group, totals, has_zero_points=has_zero_points)

    def _add_scaled(self, group: ir.Value, totals: list[ir.Value], *, has_zero_points: bool) -> None:
        emit, builder, num_panels = self.emit, self.emit.builder, len(self.panels)
        for p in range(num_panels):
            scales = self._scales(p, group)
            missing = None
            if has_zero_points:
                difference = builder.sub(emit.same(MIDDLE_CODE), self._beside(p, group))
                missing = builder.sitofp(difference, emit.f32s)
            for t in range(self.num_tokens):
                of_x = emit.splat(emit.load(self.tail(t, group, SCALE), F32), emit.lanes)
                total = self.integers.total(totals[t * num_panels + p])
                if missing is not None:  # exact, like all sums of a group
                    sum_of_x = emit.splat(emit.load(self.tail(t, group, CODE_SUM), F32), emit.lanes)
                    total = emit.fma(missing, sum_of_x, total)
                place = self.sum_place(t, p)
                before = emit.load(place, emit.f32s)
                emit.store(emit.fma(total, builder.fmul(scales, of_x), before), place)

    def _beside(self, p: int, group: ir.Value) -> ir.Value:
        """The exponents or zero points of a group, int32."""
        emit, builder = self.emit, self.emit.builder
        number = builder.add(builder.mul(I64(p), self.num_groups), group)
        octets = emit.load(emit.offset(self.beside, number, emit.lanes), ir.VectorType(I8, emit.lanes))
        return builder.zext(octets, emit.i32s)

    def _scales(self, p: int, group: ir.Value) -> ir.Value:
        emit, builder = self.emit, self.emit.builder
        if not self.format.has_exponents:
            place = emit.offset(self.code(p, group), self.format.codes_bytes)
            is_short = self.format.scale_bytes == 2
            return emit.float16_values(place) if is_short else emit.load(place, emit.f32s)
        bits = builder.shl(self._beside(p, group), emit.same(EXPONENT_SHIFT))
        smallest = emit.same(SMALLEST_POWER)
        bits = builder.select(builder.icmp_unsigned(">", bits, smallest), bits, smallest)
        return builder.bitcast(bits, emit.f32s)

    def begin(self) -> None:
        """Set the float32 sums to zero."""
        emit = self.emit
        for t in range(self.num_tokens):
            for p in range(len(self.panels)):
                emit.store(ir.Constant(emit.f32s, [0.0] * emit.lanes), self.sum_place(t, p))


@emits(
    "num_tokens weights panel_bytes x steps bias y y_stride last_token ahead is_half beside",
    is_half=types.boolean,
)
def quantized_product(emit: Emitter, *args: ir.Value) -> None:
    """y[token, column] = bias[column] + sum over k of x[token, k] W[column, k], by codes.

    For ``num_tokens`` and the number of panels in ``rows.ROW_FORMATS``. x: address of the block
    made by ``rows.make_blocks``. beside: address of the exponents or zero points of the first
    panel, or 0. The other arguments are those of ``tiles.wide_product``.
    """
    integers = Integers(emit)
    emit, builder = integers.emit, emit.builder
    num_tokens, weights, panel_bytes, x, steps, bias, y, y_stride, last, ahead, is_half, beside = args
    num_groups = builder.sdiv(steps, I64(integers.format.group_size // 2))
    panels_of = ROW_FORMATS[emit.tag.name].panels_of
    most = max(size * panels for size, panels in panels_of.items())
    kind = ir.ArrayType(emit.f32s, most)
    sums = builder.ptrtoint(cgutils.alloca_once(builder, kind), I64)

    def emit_tile(size: int, is_half: bool) -> None:
        panels = [emit.row(weights, panel_bytes, p) for p in range(panels_of[size])]
        tile = _Tile(integers, size, panels, x, num_groups, beside, sums)
        tile.begin()
        prefetch = _prefetch_ahead(tile, ahead, is_half=is_half)
        with cgutils.for_range(builder, num_groups) as loop:
            tile.add_group(loop.index, prefetch)
        totals = [emit.load(tile.sum_place(t, p), emit.f32s) for t in range(size) for p in range(len(panels))]
        write_sums(emit, size, totals, bias, y, y_stride, last)

    choose_tile(builder, num_tokens, is_half, panels_of, emit_tile)


def _prefetch_ahead(tile: _Tile, ahead: ir.Value, *, is_half: bool) -> Callable[[ir.Value], None]:
    """Prefetch the lines of a tile, or of half of one, from ``ahead`` on: some per iteration."""
    emit = tile.emit
    turn_bytes = len(tile.panels) * tile.format.block_bytes // tile.num_turns
    if is_half:
        turn_bytes //= 2

    def prefetch(turn: ir.Value) -> None:
        start = emit.offset(ahead, turn, turn_bytes)
        for distance in range(0, turn_bytes, VECTOR_BYTES):
            emit.prefetch(emit.offset(start, distance), is_near=True)

    return prefetch
