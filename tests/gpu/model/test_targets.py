"""Which linears of which models are targets, and which of them share an input."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from corun.gpu.model.skeleton import leave_out_other_parts
from corun.gpu.model.targets import (
    Calls,
    build_target_map,
    find_layers,
    group_by_input,
    record_calls,
    with_calls,
)
from corun.runtime.adapters.target_map import Target, TargetMap
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
    """Per layer and input group, the last components of its targets in the layer."""
    target_map = build_target_map(model)
    calls = record_calls(
        model,
        [target.path for target in target_map.targets],
        lambda: model(torch.tensor([[3, 4]]), use_cache=False),
    )
    found: dict[int, dict[int, set[str]]] = {}
    for target in with_calls(target_map, calls).inside:
        members = found.setdefault(target.layer, {}).setdefault(target.input_group, set())
        members.add(target.path.rpartition(".")[2])
    return found


_LLAMA_GROUPS = [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]


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
        ("cohere", [{"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}, {"o_proj"}, {"down_proj"}]),
    ],
)
def test_groups_per_layer(name: str, groups: list[set[str]]) -> None:
    assert grouped(make_model(name)) == {0: dict(enumerate(groups)), 1: dict(enumerate(groups))}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_targets_are_all_linears_and_the_embedding(name: str) -> None:
    model = make_model(name)
    target_map = build_target_map(model)
    assert [target.index for target in target_map.targets] == list(range(len(target_map.targets)))
    for target in target_map.targets:
        module = model.get_submodule(target.path)
        assert isinstance(module, torch.nn.Embedding if target.is_embedding else torch.nn.Linear)
        shape = module.weight.T.shape if target.is_embedding else module.weight.shape
        assert shape == (target.out_features, target.in_features)
        assert not target.is_inside or f".{target.layer}." in target.path
        assert target.physical_path == target.path
    linears = {path for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    embedding, *_, head = target_map.targets
    assert {target.path for target in target_map.targets} == linears | {embedding.path}
    assert (embedding.is_embedding, head.is_head) == (True, True)
    assert target_map.inside == target_map.targets[1:-1]
    assert head.path in ("lm_head", "embed_out")


@pytest.mark.parametrize(
    ("model_type", "path", "reason"),
    [
        ("mixtral", "model.layers.0.mlp.gate", "expert routers"),
        ("mixtral", "model.layers.0.mlp.experts", "expert targets are not served yet"),
        ("qwen2_moe", "model.layers.1.mlp.gate", "expert routers"),
        ("gpt_oss", "model.layers.1.mlp.router", "expert routers"),
        ("llama4_text", "model.layers.0.feed_forward.router", "expert routers"),
        ("llama4_text", "model.layers.0.feed_forward.experts", "expert targets"),
        ("gpt2", "transformer.wpe", "only the embedding of tokens"),
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
    assert find_layers(model) == "model.language_model.layers"
    assert all("language_model" in target.path for target in build_target_map(model).inside)
    tower = list(model.model.vision_tower.parameters())
    leave_out_other_parts(model)
    target_map = build_target_map(model)
    assert not any("vision" in path for path in target_map.refused)
    outside = [target.path for target in target_map.targets if not target.is_inside]
    assert outside == ["model.language_model.embed_tokens", "lm_head"]
    first, second = target_map.unused
    assert (first.path, second.path) == ("model.vision_tower", "model.multi_modal_projector")
    assert first.reason == "it is not used for text"
    assert first.num_weights == sum(weight.numel() for weight in tower)
    assert 0 < first.num_features < first.num_weights


def test_a_head_that_runs_for_all_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas of the head are added to the rows of which logits are asked for."""
    model = make_model("llama3-rope")
    assert "lm_head" not in build_target_map(model).refused
    monkeypatch.setattr(model, "forward", lambda input_ids: input_ids)
    assert build_target_map(model).refused["lm_head"].startswith("the model runs its output head")


def test_linears_behind_the_decoder_are_refused() -> None:
    """They run for the tokens alone of which logits are asked for."""
    refused = build_target_map(make_model("modernbert-decoder")).refused
    assert refused["lm_head.dense"].startswith("it is outside of the decoder, where not all")


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_projections_that_layers_with_shared_kv_lack(model_type: str) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = AutoConfig.for_model(model_type, num_hidden_layers=4, num_kv_shared_layers=2, layer_types=types)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    target_map = build_target_map(model)
    assert [one.path for one in target_map.unused] == [
        f"model.layers.{layer}.self_attn.{name}" for layer in (2, 3) for name in ("k_proj", "v_proj")
    ]
    outside = [target.path for target in target_map.targets if not target.is_inside]
    assert "model.per_layer_model_projection" in outside


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
    calls = {one.path: Calls(one.index, 1, 5) for one in target_map.targets if one.path != unused}
    changed = with_calls(target_map, calls)
    assert changed.refused[unused] == "the model never calls this module"
    assert [target.index for target in changed.targets] == list(range(len(target_map.targets) - 1))


def test_linears_outside_of_the_layers_belong_to_the_layer_beside_them() -> None:
    linears = ("before", "layers.0.a", "layers.1.a", "between", "behind", "twice", "pooled", "head")
    targets = tuple(
        Target(
            index,
            path,
            int(path[7]) if "layers" in path else 0,
            index,
            8,
            8,
            path,
            is_inside="layers" in path,
            is_head=path == "head",
        )
        for index, path in enumerate(linears)
    )
    calls = {
        "before": Calls(0, 1, 5),
        "layers.0.a": Calls(1, 1, 5),
        "between": Calls(2, 1, 5),
        "layers.1.a": Calls(3, 1, 5),
        "behind": Calls(4, 1, 5),
        "twice": Calls(5, 2, 5),
        "pooled": Calls(6, 1, 1),
        "head": Calls(7, 1, 5),
    }
    found = with_calls(TargetMap(targets, {}), calls)
    assert {one.path: (one.layer, one.input_group) for one in found.targets} == {
        "before": (0, -1),
        "layers.0.a": (0, 0),
        "layers.1.a": (1, 0),
        "behind": (1, 1),
        "head": (1, 2),
    }
    assert [one.index for one in found.targets] == list(range(5))
    each = "it is outside of the decoder layers, and does not run once for each token"
    between = "it is outside of the decoder layers, and is called between them"
    assert found.refused == {"twice": each, "pooled": each, "between": between}


def test_group_by_input() -> None:
    records = [("q", 7), ("k", 7), ("o", 9), ("twice", 7), ("twice", 11), ("again", 9)]
    assert group_by_input(records) == {"q": 0, "k": 0, "o": 1, "twice": 2, "again": 1}
    assert group_by_input([]) == {}


def test_without_records_every_target_is_alone() -> None:
    targets = build_target_map(make_model("llama3-rope")).targets
    assert [target.input_group for target in targets] == [*range(8), *range(7), 8]
    assert replace(targets[0], input_group=0) == targets[0]
