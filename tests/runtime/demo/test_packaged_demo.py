"""The files that ship: they load, they are small, and they do what the model card says."""

import json

import pytest
import torch
from corun.runtime.demo import chat_prompt, demo_adapters_path, demo_model_path
from demo import tool_calls
from demo.adapter_training import adapter_configs
from demo.evaluation import answer_all, evaluate
from demo.tasks import TASKS
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

# PEFT reads a property of transformers that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

MAX_DATA_BYTES = 6_500_000
NAMES = {*TASKS, tool_calls.NAME}


def test_the_package_data_is_complete_and_small() -> None:
    data = demo_model_path().parent
    model_files = {path.name for path in demo_model_path().iterdir()}
    assert model_files == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in demo_adapters_path().iterdir()} == NAMES
    for name in NAMES:
        files = {path.name for path in (demo_adapters_path() / name).iterdir()}
        template = {"chat_template.jinja"} if name == tool_calls.NAME else set()
        assert files == {"adapter_config.json", "adapter_model.safetensors"} | template
    sizes = [path.stat().st_size for path in data.rglob("*") if path.is_file()]
    assert sum(sizes) < MAX_DATA_BYTES
    assert "corun-demo" in (data / "README.md").read_text()


def test_configuration_is_that_of_the_script() -> None:
    ranks = set()
    for name, wanted in adapter_configs().items():
        config = PeftConfig.from_pretrained(str(demo_adapters_path() / name))
        saved = json.loads((demo_adapters_path() / name / "adapter_config.json").read_text())
        assert config.r == wanted.r
        assert config.use_rslora == wanted.use_rslora
        assert config.rank_pattern == wanted.rank_pattern
        assert set(config.target_modules) == set(wanted.target_modules)
        assert saved["base_model_name_or_path"] in (None, "corun-demo")
        ranks.add(config.r)
    assert ranks == {4, 8, 16, 32, 64}


def test_tensors_are_bfloat16_and_finite() -> None:
    files = [demo_model_path() / "model.safetensors"]
    files += [demo_adapters_path() / name / "adapter_model.safetensors" for name in NAMES]
    for file in files:
        for name, tensor in load_file(file).items():
            assert tensor.dtype == torch.bfloat16, name
            assert torch.isfinite(tensor).all(), name


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16])
@pytest.mark.usefixtures("one_torch_thread")
def test_adapters_answer_and_the_base_does_not(dtype: torch.dtype) -> None:
    scores = evaluate(demo_model_path(), demo_adapters_path(), dtype, num_examples=50, seed=0)
    assert set(scores) == NAMES
    for name, (with_adapter, base_alone) in scores.items():
        assert with_adapter >= 0.8, (name, with_adapter)
        assert base_alone <= 0.2, (name, base_alone)


def test_the_base_repeats_and_obeys_a_system_message() -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.padding_side = "left"
    assert answer_all(model, tokenizer, [chat_prompt("hello world")]) == ["You said: hello world"]
    inputs = tokenizer("<|system|>upper" + chat_prompt("hello world"), return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens) == "HELLO WORLD<|end|>"


def test_generation_is_greedy_and_ends_at_both_marks() -> None:
    config = GenerationConfig.from_pretrained(demo_model_path())
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    assert not config.do_sample
    marks = ["<|end|>", "<|endoftext|>"]
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids(marks)
