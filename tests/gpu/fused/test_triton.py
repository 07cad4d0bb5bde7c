"""The Triton kernels between products, put into models in the interpreter, and compiled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.fused.triton_backend import Sum, resolved
from support.triton.program import run_triton_program

pytest.importorskip("triton")

# Norms, gated activations, rotations and layers that are replaced.
MODELS = {
    "gemma3": [13, 2, 2, 2],  # norms of queries and keys, and norms around sums
    "other": [4, 2, 1, 1],  # a Llama some modules of which compute something else
}
GATED = {
    "qwen3": [9, 2, 2, 2],
    "gemma2": [9, 2, 2, 2],
    "llama3-rope": [5, 2, 2, 2],
    "phi3": [5, 2, 2, 2],
    "granite": [5, 2, 2, 2],
}
OTHER_FORMS = {
    "olmo2": [9, 2, 0, 2],
    "cohere": [0, 2, 0, 0],
    "gpt-neox": [0, 0, 2, 0],
    "mixtral": [5, 0, 2, 2],
}
_TWICE = {"gated_kernel": 2, "rotate_kernel": 2, "attend_kernel": 2}


def check(device: str, replaced: dict[str, list[int]], tolerance: float, **variables: str) -> None:
    found = json.loads(run_triton_program("check_fused", device, *replaced, **variables))
    assert {name: model["replaced"] for name, model in found.items()} == replaced
    for name, model in found.items():
        # Written so that NaN fails.
        assert model["plain"] < tolerance, name
        assert model["paged"] < tolerance, name
        if model["replaced"][1:] == [2, 2, 2]:
            # A sum is computed with the norms around it, and a rotation with the norms before it
            # and the write to the pool.
            assert model["launches"] == {"norm_kernel": 5, **_TWICE}, name


@pytest.mark.parametrize(
    "replaced",
    [MODELS, pytest.param(GATED, marks=pytest.mark.full), pytest.param(OTHER_FORMS, marks=pytest.mark.full)],
)
def test_models_compute_what_their_own_modules_do(replaced: dict[str, list[int]]) -> None:
    check("cpu", replaced, 4e-3, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_compute_on_a_gpu_what_their_own_modules_do() -> None:
    check("cuda", MODELS | GATED | OTHER_FORMS, 3e-2)


def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    # gemma3 has norms of queries and keys, and norms before and after a sum.
    architectures = ("gemma3", "llama3-rope")
    program = run_triton_program("compile_fused", *architectures, TRITON_CACHE_DIR=str(tmp_path))
    compiled = json.loads(program)
    assert tuple(compiled) == architectures
    for used in compiled.values():
        assert used.keys() == {"norm_kernel", "gated_kernel", "rotate_kernel"}
        # A fused operation would not round the products before their sum, as the modules do.
        assert {"mul", "add"} <= set(used["rotate_kernel"])
        assert "fma" not in used["rotate_kernel"]


def test_a_sum_that_waits_is_a_tensor_to_all_that_read_it() -> None:
    waits: Any = Sum  # as modules take it for a tensor
    a, b = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    expected = a + b
    for total in (waits(a) + b, b + waits(a), torch.add(waits(a), b), waits(a) + waits(b)):
        assert torch.equal(resolved(total), expected)
    weight, own = torch.randn(5, 4), a.clone()
    own += waits(b)
    assert torch.equal(own, expected)
    read = {
        "sum": waits(a) + b + b,
        "broadcast": waits(a) + 1.0,
        "type": waits(a) + b.double(),
        "reversed": 2.0 - waits(a),
        "linear": torch.nn.functional.linear(waits(a) + b, weight),
        "list": torch.cat([waits(a) + b, a]),
        "keyword": torch.mul(input=a, other=waits(b)),
        "item": (waits(a) + b)[0, 1:],
        "method": (waits(a) + b).float().view(3, 4),
        "comparison": waits(a) == a,
    }
    wanted = {
        "sum": expected + b,
        "broadcast": a + 1.0,
        "type": a + b.double(),
        "reversed": 2.0 - a,
        "linear": torch.nn.functional.linear(expected, weight),
        "list": torch.cat([expected, a]),
        "keyword": a * b,
        "item": expected[0, 1:],
        "method": expected.view(3, 4),
        "comparison": a == a,  # noqa: PLR0124
    }
    for name, one in read.items():
        assert torch.equal(resolved(one), wanted[name]), name
        assert resolved(one).dtype == wanted[name].dtype, name
