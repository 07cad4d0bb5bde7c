"""Typical directories of base models: the base and its adapters answer as with PEFT."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corun import Engine, LoRARequest, ModelError, RequestError, SamplingParams
from corun.runtime.engine.assembly.adapter_check import run_check
from safetensors.torch import load_file, save_file
from support.parity import MAX_LOGPROBS, AdapterSpec, ParityCase, largest_error
from support.peft_adapters import WEIGHTS, edit_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4
PROMPTS = ([5, 9, 31], [int(7 + i * 13 % 80) for i in range(40)])
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=MAX_LOGPROBS, ignore_eos=True)


def check(case: ParityCase, model: Path, adapters: dict[str, Path], **options: Any) -> None:
    """Ask ``model`` and its adapters together; hold the answers to the truth of ``case``."""
    asked = [(prompt, name) for prompt in PROMPTS for name in (None, *adapters)]
    options = {"dtype": "float32", "device": "cpu", "memory_gib": 0.1, **options}
    with Engine(model=str(model), **options) as engine:
        loras = [None if name is None else LoRARequest(name, 1, str(adapters[name])) for _, name in asked]
        outputs = engine.generate([prompt for prompt, _ in asked], GREEDY, loras)
    for (_, name), output in zip(asked, outputs, strict=True):
        assert largest_error(case, output, name) < MAX_RELATIVE_ERROR


def test_an_adapter_beside_the_base(tmp_path: Path) -> None:
    """The base is unchanged, and adapters are added only to it, also the one beside it."""
    specs = (AdapterSpec("beside"), AdapterSpec("other", {"r": 3}))
    case = ParityCase("qwen3", tmp_path, specs=specs)
    both = shutil.copytree(case.directory, tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(case.adapters["beside"] / name, both)
    check(case, both, {"beside": both, "other": case.adapters["other"]})


def test_one_adapter_under_many_names(tmp_path: Path) -> None:
    case = ParityCase("qwen3", tmp_path, specs=(AdapterSpec("one"),))
    prompt, path = PROMPTS[1], str(case.adapters["one"])
    with Engine(model=str(case.directory), dtype="float32", device="cpu", memory_gib=0.1) as engine:
        loras = [LoRARequest(f"name {number}", number, path) for number in range(1, 7)]
        outputs = engine.generate([prompt] * 6, GREEDY, loras)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    for output in outputs:
        assert largest_error(case, output, "one") < MAX_RELATIVE_ERROR


def test_a_base_with_a_weight_that_is_no_number(tmp_path: Path) -> None:
    """The parity probe refuses it: there is no answer to be near to."""
    case = ParityCase("qwen3", tmp_path)
    file = case.directory / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="relative error inf"):
        Engine(model=str(case.directory), dtype="float32", device="cpu", memory_gib=0.1)


def test_prompts_that_fill_the_context(tmp_path: Path) -> None:
    """In chunks of a part of it; one token more is refused."""
    case = ParityCase("qwen3", tmp_path, specs=(AdapterSpec("one"),))
    longest = [int(7 + i * 13 % 80) for i in range(255)]
    with Engine(
        model=str(case.directory),
        dtype="float32",
        device="cpu",
        memory_gib=0.1,
        max_model_len=256,
        max_num_batched_tokens=64,
    ) as engine:
        lora = LoRARequest("one", 1, str(case.adapters["one"]))
        once = replace(GREEDY, max_tokens=1)
        for name, asked in ((None, None), ("one", lora)):
            (output,) = engine.generate([longest], once, asked)
            assert len(output.outputs[0].token_ids) == 1
            assert largest_error(case, output, name) < MAX_RELATIVE_ERROR
        with pytest.raises(RequestError, match="maximum context length is 256 tokens"):
            engine.generate([[*longest, 5]], once)


def test_greedy_choices_are_equal_and_drawn_ones_repeat(tmp_path: Path) -> None:
    case = ParityCase("qwen3", tmp_path, specs=(AdapterSpec("one"),))
    with Engine(model=str(case.directory), dtype="float32", device="cpu", memory_gib=0.1) as engine:
        lora = LoRARequest("one", 1, str(case.adapters["one"]))

        def choices(**params: Any) -> list[tuple[int, ...]]:
            sampling = SamplingParams(max_tokens=12, ignore_eos=True, **params)
            (output,) = engine.generate([PROMPTS[1]], sampling, lora)
            return [tuple(one.token_ids) for one in output.outputs]

        assert len(set(choices(n=4, temperature=0))) == 1
        drawn = choices(n=8, seed=5, temperature=1.0)
        assert drawn == choices(n=8, seed=5, temperature=1.0) and len(set(drawn)) > 1


GPT2: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled by the layer": {"scale_attn_by_inverse_layer_idx": True},
    "not scaled": {"scale_attn_weights": False},
    "upcast": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
}


@pytest.mark.parametrize("variant", GPT2)
def test_gpt2(variant: str, tmp_path: Path) -> None:
    """Its linears keep their weights transposed; PEFT says so of its adapters, or not."""
    case = ParityCase("gpt2", tmp_path)
    config = case.directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **GPT2[variant]}))
    for name, path in case.adapters.items():
        edit_config(path, fan_in_fan_out=name != "one")
    check(case, case.directory, case.adapters)


@pytest.mark.parametrize("backend", ["onednn", "plain"])
def test_gpt2_on_every_linear_backend(backend: str, tmp_path: Path) -> None:
    case = ParityCase("gpt2", tmp_path, specs=(AdapterSpec("all", {"target_modules": "all-linear"}),))
    check(case, case.directory, case.adapters, linear_backend=backend)


def test_an_adapter_of_a_plain_linear_that_says_fan_in_fan_out(tmp_path: Path) -> None:
    """PEFT goes by the module, and so does the engine."""
    case = ParityCase("qwen3", tmp_path, specs=(AdapterSpec("plain"),))
    edit_config(case.adapters["plain"], fan_in_fan_out=True)
    check(case, case.directory, case.adapters)


WRAPPED = ("qwen2_5_vl", "qwen3_vl", "mistral3", "llava", "internvl", "glm4v")
REGEX = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|gate_up_proj)"


@pytest.mark.parametrize("model_type", WRAPPED)
def test_the_text_of_wrappers(model_type: str, tmp_path: Path) -> None:
    """Plain names and "all-linear" take modules of the tower, too, which text never meets."""
    names = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 3}
    specs = (
        AdapterSpec("regex", {"target_modules": REGEX}),
        AdapterSpec("names", names),
        AdapterSpec("names, of text alone", names),
        AdapterSpec("all", {"target_modules": "all-linear", "use_rslora": True}),
    )
    case = ParityCase(model_type, tmp_path, specs=specs)
    leave_out_towers(case.adapters["names, of text alone"])
    check(case, case.directory, case.adapters)
    for path in case.adapters.values():
        assert run_check(path, str(case.directory)).problems == ()


def leave_out_towers(directory: Path) -> None:
    """Leave the language model's tensors alone, and no others."""
    tensors = load_file(directory / WEIGHTS)
    text = {name: tensor for name, tensor in tensors.items() if ".language_model." in name}
    assert text
    save_file(text, directory / WEIGHTS)
