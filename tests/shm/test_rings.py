"""The x and y rings: slots are large enough, apart, and found by sequence number."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from corun.shm.errors import FormatError, ShmError
from corun.shm.layout import LINE_BYTES
from corun.shm.rings import Rings, RingShape
from corun.shm.segment import Segment
from corun.shm.words import wrap
from hypothesis import given
from hypothesis import strategies as st


@given(
    st.integers(1, 3), st.sampled_from([2, 4, 8]), st.integers(1, 40), st.integers(1, 70), st.integers(1, 70)
)
def test_slots_hold_the_largest_slice_and_do_not_overlap(
    num_workers: int, num_slots: int, tokens: int, width: int, columns: int
) -> None:
    shape = RingShape.for_widths(
        num_workers=num_workers,
        num_slots=num_slots,
        max_slice_tokens=tokens,
        max_in_features=width,
        max_out_columns=columns,
    )
    ranges = [(0, LINE_BYTES)]
    for worker in range(num_workers):
        for sequence in range(num_slots):
            x, y = shape.x_offset(worker, sequence), shape.y_offset(worker, sequence)
            ranges += [(x, x + shape.x_slot_bytes), (y, y + shape.y_slot_bytes)]
    ranges.sort()
    assert all(start % LINE_BYTES == 0 for start, _ in ranges)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] == shape.num_bytes
    assert shape.x_slot_bytes >= tokens * width * 2
    assert shape.y_slot_bytes >= tokens * columns * 2


@pytest.mark.parametrize("last", [2**31 - 1, 2**32 - 1])
def test_slots_follow_each_other_over_the_wrap(last: int) -> None:
    shape = RingShape(2, 4, 128, 64)
    steps = [wrap(last + step) for step in range(-3, 5)]
    x = [shape.x_offset(1, sequence) for sequence in steps]
    assert x[:4] == x[4:] and len(set(x)) == 4
    assert x == sorted(x[:4]) * 2


def test_rows_are_shared_bf16() -> None:
    shape = RingShape.for_widths(
        num_workers=1, num_slots=2, max_slice_tokens=3, max_in_features=40, max_out_columns=16
    )
    with Rings.create(shape) as rings, Rings.attach(rings.fd) as other:
        assert other.shape == shape
        values = torch.randn(3, 40).bfloat16()
        offset = shape.x_offset(0, 1)
        x = torch.from_numpy(rings.rows(offset, 3, 40)).view(torch.bfloat16)
        x.copy_(values)
        seen = other.rows(offset, 3, 40)
        assert seen.ctypes.data == other.address + offset
        assert seen.dtype == np.uint16 and seen.flags.c_contiguous
        assert torch.equal(torch.from_numpy(seen.copy()).view(torch.bfloat16), values)
        with pytest.raises(ShmError, match="rings cannot be closed"):
            rings.close()
        del x, seen


def test_shapes_that_cannot_be_are_refused() -> None:
    shape = RingShape(1, 2, 64, 64)
    for change in (
        {"num_workers": 0},
        {"num_slots": 1},
        {"num_slots": 6},
        {"x_slot_bytes": 0},
        {"y_slot_bytes": 65},
    ):
        with pytest.raises(ShmError):
            replace(shape, **change)


def test_attach_refuses_other_segments() -> None:
    with (
        Segment.create(4096, kind="rings") as segment,
        pytest.raises(FormatError, match="do not fit their shape"),
    ):
        Rings.attach(segment.fd)
    with Rings.create(RingShape(1, 2, 64, 64)) as rings:
        rings.segment.buffer[4] = 4
        with pytest.raises(FormatError, match="do not fit their shape"):
            Rings.attach(rings.fd)
