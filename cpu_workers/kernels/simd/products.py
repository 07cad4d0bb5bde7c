"""The inner loop that all register tiles of products share: a few rows times a few panels.

A *panel* of a packed matrix is a vector register's worth of columns or ranks: a vector for each
step. Rows have 4 or 8 bytes per step and piece, which are broadcast to all lanes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

from .emitter import I64, VECTOR_BYTES, Emitter
from .isa import process_isa

# The address of a piece of a row at a step: (row, piece, step) -> address.
PlaceOf = Callable[[int, int, ir.Value], ir.Value]


@dataclass(frozen=True)
class Product:
    """A few rows times a few panels, step by step.

    panels: addresses at step 0; each step is ``line_bytes`` further.
    place_of: the places of rows; unit_bytes: bytes of a row for all lanes, 4 or 8.
    """

    emit: Emitter
    panels: Sequence[ir.Value]
    num_rows: int
    place_of: PlaceOf
    unit_bytes: int
    line_bytes: int = VECTOR_BYTES
    are_words_apart: bool = False  # of panels, see ``Emitter.piece_of_apart``

    @property
    def num_sums(self) -> int:
        """Vectors of sums: [row * panels + panel]."""
        return self.num_rows * len(self.panels)

    def add_step(self, step: ir.Value, row_step: ir.Value, totals: list[ir.Value]) -> None:
        """Add the products of one step to ``totals``; rows count steps on their own.

        The shorter side stays in registers, while the other is loaded one by one. Besides the sums
        and one value of the other side there is a zero or a mask. If the registers do not suffice,
        some panels are processed at a time, and rows are read again for the others.
        """
        room = 32 if process_isa().has_many_registers else 14 - self.num_sums
        num_panels = len(self.panels)
        for piece in range(self.emit.num_pieces):
            if self.num_rows < num_panels and self.num_rows <= room:
                values = [self._value(r, piece, row_step) for r in range(self.num_rows)]
                for p in range(num_panels):
                    column = self._column(p, piece, step)
                    for r, value in enumerate(values):
                        self._add(r, p, column, value, totals)
                continue
            for first in range(0, num_panels, room):
                held = range(first, min(first + room, num_panels))
                columns = [self._column(p, piece, step) for p in held]
                for r in range(self.num_rows):
                    value = self._value(r, piece, self._opaque(row_step) if first else row_step)
                    for p, column in zip(held, columns, strict=True):
                        self._add(r, p, column, value, totals)

    def _add(self, r: int, p: int, column: ir.Value, value: ir.Value, totals: list[ir.Value]) -> None:
        slot = r * len(self.panels) + p
        totals[slot] = self.emit.multiply_piece(column, value, totals[slot])

    def _value(self, r: int, piece: int, step: ir.Value) -> ir.Value:
        return self.emit.piece_of_row(self.place_of(r, piece, step), self.unit_bytes)

    def _column(self, p: int, piece: int, step: ir.Value) -> ir.Value:
        address = self.emit.offset(self.panels[p], step, self.line_bytes)
        if self.are_words_apart:
            # Both pieces at once would need one more register.
            return self.emit.piece_of_apart(self._opaque(address) if piece else address, piece)
        return self.emit.piece_of_columns(address, piece)

    def _opaque(self, place: ir.Value) -> ir.Value:
        """The same address, unknown to LLVM, so that it loads the value again.

        Otherwise it would spill the loaded value, for which there is no register, to memory.
        """
        builder = self.emit.builder
        nothing = builder.lshr(self.panels[0], I64(62))  # addresses have 47 bits
        return builder.add(place, nothing)


def choose(
    builder: ir.IRBuilder,
    number: ir.Value,
    flag: ir.Value,
    cases: Mapping[tuple[int, bool], Callable[[], None]],
) -> None:
    """Run the code of the case that an int64 and a boolean select; there must be one."""
    wrong, after = builder.append_basic_block("wrong"), builder.append_basic_block("after")
    key = builder.add(builder.mul(number, I64(2)), builder.zext(flag, I64))
    switch = builder.switch(key, wrong)
    for (size, is_set), emit_case in cases.items():
        block = builder.append_basic_block(f"tile_{size}")
        switch.add_case(I64(2 * size + is_set), block)
        builder.position_at_end(block)
        emit_case()
        builder.branch(after)
    builder.position_at_end(wrong)
    builder.unreachable()
    builder.position_at_end(after)
