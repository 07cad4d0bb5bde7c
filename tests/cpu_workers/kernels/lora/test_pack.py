"""Matrices packed from their bytes in files: as converted by torch and packed by numpy."""

import numpy as np
import pytest
import torch
from corun.cpu_workers.kernels.lora.pack import pack_stored
from corun.cpu_workers.kernels.simd import layout

_STORED = {4: torch.float32, 2: torch.bfloat16}


def bits_of(matrix: torch.Tensor) -> np.ndarray:
    return matrix.view(torch.int16 if matrix.itemsize == 2 else torch.int32).numpy()


@pytest.mark.parametrize("item_bytes", [4, 2])
def test_packed_matrices_are_those_of_torch_and_numpy(item_bytes: int) -> None:
    """Of many shapes in one call, at any address, to places with other contents."""
    generator = torch.Generator().manual_seed(0)
    rows, expected, places, sources, largest = [], [], [], [], []
    for height, width in ((1, 1), (7, 5), (8, 16), (9, 33), (13, 37), (16, 64), (24, 3), (40, 8)):
        values = torch.randn(height, width, generator=generator)
        values.view(-1)[:1] = 1e-40  # a subnormal number
        values.view(-1)[-1:] = -3e38
        stored = values.to(_STORED[item_bytes])
        source = np.frombuffer(b"??" + bits_of(stored).tobytes(), np.uint8)
        halves = bits_of(stored.bfloat16()).view(np.uint16)
        for pack, unit in ((layout.pack_a, 4), (layout.pack_b, 2)):
            packed = pack(halves)
            place = np.full(packed.shape, 0xA5A5, np.uint16)
            _, steps, tile, _ = packed.shape
            start, target = source.ctypes.data + 2, place.ctypes.data
            rows.append((start, item_bytes, height, width, steps * unit, target, tile, 2 * unit))
            largest.append(int(bits_of(stored.abs()).max()))
            expected.append(packed)
            places.append(place)
            sources.append(source)
    found = np.zeros(len(rows), np.uint32)
    pack_stored(np.array(rows, np.int64), found)
    for place, packed in zip(places, expected, strict=True):
        assert np.array_equal(place, packed)
    assert found.tolist() == largest


@pytest.mark.parametrize("item_bytes", [4, 2])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -float("nan")])
def test_what_is_not_finite_is_the_largest(value: float, item_bytes: int) -> None:
    stored = torch.zeros(9, 16, dtype=_STORED[item_bytes])
    stored[8, 15] = value
    place, found = np.zeros(2 * 8 * 16, np.uint16), np.zeros(1, np.uint32)
    pack_stored(np.array([(stored.data_ptr(), item_bytes, 9, 16, 16, place.ctypes.data, 8, 8)]), found)
    assert found[0] >= (0x7F80_0000 if item_bytes == 4 else 0x7F80)
