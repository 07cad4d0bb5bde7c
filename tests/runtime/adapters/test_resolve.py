"""Tensors and targets: shapes, ranks, names, and that file and configuration agree."""

from dataclasses import replace
from typing import Any

import pytest
from corun.runtime.adapters.lora_spec import LoraSpec
from corun.runtime.adapters.resolve import ResolveError, max_tensor_bytes, resolve_adapter
from corun.runtime.adapters.resolved import RawTensor, ResolvedAdapter, SavedWeight
from corun.runtime.adapters.target_map import Target, TargetMap, UnusedModule, Vocabulary

_IN, _OUT, _VOCAB = 12, 20, 30


def make_map(prefix: str = "model.", num_layers: int = 2) -> TargetMap:
    """q_proj, v_proj and an MLP module per layer; a router, experts and a head are refused."""
    targets = [
        Target(0, f"{prefix}layers.{layer}.{name}", layer, 0, _IN, _OUT, "")
        for layer in range(num_layers)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
    ]
    numbered = tuple(
        Target(index, *(getattr(target, slot) for slot in target.__slots__[1:]))
        for index, target in enumerate(targets)
    )
    refused = {
        "lm_head": "the head",
        f"{prefix}layers.0.mlp.gate": "a router",
        f"{prefix}layers.0.mlp.experts": "experts",
    }
    tower = UnusedModule(f"{prefix}vision_tower", "it is not used for text", 100, 1000)
    shared = UnusedModule(f"{prefix}layers.1.self_attn.k_proj", "it shares KV", _IN + _OUT, 0)
    vocabularies = {
        path: Vocabulary(path, {"weight": (_VOCAB, _IN)}) for path in ("lm_head", f"{prefix}embed_tokens")
    }
    return TargetMap(numbered, refused, (tower, shared), vocabularies)


def make_spec(**fields: Any) -> LoraSpec:
    values = {
        "r": 4,
        "lora_alpha": 8.0,
        "use_rslora": False,
        "target_modules": ("q_proj", "v_proj"),
        **fields,
    }
    return LoraSpec(**values)


def raw(name: str, *shape: int, dtype: str = "F32") -> RawTensor:
    return RawTensor(name, dtype, shape, 0, 0)


def pair(path: str, rank: int = 4, infix: str = "", dtype: str = "F32") -> list[RawTensor]:
    return [
        raw(f"{path}.lora_A{infix}.weight", rank, _IN, dtype=dtype),
        raw(f"{path}.lora_B{infix}.weight", _OUT, rank, dtype=dtype),
    ]


def all_pairs(prefix: str = "base_model.model.model.", infix: str = "") -> list[RawTensor]:
    return [
        tensor
        for layer in (0, 1)
        for name in ("q_proj", "v_proj")
        for tensor in pair(f"{prefix}layers.{layer}.self_attn.{name}", infix=infix)
    ]


def resolve(
    tensors: list[RawTensor], spec: LoraSpec | None = None, prefix: str = "model."
) -> ResolvedAdapter:
    return resolve_adapter(spec or make_spec(), tensors, make_map(prefix), max_rank=64)


def problems(tensors: list[RawTensor], **fields: Any) -> tuple[str, ...]:
    with pytest.raises(ResolveError) as caught:
        resolve(tensors, make_spec(**fields))
    return caught.value.problems


def test_pairs_are_found_by_target_index() -> None:
    adapter = resolve(all_pairs()[::-1])
    assert [lora.target.index for lora in adapter.targets] == [0, 1, 3, 4]
    assert {lora.rank for lora in adapter.targets} == {4}
    assert {lora.scaling for lora in adapter.targets} == {2.0}
    assert adapter.max_rank == 4
    assert adapter.num_bytes(2) == 4 * 2 * 4 * (_IN + _OUT)
    num_features, num_saved = 7 * (_IN + _OUT) + 100, 1000 + 2 * _VOCAB * _IN
    assert max_tensor_bytes(make_map(), 64) == 4 * (65 * num_features + num_saved)


def test_what_adapters_of_one_recipe_have_in_common_is_found_out_once() -> None:
    target_map = make_map()

    def again(target_map: TargetMap = target_map, **fields: Any) -> ResolvedAdapter:
        spec = make_spec(**fields)
        return resolve_adapter(spec, [*all_pairs()], target_map, max_rank=64)

    first = again()
    assert again() is first
    assert again(lora_alpha=16.0).targets[0].scaling == 4.0
    assert again(make_map("gpt_neox.")).targets[0].target.path.startswith("gpt_neox.")
    with pytest.raises(ResolveError, match="--max-lora-rank"):
        resolve_adapter(make_spec(), all_pairs(), target_map, max_rank=3)


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.",
        "base_model.model.model.language_model.",
        "base_model.model.language_model.model.",
        "base_model.model.",  # trained with the decoder alone
        "base_model.model._orig_mod.model.",
        "_orig_mod.base_model.model.model.",
        "module.base_model.model.model.",
        "module._orig_mod.base_model.model.model.",
        "_orig_mod.module.base_model.model.base_model.model._orig_mod.model.",
        "_fsdp_wrapped_module._forward_module.module.base_model.model.module.model.",
        "base_model.model.thinker.model.",
        "base_model.model.llm.model.",
        "base_model.model.model.text_model.",
        "model.",  # injected without a PeftModel
    ],
)
@pytest.mark.parametrize("served", ["model.", "model.language_model.", "gpt_neox."])
@pytest.mark.parametrize("infix", ["", ".default", ".my_adapter"])
def test_other_holders_are_tolerated(prefix: str, served: str, infix: str) -> None:
    adapter = resolve(all_pairs(prefix, infix), prefix=served)
    assert len(adapter.targets) == 4


def test_the_paths_of_training_are_those_that_patterns_see() -> None:
    """A regex for the multi-modal model's paths also matches modules without tensors."""
    spec = make_spec(target_modules=r"model\.language_model\..*\.(q_proj|v_proj)")
    tensors = all_pairs("base_model.model.model.language_model.")
    assert len(resolve(tensors, spec).targets) == 4
    with pytest.raises(ResolveError, match=r"layers.1.self_attn.v_proj: the configuration targets"):
        resolve(tensors[:-2], spec)


def test_a_tower_with_layers_of_the_same_names_is_not_the_decoder() -> None:
    found = problems(all_pairs("base_model.model.model.audio_tower.encoder."))
    assert any("no linear module" in problem for problem in found)


def test_a_pattern_that_takes_too_long() -> None:
    hostile = "(?:.|..)+[?!]"
    (problem,) = problems(all_pairs(), target_modules=hostile)
    assert hostile in problem and "0.1 s" in problem


def test_rank_and_alpha_patterns() -> None:
    spec = make_spec(
        rank_pattern=((r"layers\.1\.self_attn\.q_proj", 6),),
        alpha_pattern=(("v_proj", 2.0),),
        use_rslora=True,
    )
    tensors = all_pairs()
    tensors[4:6] = pair("base_model.model.model.layers.1.self_attn.q_proj", rank=6)
    adapter = resolve(tensors, spec)
    assert [lora.rank for lora in adapter.targets] == [4, 4, 6, 4]
    assert [lora.scaling for lora in adapter.targets] == pytest.approx([4.0, 1.0, 8 / 6**0.5, 1.0])


def test_all_linear_leaves_out_the_head_and_what_is_not_linear() -> None:
    tensors = all_pairs() + [
        tensor for layer in (0, 1) for tensor in pair(f"base_model.model.model.layers.{layer}.mlp.up_proj")
    ]
    assert len(resolve(tensors, make_spec(target_modules="all-linear")).targets) == 6


def test_missing_tensor() -> None:
    assert problems(all_pairs()[1:]) == ("model.layers.0.self_attn.q_proj: lora_A is missing in the file",)


def test_missing_module() -> None:
    (problem,) = problems(all_pairs()[2:])
    assert problem.startswith("model.layers.0.self_attn.q_proj: the configuration targets it")


def test_unknown_module_with_near_names() -> None:
    extra = pair("base_model.model.model.layers.0.self_attn.q_porj")
    found = problems(all_pairs() + extra)
    assert len(found) == 2
    assert "near names: model.layers.0.self_attn.q_proj" in found[0]


def test_layer_that_the_model_does_not_have() -> None:
    extra = pair("base_model.model.model.layers.2.self_attn.q_proj")
    assert "no linear module model.layers.2" in problems(all_pairs() + extra)[0]


def test_tensors_that_the_configuration_leaves_out() -> None:
    extra = pair("base_model.model.model.layers.0.mlp.up_proj")
    (problem,) = problems(all_pairs() + extra)
    assert "exclude it" in problem


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("base_model.model.lm_head", "the head"),
        ("base_model.model.model.layers.0.mlp.gate", "a router"),
        ("base_model.model.model.layers.0.mlp.experts", "experts"),
        ("base_model.model.model.layers.0.mlp.experts.base_layer", "experts"),
        ("base_model.model.model.layers.0.mlp.experts.3.w1", "experts"),
        ("base_model.model.model.layers.0.block_sparse_moe.experts.3.w1", "expert targets"),
    ],
)
def test_refused_modules_by_name_and_reason(path: str, reason: str) -> None:
    found = problems(all_pairs() + pair(path))
    assert found[0].startswith(path)
    assert reason in found[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "use_dora"),
        ("base_model.model.lm_head.modules_to_save.weight", "of fully trained"),
        ("base_model.model.lm_head.bias", "not a LoRA matrix"),
        ("base_model.model.score.weight", "not a LoRA matrix"),
        ("weight", "not a LoRA matrix"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "no linear"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "not a LoRA matrix"),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", "not a LoRA matrix"),
    ],
)
def test_tensors_that_are_no_lora_matrix(name: str, reason: str) -> None:
    found = problems([*all_pairs(), raw(name, 3)])
    assert found[0].startswith(name)
    assert reason in found[0]


def magnitudes(*shape: int) -> list[RawTensor]:
    return [
        raw(f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_magnitude_vector", *shape)
        for layer in (0, 1)
        for name in ("q_proj", "v_proj")
    ]


def test_magnitudes_of_dora() -> None:
    adapter = resolve([*magnitudes(_OUT), *all_pairs()], make_spec(use_dora=True))
    assert [lora.magnitudes for lora in adapter.targets] == magnitudes(_OUT)
    assert adapter.num_bytes(2) == 4 * (2 * 4 * (_IN + _OUT) + 8 * _OUT)


@pytest.mark.parametrize("infix", ["", ".default", ".weight", ".default.weight"])
def test_magnitudes_have_several_names(infix: str) -> None:
    named = [replace(one, name=f"{one.name}{infix}") for one in magnitudes(_OUT)]
    adapter = resolve([*all_pairs(), *named], make_spec(use_dora=True))
    assert all(lora.magnitudes in named for lora in adapter.targets)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([], "lora_magnitude_vector is missing in the file; use_dora needs it"),
        (magnitudes(_OUT + 1), f"need [{_OUT}]"),
        (magnitudes(_OUT, 1), f"need [{_OUT}]"),
        (magnitudes(_OUT) + magnitudes(_OUT), "already has"),
    ],
)
def test_magnitudes_that_do_not_fit(tensors: list[RawTensor], reason: str) -> None:
    found = problems(all_pairs() + tensors, use_dora=True)
    assert len(found) == 4
    assert all(reason in problem for problem in found)


def test_configured_module_that_is_refused() -> None:
    (problem,) = problems(all_pairs(), target_modules=("q_proj", "v_proj", "gate"))
    assert problem == "model.layers.0.mlp.gate: the configuration targets it: a router"


def test_configured_head_and_embeddings_of_which_the_file_has_nothing() -> None:
    spec = make_spec(target_modules=("q_proj", "v_proj", "lm_head", "embed_tokens"))
    assert len(resolve(all_pairs(), spec).targets) == 4


def test_modules_that_no_text_passes_through_are_left_out() -> None:
    """Of any shape, with any name of the tower in training, saved in full or not."""
    adapter = resolve(
        all_pairs()
        + pair("base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj")
        + pair("base_model.model.vision_tower.vision_model.layers.3.self_attn.v_proj", rank=64)
        + [raw("base_model.model.model.vision_tower.modules_to_save.patches.weight", 3, 4, 5, 6)]
        + pair("base_model.model.model.layers.1.self_attn.k_proj")
    )
    assert [lora.target.index for lora in adapter.targets] == [0, 1, 3, 4]
    assert adapter.left_out == (
        "5 tensors of model.vision_tower (it is not used for text)",
        "2 tensors of model.layers.1.self_attn.k_proj (it shares KV)",
    )
    assert resolve(all_pairs()).left_out == ()


def test_only_modules_that_no_text_passes_through() -> None:
    tower = pair("base_model.model.model.vision_tower.layers.0.self_attn.q_proj")
    found = problems(tower, target_modules=(r"k_proj",))
    assert found == ("the file changes no module of this model that processes text",)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.weight",
        "lm_head.weight",
        "module.base_model.model.lm_head.base_layer.weight",
        "base_model.model.lm_head.original_module.weight",
        "base_model.model.lm_head.modules_to_save.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
    ],
)
@pytest.mark.parametrize("modules_to_save", [(), ("lm_head",)])
def test_copies_of_weights_of_the_base(name: str, modules_to_save: tuple[str, ...]) -> None:
    copy = raw(name, _VOCAB, _IN, dtype="BF16")
    spec = make_spec(modules_to_save=modules_to_save)
    saved = (SavedWeight(copy, "lm_head.weight", None),)
    assert resolve([*all_pairs(), copy], spec).saved == saved


def test_weights_that_cannot_be_copies() -> None:
    larger = raw("base_model.model.model.embed_tokens.weight", _VOCAB + 4, _IN)
    (problem,) = problems([*all_pairs(), larger], modules_to_save=("embed_tokens",))
    assert "[34, 12] is not a copy" in problem and "shape [30, 12]; of fully trained" in problem


@pytest.mark.parametrize("name", ["score", "lm_head", "norm", "tower"])
def test_modules_to_save_of_which_the_file_has_nothing(name: str) -> None:
    (problem,) = problems(all_pairs(), modules_to_save=(name,))
    assert problem.startswith(f"{name}: modules_to_save names it, but the file does not have")


def test_a_saved_projector_that_no_text_passes_through() -> None:
    tensors = [*all_pairs(), raw("base_model.model.model.vision_tower.proj.linear.weight", 3, 3)]
    assert resolve(tensors, make_spec(modules_to_save=("proj",))).left_out


def test_wrong_shapes() -> None:
    tensors = all_pairs()
    tensors[0] = raw(tensors[0].name, 4, _IN + 1)
    tensors[3] = raw(tensors[3].name, 4, _OUT)  # transposed
    found = problems(tensors)
    assert "shape [4, 13]" in found[0] and "need [4, 12]" in found[0]
    assert "shape [4, 20]" in found[1] and "need [20, 4]" in found[1]


def test_rank_of_the_file_is_not_that_of_the_configuration() -> None:
    found = problems(all_pairs(), r=8)
    assert "the configuration's rank 8 need [8, 12]" in found[0]


def test_rank_over_the_limit() -> None:
    found = problems(all_pairs(), r=65)
    assert "rank 65 is over the limit of 64 (--max-lora-rank)" in found[0]


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "U8"])
def test_types_that_are_not_served(dtype: str) -> None:
    tensors = all_pairs()
    tensors[:2] = pair("base_model.model.model.layers.0.self_attn.q_proj", dtype=dtype)
    found = problems(tensors)
    assert f"type {dtype} is not served, only F32, F16, BF16" in found[0]


def test_two_adapters_in_one_file() -> None:
    found = problems(all_pairs(infix=".one") + all_pairs(infix=".two"))
    assert len(found) == 8
    assert "already has base_model.model.model.layers.0.self_attn.q_proj.lora_A.one.weight" in (found[0])


def test_an_adapter_that_changes_nothing() -> None:
    found = problems([], target_modules=("k_proj",))
    assert found == ("the file changes no module of this model",)


def test_long_lists_are_cut_in_the_message_but_not_in_the_problems() -> None:
    with pytest.raises(ResolveError) as caught:
        resolve(all_pairs(infix=".one") + all_pairs(infix=".two") * 3)
    assert len(caught.value.problems) == 24
    assert "and 16 more" in str(caught.value)
