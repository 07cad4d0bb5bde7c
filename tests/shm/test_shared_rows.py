"""Rows of x, y and h: those of different jobs are apart, and large enough."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from corun.shm.errors import FormatError, ShmError
from corun.shm.layout import LINE_BYTES
from corun.shm.segment import Segment
from corun.shm.shared_rows import RowShape, SharedRows
from hypothesis import given
from hypothesis import strategies as st


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 40),
)
def test_jobs_of_a_group_do_not_overlap(tokens: list[int], width: int, columns: int, ranks: int) -> None:
    shape = RowShape.for_widths(
        num_tokens=sum(tokens), max_in_features=width, max_out_columns=columns, max_padded_ranks=ranks
    )
    ranges = [(0, LINE_BYTES)]
    first = 0
    for number in tokens:
        x, y, h = shape.x_offset(first), shape.y_offset(first), shape.h_offset(first)
        ranges += [(x, x + number * width * 2), (y, y + number * columns * 2), (h, h + number * ranks * 4)]
        first += number
    ranges.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] <= shape.num_bytes
    assert all(start % LINE_BYTES == 0 for start in (shape.y_offset(0), shape.h_offset(0)))


def test_rows_are_shared_bf16() -> None:
    shape = RowShape(6, 80, 32, 32)
    with SharedRows.create(shape) as memory, SharedRows.attach(memory.fd) as other:
        assert other.shape == shape
        values = torch.randn(3, 40).bfloat16()
        offset = shape.x_offset(2)
        x = torch.from_numpy(memory.rows(offset, 3, 40)).view(torch.bfloat16)
        x.copy_(values)
        seen = other.rows(offset, 3, 40)
        assert seen.ctypes.data == other.address + offset
        assert seen.dtype == np.uint16 and seen.flags.c_contiguous
        assert torch.equal(torch.from_numpy(seen.copy()).view(torch.bfloat16), values)
        with pytest.raises(ShmError, match="rows cannot be closed"):
            memory.close()
        del x, seen


@pytest.mark.parametrize("name", ["num_tokens", "x_row_bytes", "y_row_bytes", "h_row_bytes"])
def test_shapes_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ShmError):
        replace(RowShape(2, 64, 64, 64), **{name: 0})


def test_attach_refuses_other_segments() -> None:
    with (
        Segment.create(4096, kind="rows") as segment,
        pytest.raises(FormatError, match="do not fit their shape"),
    ):
        SharedRows.attach(segment.fd)
    with SharedRows.create(RowShape(2, 64, 64, 64)) as memory:
        memory.segment.buffer[0] = 4
        with pytest.raises(FormatError, match="do not fit their shape"):
            SharedRows.attach(memory.fd)
