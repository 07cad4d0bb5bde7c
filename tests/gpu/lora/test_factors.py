"""Factors of DoRA: made as PEFT makes them, applied by every back end, and refused where wrong."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from corun.cpu_workers.kernels.lora.factors import scale_rows
from corun.gpu.lora.base import LoraBackend
from corun.gpu.lora.factors import merged_norms
from corun.gpu.lora.numba_backend import NumbaLora
from corun.gpu.lora.table import LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from support.lora import check_factors

_BACKENDS: dict[str, tuple[Callable[..., LoraBackend], torch.dtype]] = {
    "torch-float32": (TorchLora, torch.float32),
    "torch-bfloat16": (TorchLora, torch.bfloat16),
    "numba-float32": (NumbaLora, torch.float32),
    "numba-bfloat16": (NumbaLora, torch.bfloat16),
}


@pytest.mark.parametrize("num_tokens", [7, 1200])
@pytest.mark.parametrize("name", _BACKENDS)
def test_rows_of_adapters_with_factors_are_scaled(name: str, num_tokens: int) -> None:
    make, dtype = _BACKENDS[name]
    check_factors(lambda table: make(table, dtype=dtype), dtype, num_tokens=num_tokens)


def test_passes_compile_no_kernel_after_the_preparation() -> None:
    NumbaLora(LoraTable(1, 1, "cpu"), dtype=torch.float32).prepare_factors()
    (signature,) = scale_rows.signatures
    for dtype in (torch.float32, torch.bfloat16):
        check_factors(partial(NumbaLora, dtype=dtype), dtype)
    assert scale_rows.signatures == [signature]


def test_norms_of_many_rows_are_those_of_the_merged_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((700, 3000), (5, 3000), (700, 5)))
    expected = (weight.double() + 0.5 * b.double() @ a.double()).norm(dim=1)
    found = merged_norms(weight, a, b, 0.5).double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
