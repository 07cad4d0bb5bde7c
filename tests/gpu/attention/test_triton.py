"""The Triton kernels in Triton's interpreter, against a float64 loop over rows and heads.

bfloat16 is excluded: the interpreter computes it wrongly. A GPU's tensor cores round differently
from the interpreter, so the same comparison runs on a GPU if there is one.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corun.gpu.attention.triton_backend import TritonAttention, tile_shape
from support.attention import Problem, dense_oracle, make_call
from support.triton.program import run_triton_program

pytest.importorskip("triton")

_TOLERANCES = {"torch.float32": 1e-5, "torch.float16": 2e-3}


@pytest.mark.parametrize(
    ("what", "num_problems"), [("some", 30), pytest.param("float16", 24, marks=pytest.mark.full)]
)
def test_equals_the_dense_oracle_in_the_interpreter(what: str, num_problems: int) -> None:
    errors = json.loads(run_triton_program("check_attention", what, TRITON_INTERPRET="1"))
    assert len(errors) == num_problems
    for name, error in errors.items():
        # Written so that NaN fails.
        assert error < _TOLERANCES[name.rsplit("-", 1)[1]], (name, error)


# 86 and 89 have the least shared memory. A register that is full costs a copy to memory each round.
@pytest.mark.parametrize("cards", [(86,), pytest.param((80, 89, 90), marks=pytest.mark.full)])
def test_kernels_compile_for_gpus_that_are_not_here(cards: tuple[int, ...], tmp_path: Path) -> None:
    compiled = json.loads(
        run_triton_program("compile_attention", *map(str, cards), TRITON_CACHE_DIR=str(tmp_path))
    )
    kinds = [
        f"{kind} {layer}" for kind in ("decode", "prefill") for layer in ("odd", "128", "7 of 128", "256")
    ]
    names = {f"sm_{card} {name}" for card in cards for name in ("write_kv", "merge", *kinds)}
    assert compiled.keys() == names
    for name, kernel in compiled.items():
        assert kernel["binary_bytes"] > 0, name
        assert kernel["shared_bytes"] <= kernel["limit_bytes"], (name, kernel)
        # Two values of 4 bytes for a model with everything; four for groups of 7, on two cards.
        most = {"decode odd": 8, "prefill 7 of 128": 16 if name.startswith(("sm_86", "sm_89")) else 0}
        assert kernel["spilled_bytes"] <= most.get(name.partition(" ")[2], 0), (name, kernel)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, 227 << 10])
def test_common_heads_have_large_tiles_on_every_card(dim: int, shared_bytes: int) -> None:
    for is_decode, num_rows in ((True, 16), (False, 64 if shared_bytes < 160 << 10 else 128)):
        tile = tile_shape(4, dim, dim, 2, shared_bytes, is_decode=is_decode)
        assert tile == (num_rows, 64)


def test_a_tile_holds_a_whole_group_of_heads() -> None:
    assert tile_shape(32, 512, 512, 2, 64 << 10, is_decode=True) == (32, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (9, 1, 40)])
@pytest.mark.parametrize("dim", [32, 256])
def test_equals_the_dense_oracle_on_a_gpu(dtype: torch.dtype, query_lens: tuple[int, ...], dim: int) -> None:
    problem = Problem(query_lens, (50, 17, 90), heads=14, sliding_window=30, dtype=dtype)
    call = make_call(replace(problem, key_dim=dim, value_dim=dim))
    expected = dense_oracle(call)
    attended = TritonAttention().forward(*call.to("cuda").arguments()).cpu()
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (attended.double() - expected).abs().max().item() < tolerance
