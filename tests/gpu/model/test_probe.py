"""The parity probe admits supported models and refuses others by name and reason."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.attention.torch_backend import TorchAttention
from corun.gpu.execution.runner import ModelRunner
from corun.gpu.forward.batch import StepContext
from corun.gpu.model.attention_hook import PagedAttentionHook
from corun.gpu.model.kv_pool import KvLayout, KvPool
from corun.gpu.model.load import load_model
from corun.gpu.model.probe import check_parity, layer_shapes, record_attention
from corun.gpu.model.rope import guard_longrope
from corun.gpu.model.source import ModelSource, load_config
from corun.runtime.errors import ModelError
from support.architectures import make_model, mostly, save_model
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask

CPU = torch.device("cpu")
IDS: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def probe(directory: Path, dtype: torch.dtype = torch.float32) -> float:
    """Load a model directory and probe it; returns the relative error."""
    context = StepContext()
    hook = PagedAttentionHook(context)
    try:
        source = ModelSource(str(directory))
        model = load_model(source, load_config(source), dtype, CPU, hook.name)
        guard_longrope(model, context)
        record = record_attention(model, hook)
        pool = KvPool(KvLayout(layer_shapes(record), 8, dtype), 16, CPU)
        hook.attach(TorchAttention(), pool)
        return check_parity(model, hook, ModelRunner(model, context, pool).probe_step)
    finally:
        hook.close()


@pytest.mark.parametrize("name", mostly("llama3-rope", "gemma2", "phi3-longrope", "mixtral"))
def test_admits(name: str, tmp_path: Path) -> None:
    assert probe(save_model(name, tmp_path)) < 1e-5


@pytest.mark.parametrize(("name", "dtype"), [("gemma2", torch.float16), ("mixtral", torch.bfloat16)])
def test_admits_half_types(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert 0 < probe(save_model(name, tmp_path), dtype) < 0.3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": (SHAPE, "attention interface"),
    "bloom": ({"hidden_size": 64, "n_layer": 2, "n_head": 4}, "never calls .* attention interface"),
    "mpt": (
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        "never calls .* attention interface",
    ),
    "gpt_neo": (
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "attention interface",
    ),
    "mamba": ({"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, "linear_attention|never calls"),
    "bamba": (
        {
            **SHAPE,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "attn_layer_indices": [1],
        },
        "linear_attention|1 of 2 layers",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
@pytest.mark.filterwarnings("ignore")  # some of these models warn when they are made
def test_refuses(model_type: str, tmp_path: Path) -> None:
    overrides, reason = REFUSED[model_type]
    config = AutoConfig.for_model(model_type, **IDS, **overrides)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as refusal:
        probe(tmp_path)
    assert model_type.split("_", maxsplit=1)[0] in str(refusal.value)


def test_the_comparison_sees_a_window_that_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong attention result of any kind must not pass: here the layers' windows are lost."""
    forward: Callable[..., torch.Tensor] = TorchAttention.forward

    def without_window(*arguments: Any) -> torch.Tensor:
        *others, params = arguments
        return forward(*others, replace(params, sliding_window=None))

    monkeypatch.setattr(TorchAttention, "forward", without_window)
    with pytest.raises(ModelError, match="relative error"):
        probe(save_model("mistral", tmp_path))


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("phimoe-window", [36, 36]),  # by its mask alone
        ("gemma2", [12, None]),  # by mask and call
        ("llama3-rope", [None, None]),
    ],
)
def test_a_mask_says_what_a_layer_sees(name: str, windows: list[int | None]) -> None:
    model = make_model(name)
    hook = PagedAttentionHook(StepContext())
    model.set_attn_implementation(hook.name)
    record = record_attention(model, hook)
    hook.close()
    assert [record.sights[layer].window for layer in sorted(record.sights)] == windows


def test_a_mask_goes_before_what_the_call_says() -> None:
    """transformers' own attention uses only the mask."""
    hook = PagedAttentionHook(StepContext())
    attend = AttentionInterface._global_mapping[hook.name]
    module = torch.nn.Module()
    setattr(module, "layer_idx", 0)  # noqa: B010 -- a plain attribute, not a parameter
    part = torch.zeros(1, 1, 2, 4)
    model = make_model("mistral")  # with a window of 12
    model.set_attn_implementation(hook.name)
    with hook.recording() as record:
        mask = create_sliding_window_causal_mask(model.config, torch.zeros(1, 2, 4), None, None)
        attend(module, part, part, part, mask, sliding_window=7)
        assert record.sights[0].window == 12
        attend(module, part, part, part, mask[:, :, :, :1])
        with pytest.raises(ModelError, match="its own attention mask"):
            attend(module, part, part, part, mask + 1)
        attend(module, part, part, part, None, sliding_window=9)
        assert record.sights[0].window == 12
    hook.close()


def test_an_unknown_attention_argument_is_refused(tmp_path: Path) -> None:
    context = StepContext()
    hook = PagedAttentionHook(context)
    attend = AttentionInterface._global_mapping[hook.name]
    module = torch.nn.Module()
    setattr(module, "layer_idx", 0)  # noqa: B010 -- a plain attribute, not a parameter
    part = torch.zeros(1, 1, 2, 4)
    with hook.recording():
        attend(module, part, part, part, None, scaling=1.0, alibi=None)
        with pytest.raises(ModelError, match="'alibi'"):
            attend(module, part, part, part, None, scaling=1.0, alibi=torch.zeros(1))
        with pytest.raises(ModelError, match="not causal"):
            attend(module, part, part, part, None, is_causal=False)
        with pytest.raises(ModelError, match="mask"):
            attend(module, part, part, part, torch.zeros(1))
    hook.close()


def test_nothing_stays_registered(tmp_path: Path) -> None:
    tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [set(table) for table in tables]
    probe(save_model("llama3-rope", tmp_path))
    assert [set(table) for table in tables] == before


@pytest.mark.parametrize(
    ("path", "reason"), [("./nowhere", "no such model directory"), ("{empty}", "no config.json")]
)
def test_missing_models_are_named(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        load_config(ModelSource(path.format(empty=tmp_path)))
