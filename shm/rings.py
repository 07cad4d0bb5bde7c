"""The x and y rings: memory for activations sent to a worker, and for its deltas.

Per worker a ring of slots of x and one of y, all in one segment. A slot holds contiguous bf16 rows:
x [tokens, in features] of a job, y [tokens, padded out columns].
"""

from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Self

import numpy as np

from .backing import Backing
from .errors import FormatError, ShmError
from .layout import LINE_BYTES, RINGS_FIELDS, structure
from .segment import Segment

RINGS_KIND = "rings"
ITEM_BYTES = 2  # bf16

_GEOMETRY = structure(RINGS_FIELDS, LINE_BYTES)


@dataclass(frozen=True, slots=True)
class RingShape:
    """Number and size of the slots, fixed at start."""

    num_workers: int
    num_slots: int  # of each ring: a power of two, at least 2
    x_slot_bytes: int
    y_slot_bytes: int

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ShmError(f"{self.num_workers} workers have no rings")
        if self.num_slots < 2 or self.num_slots & (self.num_slots - 1):
            raise ShmError(f"a ring of {self.num_slots} slots: it must be a power of two, 2 or more")
        sizes = self.x_slot_bytes, self.y_slot_bytes
        if any(size <= 0 or size % LINE_BYTES for size in sizes):
            raise ShmError(f"slots of {sizes} bytes: they must be whole lines of {LINE_BYTES}")

    @classmethod
    def for_widths(
        cls,
        *,
        num_workers: int,
        num_slots: int,
        max_slice_tokens: int,
        max_in_features: int,
        max_out_columns: int,
    ) -> Self:
        """Slots that hold the largest slice of the widest input group.

        ``max_out_columns`` counts the padded columns of all targets of a group together.
        """
        return cls(
            num_workers,
            num_slots,
            _whole_lines(max_slice_tokens * max_in_features * ITEM_BYTES),
            _whole_lines(max_slice_tokens * max_out_columns * ITEM_BYTES),
        )

    @property
    def num_bytes(self) -> int:
        """Size of the segment."""
        return LINE_BYTES + self.num_workers * self._worker_bytes

    @property
    def _worker_bytes(self) -> int:
        return self.num_slots * (self.x_slot_bytes + self.y_slot_bytes)

    def x_offset(self, worker: int, sequence: int) -> int:
        """Offset of a job's slot of x in the segment."""
        return self._start(worker) + sequence % self.num_slots * self.x_slot_bytes

    def y_offset(self, worker: int, sequence: int) -> int:
        """Offset of a job's slot of y in the segment."""
        y_start = self._start(worker) + self.num_slots * self.x_slot_bytes
        return y_start + sequence % self.num_slots * self.y_slot_bytes

    def _start(self, worker: int) -> int:
        assert 0 <= worker < self.num_workers, worker
        return LINE_BYTES + worker * self._worker_bytes


class Rings:
    """The segment of all rings.

    A job's slot follows from its sequence number, so there is no allocation. A slot is written
    again ``num_slots`` jobs later. The caller that enqueues this later job orders its copy of x
    behind the wait for ``done`` of the earlier one, and its signal ``ready`` behind the last read
    of the earlier y. So with two slots, two jobs of a worker may be running.
    """

    def __init__(self, segment: Segment, shape: RingShape) -> None:
        self.segment = segment
        self.shape = shape

    @classmethod
    def create(cls, shape: RingShape, *, backing: Backing = "auto") -> Self:
        """Make the rings, all zero. Raises ``ShmError`` and its subclasses."""
        segment = Segment.create(shape.num_bytes, kind=RINGS_KIND, backing=backing)
        _GEOMETRY.pack_into(segment.buffer, 0, *astuple(shape))
        return cls(segment, shape)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map the rings behind a descriptor. Raises ``FormatError``."""
        segment = Segment.attach(fd, kind=RINGS_KIND)
        values = _GEOMETRY.unpack_from(segment.buffer, 0)
        try:
            shape = RingShape(*values)
            if segment.num_bytes != shape.num_bytes:
                raise ShmError(f"{segment.num_bytes} bytes")
        except ShmError as error:
            segment.close()
            raise FormatError(f"the rings do not fit their shape {values}") from error
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
