"""Every LoRA backend against a plain loop, over shapes and mixtures of ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from corun.cpu_workers.kernels.simd.layout import BFLOAT16
from corun.gpu.lora.base import LoraBackend
from corun.gpu.lora.numba_backend import NumbaLora
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lora import CASES, LoraCase, check_case, check_group, make_batch
from support.triton.program import run_triton_program

BACKENDS: dict[str, tuple[Callable[..., LoraBackend], torch.dtype]] = {
    "torch-float32": (TorchLora, torch.float32),
    "torch-bfloat16": (TorchLora, torch.bfloat16),
    "torch-float16": (TorchLora, torch.float16),
    "numba-float32": (NumbaLora, torch.float32),
    "numba-bfloat16": (NumbaLora, torch.bfloat16),
    "numba-bfloat16-portable": (partial(NumbaLora, tag=BFLOAT16), torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", BACKENDS)
def test_agrees_with_a_plain_loop(name: str, case: LoraCase) -> None:
    make, dtype = BACKENDS[name]
    check_case(case, lambda table: make(table, dtype=dtype), dtype)


@st.composite
def lora_cases(draw: st.DrawFn) -> LoraCase:
    ranks = draw(st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=5))
    segments, start = [], 0
    for _ in range(draw(st.integers(1, 6))):
        start += draw(st.integers(0, 3))
        end = start + draw(st.sampled_from((1, 2, 4, 7, 8, 9, 21)))
        segments.append((start, end, draw(st.integers(0, len(ranks) - 1))))
        start = end
    return LoraCase(
        name="drawn",
        in_features=draw(st.integers(1, 70)),
        out_features=draw(st.integers(1, 150)),
        ranks=tuple(ranks),
        segments=tuple(segments),
        num_tokens=start + draw(st.integers(0, 2)),
    )


@pytest.mark.parametrize("name", ["numba-float32", "numba-bfloat16", "numba-bfloat16-portable"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=lora_cases(), seed=st.integers(0, 1000))
def test_agrees_on_drawn_shapes(name: str, case: LoraCase, seed: int) -> None:
    make, dtype = BACKENDS[name]
    check_case(case, lambda table: make(table, dtype=dtype), dtype, seed=seed)


def test_rows_of_wider_tensors() -> None:
    # x and y may be slices of wider tensors: fused linears hand out such views.
    table = LoraTable(1, 1, "cpu")
    backend = NumbaLora(table, dtype=torch.float32)
    a, b = torch.randn(4, 64), torch.randn(32, 4)
    row = table.add(DeviceAdapter({0: backend.pack(a, b, 1.0)}))
    wide_x, wide_y = torch.randn(6, 80), torch.zeros(6, 100)
    backend.add_delta(wide_x[:, 8:72], wide_y[:, 50:82], 0, make_batch([(1, 5, 0)], table, [row]))
    expected = torch.zeros(6, 100)
    expected[1:5, 50:82] = wide_x[1:5, 8:72] @ a.t() @ b.t()
    torch.testing.assert_close(wide_y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("in_features", [64, 37])
def test_targets_of_one_input_together(name: str, in_features: int) -> None:
    make, dtype = BACKENDS[name]
    check_group(lambda table: make(table, dtype=dtype), dtype, in_features=in_features)


def test_triton_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_triton_program("check_lora", "interpret", TRITON_INTERPRET="1")


@pytest.mark.parametrize("card", ["80", pytest.param("90", marks=pytest.mark.full)])
def test_triton_compiles_for_gpus_that_are_not_here(card: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run_triton_program("check_lora", card, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_on_a_device(dtype: torch.dtype, case: LoraCase) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from corun.gpu.lora.triton_backend import TritonLora

    check_case(case, lambda table: TritonLora(table, dtype=dtype), dtype, device="cuda")
