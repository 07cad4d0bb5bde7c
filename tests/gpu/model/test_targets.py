"""Which linears of which models are targets, and which of them share an input."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from corun.gpu.model.targets import (
    build_target_map,
    find_layers,
    group_by_input,
    record_input_groups,
    with_input_groups,
)
from corun.gpu.model.text_part import leave_out_other_parts
from corun.runtime.errors import ModelError
from support.architectures import ARCHITECTURES, make_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def make_skeleton(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A model without weights, of two layers."""
    config = AutoConfig.for_model(model_type, num_hidden_layers=2, **overrides)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def grouped(model: PreTrainedModel) -> dict[int, dict[int, set[str]]]:
    """Per layer and input group, the last components of its targets."""
    target_map = build_target_map(model)
    groups = record_input_groups(
        model,
        [target.path for target in target_map.targets],
        lambda: model(torch.tensor([[3, 4]]), use_cache=False),
    )
    found: dict[int, dict[int, set[str]]] = {}
    for target in with_input_groups(target_map, groups).targets:
        members = found.setdefault(target.layer, {}).setdefault(target.input_group, set())
        members.add(target.path.rpartition(".")[2])
    return found


_LLAMA_GROUPS = [
    {"q_proj", "k_proj", "v_proj"},
    {"o_proj"},
    {"gate_proj", "up_proj"},
    {"down_proj"},
]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama3-rope", _LLAMA_GROUPS),
        ("gemma3", _LLAMA_GROUPS),
        # Its attention has the output projection before the projection that is called first.
        ("phi3", [{"qkv_proj"}, {"o_proj"}, {"gate_up_proj"}, {"down_proj"}]),
        ("gpt-neox", [{"query_key_value"}, {"dense"}, {"dense_h_to_4h"}, {"dense_4h_to_h"}]),
        ("starcoder2", [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"c_fc"}, {"c_proj"}]),
        ("mixtral", [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}]),
        # Attention and MLP of Cohere read the same normalised x.
        ("cohere", [{"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}, {"o_proj"},
                    {"down_proj"}]),
    ],
)  # fmt: skip
def test_groups_per_layer(name: str, groups: list[set[str]]) -> None:
    assert grouped(make_model(name)) == {0: dict(enumerate(groups)), 1: dict(enumerate(groups))}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_targets_are_the_linears_of_the_layers(name: str) -> None:
    model = make_model(name)
    target_map = build_target_map(model)
    assert [target.index for target in target_map.targets] == list(range(len(target_map.targets)))
    for target in target_map.targets:
        module = model.get_submodule(target.path)
        assert isinstance(module, torch.nn.Linear)
        assert (module.in_features, module.out_features) == (
            target.in_features,
            target.out_features,
        )
        assert f".{target.layer}." in target.path
        assert target.physical_path == target.path
    linears = {path for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    head = {path for path in target_map.refused if "head" in path or "embed_out" in path}
    assert {target.path for target in target_map.targets} == linears - head
    assert len(head) == 1
    assert any("embed" in path for path in target_map.refused)


@pytest.mark.parametrize(
    ("model_type", "path", "reason"),
    [
        ("mixtral", "model.layers.0.mlp.gate", "expert routers"),
        ("mixtral", "model.layers.0.mlp.experts", "expert targets are not served yet"),
        ("qwen2_moe", "model.layers.1.mlp.gate", "expert routers"),
        ("gpt_oss", "model.layers.1.mlp.router", "expert routers"),
        ("llama4_text", "model.layers.0.feed_forward.router", "expert routers"),
        ("llama4_text", "model.layers.0.feed_forward.experts", "expert targets"),
        ("gpt2", "transformer.wpe", "embeddings"),
        ("gpt2", "lm_head", "output head"),
    ],
)
def test_refused_by_name(model_type: str, path: str, reason: str) -> None:
    target_map = build_target_map(make_skeleton(model_type))
    assert reason in target_map.refused[path]
    assert path not in {target.path for target in target_map.targets}


def test_shared_experts_are_targets() -> None:
    paths = {target.path for target in build_target_map(make_skeleton("qwen2_moe")).targets}
    assert "model.layers.0.mlp.shared_expert.down_proj" in paths


def test_only_the_text_decoder_of_a_multi_modal_model() -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 99}
    config = AutoConfig.for_model("gemma3", vision_config=vision, text_config=text)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    target_map = build_target_map(model)
    assert find_layers(model) == "model.language_model.layers"
    assert all("language_model" in target.path for target in target_map.targets)
    reason = target_map.refused["model.vision_tower.encoder.layers.0.self_attn.q_proj"]
    assert reason == "it is outside of the decoder layers"
    tower = list(model.model.vision_tower.parameters())
    leave_out_other_parts(model)
    target_map = build_target_map(model)
    assert not any("vision" in path for path in target_map.refused)
    first, second = target_map.unused
    assert (first.path, second.path) == ("model.vision_tower", "model.multi_modal_projector")
    assert first.reason == "it is not used for text"
    assert first.num_weights == sum(weight.numel() for weight in tower)
    assert 0 < first.num_features < first.num_weights


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_projections_that_layers_with_shared_kv_lack(model_type: str) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = AutoConfig.for_model(
        model_type, num_hidden_layers=4, num_kv_shared_layers=2, layer_types=types
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    target_map = build_target_map(model)
    assert [one.path for one in target_map.unused] == [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in (2, 3)
        for name in ("k_proj", "v_proj")
    ]
    assert target_map.refused["model.per_layer_model_projection"] == (
        "it is outside of the decoder layers"
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_vocabularies(is_tied: bool) -> None:
    target_map = build_target_map(make_skeleton("llama", tie_word_embeddings=is_tied))
    head, embedding = (target_map.vocabularies[path] for path in ("lm_head", "model.embed_tokens"))
    assert head.shapes == embedding.shapes == {"weight": (32000, 4096)}
    assert embedding.tensor_name("weight") == "model.embed_tokens.weight"
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    assert head.tensor_name("weight") == name


def test_a_model_whose_layers_cannot_be_told() -> None:
    model = make_skeleton("llama")
    model.config.num_hidden_layers = 3
    with pytest.raises(ModelError, match="list of its 3 decoder layers; candidates: none"):
        build_target_map(model)


def test_a_linear_that_overrides_forward_is_no_target() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = make_model("llama3-rope")
    model.model.layers[0].mlp.up_proj = Doubled(64, 96, bias=False)
    assert build_target_map(model).refused["model.layers.0.mlp.up_proj"] == (
        "Doubled is not a plain linear module"
    )


def test_modules_that_are_not_called_are_refused() -> None:
    target_map = build_target_map(make_model("llama3-rope"))
    unused = target_map.targets[3].path
    groups = {target.path: target.index for target in target_map.targets if target.path != unused}
    changed = with_input_groups(target_map, groups)
    assert changed.refused[unused] == "the model never calls this module"
    assert [target.index for target in changed.targets] == list(range(len(target_map.targets) - 1))


def test_group_by_input() -> None:
    records = [("q", 7), ("k", 7), ("o", 9), ("twice", 7), ("twice", 11), ("again", 9)]
    assert group_by_input(records) == {"q": 0, "k": 0, "o": 1, "twice": 2, "again": 1}
    assert group_by_input([]) == {}


def test_without_records_every_target_is_alone() -> None:
    targets = build_target_map(make_model("llama3-rope")).targets
    assert [target.input_group for target in targets] == [*range(7), *range(7)]
    assert replace(targets[0], input_group=0) == targets[0]
