"""The Triton kernels in Triton's interpreter, against a float64 loop over rows and heads.

bfloat16 is left out: the interpreter computes it wrongly. A GPU's tensor cores round otherwise
than the interpreter, so the same comparison runs on a GPU where there is one.
"""

import json
from pathlib import Path

import pytest
import torch
from corun.gpu.attention.triton_backend import TritonAttention
from support.attention import Problem, dense_oracle, make_call
from support.triton_program import run_triton_program

pytest.importorskip("triton")

_TOLERANCES = {"torch.float32": 1e-5, "torch.float16": 2e-3}


def test_equals_the_dense_oracle_in_the_interpreter() -> None:
    errors = json.loads(run_triton_program("triton_attention", TRITON_INTERPRET="1"))
    assert len(errors) == 40
    for name, error in errors.items():
        # Written so that NaN fails.
        assert error < _TOLERANCES[name.rsplit("-", 1)[1]], (name, error)


def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    sizes = json.loads(
        run_triton_program("compile_triton_attention", TRITON_CACHE_DIR=str(tmp_path))
    )
    assert set(sizes) == {"write_kv", "decode", "prefill", "merge"}
    assert min(sizes.values()) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (9, 1, 40)])
def test_equals_the_dense_oracle_on_a_gpu(dtype: torch.dtype, query_lens: tuple[int, ...]) -> None:
    call = make_call(Problem(query_lens, (50, 17, 90), heads=14, sliding_window=30, dtype=dtype))
    expected = dense_oracle(call)
    attended = TritonAttention().forward(*call.to("cuda").arguments()).cpu()
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (attended.double() - expected).abs().max().item() < tolerance
