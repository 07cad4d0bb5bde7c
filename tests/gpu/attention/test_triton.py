"""The Triton kernels in Triton's interpreter, against a float64 loop over rows and heads.

bfloat16 is left out: the interpreter computes it wrongly. A GPU's tensor cores round otherwise
than the interpreter, so the same comparison runs on a GPU where there is one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from corun.gpu.attention.triton_backend import TritonAttention
from support.attention import Problem, dense_oracle, make_call

pytest.importorskip("triton")

_TESTS = Path(__file__).parents[2]
_TOLERANCES = {"torch.float32": 1e-5, "torch.float16": 2e-3}


def _run(module: str, **variables: str) -> dict[str, float]:
    """Run a program of tests/support in a fresh process and read the JSON that it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(_TESTS), "OMP_NUM_THREADS": "1", **variables}
    finished = subprocess.run(
        [sys.executable, "-m", f"support.{module}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    figures: dict[str, float] = json.loads(finished.stdout)
    return figures


def test_equals_the_dense_oracle_in_the_interpreter() -> None:
    errors = _run("triton_attention", TRITON_INTERPRET="1")
    assert len(errors) == 40
    for name, error in errors.items():
        # Written so that NaN fails.
        assert error < _TOLERANCES[name.rsplit("-", 1)[1]], (name, error)


def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    sizes = _run("compile_triton_attention", TRITON_CACHE_DIR=str(tmp_path))
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
