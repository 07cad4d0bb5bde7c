"""Weights of 8 and 4 bits: their error, and that packing preserves them."""

import numpy as np
import pytest
import torch
from corun.gpu.linear.quantized import QuantizedWeight, quantize
from corun.gpu.linear.quantized_linear import PackedWeight


def _weight(out_features: int, in_features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out_features)
    weight = 0.02 * torch.randn(out_features, in_features, generator=generator)
    weight[1, 64:128] = 0
    weight[2, :64] = 1e-42  # the scale would be zero
    return weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 8)])
def test_every_weight_is_as_near_as_codes_allow(bits: int, steps: int, dtype: torch.dtype) -> None:
    weight = _weight(70, 192).to(dtype)
    quantized = quantize(weight, bits)
    weight = weight.float()
    largest = weight.reshape(70, 3, 64).abs().amax(dim=-1, keepdim=True)
    error = torch.from_numpy(quantized.dequantized()).reshape(70, 3, 64) - weight.reshape(70, 3, 64)
    # With 4 bits there is no code for what is as large as the largest, of the other sign.
    bound = largest / steps * (0.5 + 1e-5)
    if bits == 4:  # scales are rounded to float16
        bound = largest / steps * (1 + 2**-9) + 2**-22
    assert bool((error.abs() <= bound).all())
    assert bool((error.reshape(70, 192)[1, 64:128] == 0).all())
    assert quantized.scales[1, 1] == 0


def test_a_matrix_of_the_smallest_weights_keeps_its_scales() -> None:
    weight = torch.full((1, 64), 2.0**-22).bfloat16()
    assert (quantize(weight, 4).dequantized() == 2.0**-22).all()
    assert PackedWeight.of(quantize(weight, 4)).name == "int8"
    weight = torch.cat([weight, torch.ones(1, 64).bfloat16()])
    assert PackedWeight.of(quantize(weight, 4)).name == "int4"


def test_the_first_of_several_largest_weights_is_exact() -> None:
    weight = torch.zeros(2, 64)
    weight[0, 3], weight[0, 9] = 4.0, -4.0
    weight[1, 3], weight[1, 9] = -4.0, 4.0
    quantized = quantize(weight.bfloat16(), 4)
    assert quantized.scales.tolist() == [[-0.5], [0.5]]
    assert quantized.dequantized()[:, [3, 9]].tolist() == [[4.0, -3.5], [-4.0, 3.5]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_no_number_is_refused(bits: int, value: float) -> None:
    weight = _weight(64, 64)
    weight[5, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, bits)


@pytest.mark.parametrize("bits", [8, 4, "4 with zero points"])
@pytest.mark.parametrize(("out_features", "in_features"), [(3, 64), (64, 128), (70, 192)])
def test_packing_keeps_every_code(out_features: int, in_features: int, bits: int | str) -> None:
    quantized = quantize(_weight(out_features, in_features), 8 if bits == 8 else 4)
    if bits == "4 with zero points":
        generator = np.random.default_rng(0)
        zeros = generator.integers(0, 16, quantized.scales.shape).astype(np.uint8)
        scales = quantized.scales.astype(np.float16).astype(np.float32)
        quantized = QuantizedWeight(4, quantized.codes, scales, zeros)
    packed = PackedWeight.of(quantized)
    again = packed.unpacked()
    assert np.array_equal(again.codes, quantized.codes)
    assert np.array_equal(again.scales, quantized.scales)
    assert np.array_equal(again.zero_points, quantized.zero_points)  # type: ignore[arg-type]
    assert np.array_equal(again.dequantized(), quantized.dequantized())
