"""What a step asks of a GPU, counted without one on a model of real size: exact figures of today.

A change that makes a figure smaller writes the smaller one here. A larger one needs a reason.
"""

import json

import pytest
from corun.gpu.check.steps import COUNTED, COUNTED_SAMPLING
from corun.runtime.sim.papers.machines import LAUNCHES, LORA_LAUNCHES
from support.architectures import ARCHITECTURES
from support.triton.program import cxx_compiler, run_triton_program

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    cxx_compiler() is None,
    reason="fake CUDA tensors need a C++ compiler (Debian and Ubuntu: the package g++)",
)

Figures = dict[str, dict[str, int]]

# By step of 32 rows: launches of the forward pass, launches of the sampler, waits of the host for
# the device, copies between both and their bytes: inputs, parameters of sampling, tokens back.
_LLAMA_8B = {
    "base": (303, 7, 1, 2, 2320),
    "adapters": (559, 7, 1, 2, 2704),
    "one adapter": (559, 7, 1, 2, 2416),
    "one long context": (335, 7, 1, 2, 2320),
    "and adapters": (591, 7, 1, 2, 2704),
    "prompt": (560, 7, 1, 2, 12984),
    "temperature": (303, 15, 1, 3, 2960),
    "top_p": (303, 40, 1, 3, 3632),
    "penalties": (303, 47, 1, 3, 4400),
    "min_tokens": (303, 8, 1, 3, 3088),
    "logprobs": (303, 18, 1, 3, 13328),
    "all parameters": (303, 59, 1, 3, 529712),
}
_PLAIN_AND_MODULES = ("llama3-rope", "llama3-rope/fp8 blocks")
_COUNTED = ("launches", "sampling launches", "waits", "copies", "copied bytes")


def _count(*models: str) -> dict[str, Figures]:
    figures: dict[str, Figures] = json.loads(run_triton_program("count_steps", *models))
    return figures


@pytest.fixture(scope="module")
def counted() -> dict[str, Figures]:
    """Of all models below in one process, whose start takes as long as some of them."""
    return _count("llama3-8b", *_PLAIN_AND_MODULES)


@pytest.fixture(scope="module")
def llama(counted: dict[str, Figures]) -> Figures:
    return counted["llama3-8b"]


@pytest.mark.parametrize("step", _LLAMA_8B)
def test_a_step_of_an_8b_model(llama: Figures, step: str) -> None:
    assert tuple(llama[step][name] for name in _COUNTED) == _LLAMA_8B[step]


def test_the_check_and_simulated_gpus_expect_what_is_counted() -> None:
    expected = {step: outside + 32 * of_layer for step, (outside, of_layer) in COUNTED.items()}
    assert expected == {step: _LLAMA_8B[step][0] for step in COUNTED}
    assert _LLAMA_8B["base"][1] == COUNTED_SAMPLING
    assert (expected["base"], expected["adapters"]) == (LAUNCHES, LAUNCHES + LORA_LAUNCHES)


def _check_memory(largest: dict[str, int]) -> None:
    assert largest["first"] - largest["again"] < 2**20, "it has taken memory that it keeps"
    assert 0.6 * largest["set aside"] < largest["first"] <= largest["set aside"]


def test_the_largest_step_has_its_memory(llama: Figures) -> None:
    _check_memory(llama["largest"])


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_the_largest_step_of_experts_has_its_memory(model: str) -> None:
    _check_memory(_count(model)[model]["largest"])


# q and k are normed with their rotation, and Gemma's norms behind a module with the sum.
@pytest.mark.full
@pytest.mark.parametrize(("model", "base", "adapters"), [("qwen3-8b", 339, 627), ("gemma2-9b", 397, 733)])
def test_launches_of_other_models(model: str, base: int, adapters: int) -> None:
    counted = _count(model)[model]
    launches = counted["base"]["launches"], counted["adapters"]["launches"]
    assert launches == (base, adapters)
    _check_memory(counted["largest"])


# Launches of tiny models of two layers, without and with adapters.
_ARCHITECTURES = {
    "llama3-rope": (33, 49),
    "llama-yarn": (33, 49),
    "mistral": (33, 49),
    "qwen2": (33, 49),
    "qwen3": (33, 49),
    "gemma2": (37, 53),
    "gemma3": (43, 59),
    "phi3": (37, 53),
    "phi3-longrope": (42, 58),
    "olmo2": (62, 78),
    "granite": (39, 55),
    "starcoder2": (42, 58),
    "cohere": (32, 44),
    "gpt-neox": (42, 58),
    "mixtral": (73, 81),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_waits_once(name: str) -> None:
    """A new release of transformers may add kernels, or a wait, to a model."""
    counted = _count(name)[name]
    steps = [counted[step] for step in ("base", "adapters")]
    assert tuple(step["launches"] for step in steps) == _ARCHITECTURES[name]
    assert [(step["waits"], step["copies"]) for step in steps] == [(1, 2), (1, 2)]


def test_modules_of_a_format(counted: dict[str, Figures]) -> None:
    """Plain linears of one input are one product, of which one launch expands the deltas.

    Modules are 7 of a layer instead of 4, each with its own result.
    """
    plain, modules = (counted[name] for name in _PLAIN_AND_MODULES)
    for step, more in (("base", 3), ("adapters", 3 + 3)):
        assert modules[step]["launches"] - plain[step]["launches"] == 2 * more, step
        assert (modules[step]["waits"], modules[step]["copies"]) == (1, 2)


def test_rounds_of_the_longest_program(llama: Figures) -> None:
    """Programs of a launch run side by side, the rounds of one after another."""
    for step, num_rounds in (("adapters", 14), ("one adapter", 14), ("prompt", 28)):
        assert llama[step]["rounds of shrink_kernel"] == num_rounds, step
    assert llama["one long context"]["rounds of attend_kernel"] == 32
