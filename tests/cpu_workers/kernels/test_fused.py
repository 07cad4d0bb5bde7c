"""One-pass kernels on every bfloat16, compared with torch: equal bits, and NaN for NaN."""

import pytest
import torch
from corun.gpu.fused.activation import ActivationTables, gated_product
from corun.gpu.fused.install import FusedNorm
from corun.gpu.fused.residual import add
from corun.gpu.fused.rope import rotate
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb


def every_value() -> torch.Tensor:
    """bfloat16 [65536], among them infinities, subnormal numbers and 254 kinds of NaN."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    is_number = ~expected.isnan()
    assert torch.equal(~actual.isnan(), is_number)
    assert torch.equal(actual[is_number].view(torch.int16), expected[is_number].view(torch.int16))


@pytest.mark.parametrize("other", [0.0, -1.0, 1 / 3, 1e-38, 3e38, torch.inf, torch.nan])
def test_sums(other: float) -> None:
    values, others = every_value(), torch.full((2**16,), other).bfloat16()
    assert_same(add(values, others), values + others)


# Rows of an odd number of values do not all begin at pairs.
@pytest.mark.parametrize("shape", [(16, 4096), (3, 21845)])
def test_products_with_activated_gates(shape: tuple[int, int]) -> None:
    gates = every_value()[: shape[0] * shape[1]].view(shape)
    table = ActivationTables().of(torch.nn.functional.silu)
    for ups in (gates.flip(0, 1), torch.full(shape, 1 / 3).bfloat16()):
        assert_same(gated_product(gates, ups, table), torch.nn.functional.silu(gates) * ups)


def test_rotations() -> None:
    queries = every_value().view(1, 64, 16, 64).transpose(1, 2)
    keys = queries[:, :4].flip(3)
    angles = torch.linspace(0, 6, 64 * 64).view(1, 64, 64)
    tables = (angles.cos().bfloat16(), angles.sin().bfloat16())
    expected = apply_rotary_pos_emb(queries, keys, *tables)
    for actual, wanted in zip(rotate(queries, keys, *tables), expected, strict=True):
        assert_same(actual, wanted)


def test_a_norm_is_nan_where_the_modules_is() -> None:
    module = LlamaRMSNorm(512).bfloat16()
    rows = every_value().view(128, 512)
    fused = FusedNorm(module.weight, module.variance_epsilon, rounds_twice=True)
    assert torch.equal(fused(rows).isnan(), module(rows).isnan())
