"""Adapters with tensors that change no text answer are served as PEFT computes them on text."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.runtime.engine.assembly.adapter_check import run_check
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.bases import COMMON, TEXT_MODELS, auto_class
from support.peft_adapters import WEIGHTS, edit_config, rename_tensors
from support.tokenizers import save_word_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_torch_thread")

_VOCAB_SIZE = 96
_TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": _VOCAB_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 12,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 28,
    "patch_size": 14,
}
_NAMES = ["q_proj", "k_proj", "v_proj"]
_LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj)"
_PROMPT = [5, 17, 40, 33, 81, 62, 9, 70, 12, 55, 28, 91, 3, 44, 66, 30]
_NUM_TOKENS = 6


def fill(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text and images."""
    directory = tmp_path_factory.mktemp("wrapper")
    config = AutoConfig.for_model(
        "gemma3",
        text_config=_TEXT,
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    fill(model, 0)
    model.save_pretrained(directory)
    save_word_tokenizer(directory, _VOCAB_SIZE)
    return directory


def load(base: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(base)
    model: PreTrainedModel = auto_class(config).from_pretrained(base, dtype=torch.float32)
    return model


def save(base: Path, directory: Path, **options: Any) -> Path:
    """An adapter that PEFT makes over the whole model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about itself
        model = get_peft_model(load(base), LoraConfig(r=4, lora_alpha=8, **options))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(0.0, 0.2, generator=generator)
        model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[Engine]:
    with Engine(model=str(base), dtype="float32", device="cpu", max_model_len=64) as engine:
        yield engine


def error_against_peft(engine: Engine, base: Path, adapter: Path) -> float:
    """Of the log-probabilities of greedy tokens."""
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, logprobs=1, ignore_eos=True)
    name = adapter.name
    (output,) = engine.generate([_PROMPT], [params], [LoRARequest(name, 1, str(adapter))])
    (choice,) = output.outputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about itself
        model = PeftModel.from_pretrained(load(base), str(adapter)).eval()
    tokens = torch.tensor([[*_PROMPT, *choice.token_ids]])
    with torch.no_grad():
        truth = model(tokens).logits[0, len(_PROMPT) - 1 : -1].log_softmax(-1)
        plain = load(base).eval()(tokens).logits[0, len(_PROMPT) - 1 : -1].log_softmax(-1)
    assert (truth - plain).abs().max() > 0.1, "the adapter changes the answers"
    assert choice.logprobs is not None
    return max(
        abs(candidates[token].logprob - float(row[token]))
        for candidates, token, row in zip(choice.logprobs, choice.token_ids, truth, strict=True)
    )


def left_out(engine: Engine, name: str) -> tuple[str, ...]:
    (info,) = [info for info in engine.list_loras() if info.name == name]
    return info.left_out


def test_a_list_of_names_that_the_tower_has_too(engine: Engine, base: Path, tmp_path: Path) -> None:
    adapter = save(base, tmp_path / "list", target_modules=_NAMES)
    assert error_against_peft(engine, base, adapter) < 1e-4
    phrase = "12 tensors of model.vision_tower (it is not used for text)"
    assert left_out(engine, "list") == (phrase,)
    report = run_check(adapter, str(base))
    assert f"  left out  {phrase}" in report.lines()


def test_all_linear_with_a_projector_in_full(engine: Engine, base: Path, tmp_path: Path) -> None:
    adapter = save(
        base, tmp_path / "all", target_modules="all-linear", modules_to_save=["multi_modal_projector"]
    )
    assert error_against_peft(engine, base, adapter) < 1e-4
    (phrase,) = left_out(engine, "all")
    assert "tensors of model.multi_modal_projector, model.vision_tower (" in phrase


def test_tensors_of_the_decoder_alone(engine: Engine, base: Path, tmp_path: Path) -> None:
    """The configuration still is a list of names, as trainers of text alone write it."""
    adapter = save(base, tmp_path / "text", target_modules=_LANGUAGE)
    edit_config(adapter, target_modules=_NAMES)
    assert error_against_peft(engine, base, adapter) < 1e-4
    assert left_out(engine, "text") == ()
    assert run_check(adapter, str(base)).ok


def add_copies(base: Path, adapter: Path, change: float = 0.0) -> None:
    """The embedding and the head of the base beside LoRA, as PEFT saves them for new tokens."""
    stored = load_file(base / "model.safetensors")
    (name,) = [name for name in stored if name.endswith("embed_tokens.weight")]
    copies = {
        "base_model.model.lm_head.weight": stored[name].clone(),
        "base_model.model.model.language_model.embed_tokens.weight": stored[name] + change,
    }
    save_file(load_file(adapter / WEIGHTS) | copies, adapter / WEIGHTS)


def test_copies_of_the_base(engine: Engine, base: Path, tmp_path: Path) -> None:
    adapter = save(base, tmp_path / "copies", target_modules=_LANGUAGE)
    add_copies(base, adapter)
    assert error_against_peft(engine, base, adapter) < 1e-4
    assert "  as base   base_model.model.lm_head.weight" in run_check(adapter, str(base)).lines()


def test_an_embedding_that_is_not_that_of_the_base(engine: Engine, base: Path, tmp_path: Path) -> None:
    adapter = save(base, tmp_path / "other", target_modules=_LANGUAGE)
    add_copies(base, adapter, change=0.05)
    edit_config(adapter, modules_to_save=["embed_tokens", "lm_head"])
    assert error_against_peft(engine, base, adapter) < 1e-4
    lines = run_check(adapter, str(base)).lines()
    assert f"  rows      {_VOCAB_SIZE} of model.language_model.embed_tokens" in lines
    assert "  as base   base_model.model.lm_head.weight" in lines


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_projections_of_layers_that_share_keys_and_values(model_type: str, tmp_path: Path) -> None:
    """Versions of these models that had them have left LoRA for them, which PEFT passes over."""
    fields = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = AutoConfig.for_model(model_type, **{**COMMON, **TEXT_MODELS[model_type], **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model, 0)
    base = tmp_path / "base"
    model.save_pretrained(base)
    save_word_tokenizer(base, COMMON["vocab_size"])
    adapter = save(base, tmp_path / "old", target_modules=_NAMES)
    tensors = load_file(adapter / WEIGHTS)
    for name in [one for one in tensors if ".layers.1.self_attn.k_proj." in one]:
        for key in ("k_proj", "v_proj"):
            tensors[name.replace("layers.1", "layers.3").replace("k_proj", key)] = tensors[name] + 1
    save_file(tensors, adapter / WEIGHTS)
    with Engine(model=str(base), dtype="float32", device="cpu", max_model_len=64) as engine:
        assert error_against_peft(engine, base, adapter) < 1e-4
        (phrase,) = left_out(engine, "old")
    assert phrase.startswith("4 tensors of model.layers.3.self_attn.k_proj, ")


def test_a_prefix_of_compilation_and_data_parallelism(engine: Engine, base: Path, tmp_path: Path) -> None:
    adapter = save(base, tmp_path / "renamed", target_modules=_LANGUAGE)
    error = error_against_peft(engine, base, adapter)
    original = tmp_path / "original"
    adapter.rename(original)
    save(base, adapter, target_modules=_LANGUAGE)
    rename_tensors(adapter, "base_model.model.", "_orig_mod.module.base_model.model.")
    engine.remove_lora("renamed")
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS)
    asked = [LoRARequest("renamed", 1, str(adapter)), LoRARequest("original", 2, str(original))]
    one, two = engine.generate([_PROMPT] * 2, [params] * 2, asked)
    assert error < 1e-4
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
