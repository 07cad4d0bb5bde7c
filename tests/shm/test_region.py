import itertools
import struct
from dataclasses import replace

import pytest
from corun.shm import region as regions
from corun.shm.errors import FormatError
from corun.shm.region import Region, TargetSize
from hypothesis import given
from hypothesis import strategies as st


def _targets(*ranks: int) -> list[TargetSize]:
    return [TargetSize(r, 48, 0.5, 130 * r, 34 * r) for r in ranks]


def _written(region: Region, extra_bytes: int = 0) -> memoryview:
    buffer = memoryview(bytearray(region.num_bytes + extra_bytes))
    regions.write_header(region, buffer)
    return buffer


@given(st.lists(st.integers(0, 256), min_size=1, max_size=regions.MAX_TARGETS), st.integers(0, 99))
def test_header_comes_back(ranks: list[int], extra_bytes: int) -> None:
    region = regions.plan_region(40, 2, _targets(*ranks))
    assert regions.read_header(_written(region, extra_bytes)) == region
    assert region.y_columns == 48 * len(ranks) and region.rank_sum == sum(ranks)


@given(st.lists(st.integers(0, 256), min_size=1, max_size=regions.MAX_TARGETS))
def test_factors_have_places_of_their_own(ranks: list[int]) -> None:
    sizes = [replace(size, factor_bytes=8 * 41 * bool(size.rank)) for size in _targets(*ranks)]
    region = regions.plan_region(40, 2, sizes)
    assert regions.read_header(_written(region)) == region
    for size, place, following in zip(sizes, region.targets, (*region.targets[1:], None), strict=True):
        assert bool(place.factor_offset) == bool(size.rank)
        if size.rank:
            assert place.factor_offset % regions.ALIGNMENT_BYTES == 0
            assert place.factor_offset >= place.b_offset + size.b_bytes
            end = region.num_bytes
            if following is not None and following.rank:
                end = following.a_offset
            assert place.factor_offset + size.factor_bytes <= end


@given(st.lists(st.integers(0, 256), min_size=1, max_size=regions.MAX_TARGETS))
def test_matrices_have_places_of_their_own(ranks: list[int]) -> None:
    sizes = _targets(*ranks)
    region = regions.plan_region(40, 2, sizes)
    parts = [(0, regions.HEADER_BYTES + regions.TARGET_BYTES * len(ranks))]
    for size, place in zip(sizes, region.targets, strict=True):
        if size.rank:
            parts += [(place.a_offset, size.a_bytes), (place.b_offset, size.b_bytes)]
    for (offset, num_bytes), (following, _) in itertools.pairwise(parts):
        assert offset + num_bytes <= following
        assert following % regions.ALIGNMENT_BYTES == 0
    assert sum(parts[-1]) <= region.num_bytes < sum(parts[-1]) + regions.ALIGNMENT_BYTES


def test_words_of_compiled_readers_are_where_the_header_has_them() -> None:
    region = regions.plan_region(40, 2, _targets(3, 8))
    buffer = _written(region)
    for index, target in enumerate(region.targets):
        start = regions.HEADER_BYTES + index * regions.TARGET_BYTES
        words = struct.unpack_from("<5q", buffer, start)
        assert words[regions.RANK_WORD] == target.rank
        assert words[regions.A_WORD] == target.a_offset
        assert words[regions.B_WORD] == target.b_offset
        assert words[regions.COLUMNS_WORD] == target.padded_columns
        scaling = struct.unpack_from("<f", buffer, start + 8 * regions.SCALING_WORD)
        assert scaling == (target.scaling,)


def test_what_is_no_region_is_refused() -> None:
    region = regions.plan_region(40, 2, _targets(3, 8))
    with pytest.raises(FormatError, match="are left"):
        regions.read_header(memoryview(bytearray(10)))
    with pytest.raises(FormatError, match="no region"):
        regions.read_header(memoryview(bytearray(4096)))
    with pytest.raises(FormatError, match="does not fit"):
        regions.read_header(_written(region)[:-64])
    for offset, value in ((12, 0), (12, 17), (16, 0), (regions.HEADER_BYTES + 8, region.num_bytes)):
        buffer = _written(region)
        struct.pack_into("<I" if offset == 12 else "<q", buffer, offset, value)
        with pytest.raises(FormatError, match="is not valid"):
            regions.read_header(buffer)
