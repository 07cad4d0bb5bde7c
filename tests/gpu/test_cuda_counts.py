"""What a step asks of a GPU, counted without one on a model of real size: exact figures of today.

A change that makes a figure smaller writes the smaller one here. A larger one needs a reason.
"""

import json

import pytest
from support.triton.program import cxx_compiler, run_triton_program

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    cxx_compiler() is None,
    reason="fake CUDA tensors need a C++ compiler (Debian and Ubuntu: the package g++)",
)

Figures = dict[str, dict[str, int]]

# By step of 32 rows: launches of the forward pass, launches of the sampler, waits of the host for
# the device, copies between both and their bytes.
_LLAMA_8B = {
    "base": (302, 7, 1, 8, 6148),
    "adapters": (558, 7, 1, 11, 6532),
    "one adapter": (558, 7, 1, 11, 6172),
    "one long context": (334, 7, 1, 8, 264196),
    "prompt": (558, 7, 1, 11, 12844),
    "temperature": (302, 18, 1, 9, 6788),
    "top_p": (302, 42, 1, 9, 7716),
    "penalties": (302, 49, 1, 9, 8484),
    "min_tokens": (302, 8, 1, 9, 6916),
    "logprobs": (302, 18, 1, 9, 17156),
    "all parameters": (302, 61, 1, 9, 533796),
}
_COUNTED = ("launches", "sampling launches", "waits", "copies", "copied bytes")


def _count(*models: str) -> dict[str, Figures]:
    counted: dict[str, Figures] = json.loads(run_triton_program("count_steps", *models))
    return counted


@pytest.fixture(scope="module")
def llama() -> Figures:
    return _count("llama3-8b")["llama3-8b"]


@pytest.mark.parametrize("step", _LLAMA_8B)
def test_a_step_of_an_8b_model(llama: Figures, step: str) -> None:
    assert tuple(llama[step][name] for name in _COUNTED) == _LLAMA_8B[step]


# q and k are normed with their rotation, and Gemma's norms behind a module with the sum.
@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "base", "adapters"), [("qwen3-8b", 338, 626), ("gemma2-9b", 396, 732)]
)
def test_launches_of_other_models(model: str, base: int, adapters: int) -> None:
    counted = _count(model)[model]
    launches = counted["base"]["launches"], counted["adapters"]["launches"]
    assert launches == (base, adapters)


def test_rounds_of_the_longest_program(llama: Figures) -> None:
    """Programs of a launch run side by side, the rounds of one after another."""
    for step in ("adapters", "one adapter", "prompt"):
        assert llama[step]["rounds of shrink_kernel"] == 14, step
    assert llama["one long context"]["rounds of attend_kernel"] == 64
