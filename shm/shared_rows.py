"""Memory for the activations that a pass sends to the team of workers, and for their deltas.

One segment with x, y and h (the hidden values, which members of a team share) of the tokens of one
input group: all jobs of a group are done, and their y is read, before x of the next group is sent.
The rows of a job are contiguous and start at the place of its first token: x [tokens, in features]
and y [tokens, padded out columns] are bf16, h [tokens, padded ranks] is float32.
"""

from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Self

import numpy as np

from .backing import Backing
from .errors import FormatError, ShmError
from .layout import LINE_BYTES, ROWS_FIELDS, structure
from .segment import Segment

ROWS_KIND = "rows"
ITEM_BYTES = 2  # bf16
H_ITEM_BYTES = 4  # float32

_GEOMETRY = structure(ROWS_FIELDS, LINE_BYTES)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Number and largest widths of the rows, fixed at start."""

    num_tokens: int
    x_row_bytes: int
    y_row_bytes: int
    h_row_bytes: int

    def __post_init__(self) -> None:
        sizes = self.num_tokens, self.x_row_bytes, self.y_row_bytes, self.h_row_bytes
        if any(size <= 0 for size in sizes):
            raise ShmError(f"rows of {sizes}: tokens and bytes must be positive")

    @classmethod
    def for_widths(
        cls, *, num_tokens: int, max_in_features: int, max_out_columns: int, max_padded_ranks: int
    ) -> Self:
        """Rows of the widest input group.

        ``max_out_columns`` and ``max_padded_ranks`` count all targets of a group together.
        """
        widths = max_in_features * ITEM_BYTES, max_out_columns * ITEM_BYTES
        return cls(num_tokens, *widths, max_padded_ranks * H_ITEM_BYTES)

    @property
    def num_bytes(self) -> int:
        """Size of the segment."""
        return self.h_offset(0) + _whole_lines(self.num_tokens * self.h_row_bytes)

    def x_offset(self, token: int) -> int:
        """Offset of the x of a job that begins at row ``token``."""
        return LINE_BYTES + token * self.x_row_bytes

    def y_offset(self, token: int) -> int:
        return LINE_BYTES + _whole_lines(self.num_tokens * self.x_row_bytes) + token * self.y_row_bytes

    def h_offset(self, token: int) -> int:
        return self.y_offset(0) + _whole_lines(self.num_tokens * self.y_row_bytes) + token * self.h_row_bytes


class SharedRows:
    """The segment; see the module."""

    def __init__(self, segment: Segment, shape: RowShape) -> None:
        self.segment = segment
        self.shape = shape

    @classmethod
    def create(cls, shape: RowShape, *, backing: Backing = "auto") -> Self:
        """Make the rows, all zero. Raises ``ShmError`` and its subclasses."""
        segment = Segment.create(shape.num_bytes, kind=ROWS_KIND, backing=backing)
        _GEOMETRY.pack_into(segment.buffer, 0, *astuple(shape))
        return cls(segment, shape)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map the rows behind a descriptor. Raises ``FormatError``."""
        segment = Segment.attach(fd, kind=ROWS_KIND)
        values = _GEOMETRY.unpack_from(segment.buffer, 0)
        try:
            shape = RowShape(*values)
            if segment.num_bytes != shape.num_bytes:
                raise ShmError(f"{segment.num_bytes} bytes")
        except ShmError as error:
            segment.close()
            raise FormatError(f"the shared rows do not fit their shape {values}") from error
        return cls(segment, shape)

    @property
    def fd(self) -> int:
        """The descriptor, for other processes."""
        return self.segment.fd

    @property
    def address(self) -> int:
        """The address that offsets of jobs are relative to."""
        return self.segment.address

    def rows(self, offset: int, num_rows: int, num_columns: int) -> np.ndarray:
        """The bits of bf16 rows [num_rows, num_columns], contiguous, as uint16; a view.

        ``torch.from_numpy(rows).view(torch.bfloat16)`` prevents the segment from being closed as
        the view does.
        """
        values = self.segment.view(np.uint16, offset, num_rows * num_columns)
        return values.reshape(num_rows, num_columns)

    def close(self) -> None:
        """Unmap; raises ``ShmError`` while views are alive. See ``Segment.close``."""
        self.segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.segment.__exit__(kind, error, traceback)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
