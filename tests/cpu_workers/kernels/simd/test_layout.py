"""Packed layouts."""

import numpy as np
import pytest
from corun.cpu_workers.kernels.simd import layout


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize(("rank", "in_features"), [(1, 16), (8, 64), (13, 37)])
def test_pack_a_keeps_every_value_in_place(dtype: type, rank: int, in_features: int) -> None:
    a: np.ndarray = np.arange(1, rank * in_features + 1, dtype=dtype).reshape(rank, in_features)
    packed = layout.pack_a(a)
    unit = 8 // a.itemsize
    assert packed.nbytes % 64 == 0
    for r in range(rank):
        for k in range(in_features):
            assert packed[r // 8, k // unit, r % 8, k % unit] == a[r, k]
    assert np.count_nonzero(packed) == a.size


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize(("out_features", "rank"), [(16, 1), (48, 8), (37, 13)])
def test_pack_b_keeps_every_value_in_place(dtype: type, out_features: int, rank: int) -> None:
    b: np.ndarray = np.arange(1, rank * out_features + 1, dtype=dtype).reshape(-1, rank)
    packed = layout.pack_b(b)
    unit = 4 // b.itemsize
    for n in range(out_features):
        for r in range(rank):
            assert packed[n // 16, r // unit, n % 16, r % unit] == b[n, r]
    assert np.count_nonzero(packed) == b.size


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize(("rank", "in_features", "out_features"), [(8, 64, 32), (13, 37, 29)])
def test_packing_writes_all_of_the_place_it_is_given(
    dtype: type, rank: int, in_features: int, out_features: int
) -> None:
    generator = np.random.default_rng(0)
    a: np.ndarray = generator.integers(1, 99, (rank, in_features)).astype(dtype)
    b: np.ndarray = generator.integers(1, 99, (out_features, rank)).astype(dtype)
    for matrix, pack, shape in (
        (a, layout.pack_a, layout.packed_a_shape(rank, in_features, a.itemsize)),
        (b, layout.pack_b, layout.packed_b_shape(out_features, rank, b.itemsize)),
    ):
        place: np.ndarray = np.full(shape, 99, dtype)
        assert pack(matrix, place) is place
        assert np.array_equal(place, pack(matrix))
        assert np.count_nonzero(place) == matrix.size


def test_ranks_are_padded_no_further_than_a_register() -> None:
    a, b = np.ones((8, 64), np.uint16), np.ones((64, 8), np.uint16)
    assert layout.pack_a(a).nbytes == a.nbytes
    assert layout.pack_b(b).nbytes == b.nbytes


@pytest.mark.parametrize(("out_features", "in_features"), [(64, 8), (1, 1), (70, 37)])
def test_pack_linear_keeps_every_value_in_place(out_features: int, in_features: int) -> None:
    weight: np.ndarray = np.arange(1, out_features * in_features + 1, dtype=np.uint16)
    weight = weight.reshape(out_features, in_features)
    for tag in (layout.BFLOAT16, layout.BFLOAT16_DOT, layout.BFLOAT16_TILES):
        padded_in, padded_out = layout.padded_linear_features(in_features, out_features, tag)
        assert padded_in % (32 if tag is layout.BFLOAT16_TILES else 8) == 0
        packed = np.zeros(layout.linear_shape(out_features, in_features, tag), np.uint16)
        assert packed.size == padded_out * padded_in
        layout.pack_linear(weight, packed, tag)
        columns = layout.linear_panel_columns(tag)
        for n in range(out_features):
            for k in range(in_features):
                pair, column = k // 2, n % columns
                place = 2 * column + k % 2
                if tag is layout.BFLOAT16:  # the even values of four columns before the odd ones
                    place = column // 4 * 8 + k % 2 * 4 + column % 4
                assert packed[n // columns, pair, place] == weight[n, k]
        assert np.count_nonzero(packed) == weight.size
        unpacked = layout.unpack_linear(packed, out_features, in_features, tag)
        assert np.array_equal(unpacked, weight)
