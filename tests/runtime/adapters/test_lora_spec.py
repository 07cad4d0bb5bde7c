"""PEFT's matching rules, compared with PEFT's own functions."""

import math
from typing import Any

import pytest
from corun.runtime.adapters.lora_spec import LoraSpec
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

_PATHS = [
    f"{prefix}layers.{layer}.{name}"
    for prefix in ("model.", "model.language_model.", "")
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.experts.3.w1")
] + ["lm_head", "q_proj", "model.block.1.h.2.q_proj"]
_NAMES = [
    "q_proj",
    "v_proj",
    "proj",
    "self_attn.q_proj",
    "layers.1.self_attn.q_proj",
    "model.layers.1.mlp.up_proj",
    "lm_head",
    "w1",
]
_REGEXES = [r".*\.q_proj", r".*layers\.(0|11)\..*", "q_proj", "all-linear", r"model\..*up_proj"]
_PATTERN_KEYS = [*_NAMES, r"layers\.1\..*", "^model.layers.0.*", r".*\.1\..*q_proj", "layers.1"]


def make_spec(**fields: Any) -> LoraSpec:
    return LoraSpec(**{"r": 8, "lora_alpha": 16.0, "use_rslora": False, **fields})


names = st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3, unique=True)
_LAYER_NAMES = [
    *(None, "layers", ["layers"], ["h", "layers"], ["block"], []),
    *("h|layers", r"l\w+s", ["(?:layers|h)"], ["x", ".*"], r"block\.1|layers"),
]
layer_names = st.sampled_from(_LAYER_NAMES)


@given(
    targets=names | st.sampled_from(_REGEXES),
    excluded=st.none() | names | st.sampled_from(_REGEXES),
    path=st.sampled_from(_PATHS),
)
def test_targets_like_peft(targets: Any, excluded: Any, path: str) -> None:
    config = LoraConfig(target_modules=targets, exclude_modules=excluded)
    spec = make_spec(
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        exclude_modules=excluded if isinstance(excluded, str) else tuple(excluded or ()),
    )
    found = check_target_module_exists(config, path)
    expected = bool(found) and type(found).__name__ != "_ExcludedModule"
    if targets == "all-linear":  # PEFT replaces it by the model's linear modules first
        expected = type(found).__name__ != "_ExcludedModule"
    assert spec.targets(path) == expected


@given(
    targets=names,
    layers=st.integers(0, 3) | st.lists(st.integers(0, 11), max_size=3),
    pattern=layer_names,
    path=st.sampled_from(_PATHS),
)
def test_layers_like_peft(targets: list[str], layers: Any, pattern: Any, path: str) -> None:
    config = LoraConfig(target_modules=targets, layers_to_transform=layers, layers_pattern=pattern)
    spec = make_spec(
        target_modules=tuple(targets),
        layers_to_transform=tuple(layers) if isinstance(layers, list) else (layers,),
        layers_pattern=(pattern,) if isinstance(pattern, str) else tuple(pattern or ()),
    )
    assert spec.targets(path) == bool(check_target_module_exists(config, path))


@given(
    ranks=st.dictionaries(st.sampled_from(_PATTERN_KEYS), st.integers(1, 256), max_size=3),
    alphas=st.dictionaries(st.sampled_from(_PATTERN_KEYS), st.floats(0.5, 64), max_size=3),
    use_rslora=st.booleans(),
    path=st.sampled_from(_PATHS),
)
def test_rank_and_scaling_like_peft(
    ranks: dict[str, int], alphas: dict[str, float], use_rslora: bool, path: str
) -> None:
    spec = make_spec(
        target_modules=("q_proj",),
        use_rslora=use_rslora,
        rank_pattern=tuple(ranks.items()),
        alpha_pattern=tuple(alphas.items()),
    )
    rank = ranks.get(get_pattern_key(list(ranks), path), 8)
    alpha = alphas.get(get_pattern_key(list(alphas), path), 16.0)
    assert spec.rank(path) == rank
    assert spec.scaling(path) == pytest.approx(alpha / (math.sqrt(rank) if use_rslora else rank))


def test_a_pattern_key_that_is_no_suffix_but_the_path_itself_counts_last() -> None:
    key = "model.layers.0.q+proj"  # as a regex it does not match itself
    spec = make_spec(target_modules=("q",), rank_pattern=((key, 3), (r".*\.1\..*", 5)))
    assert spec.rank(key) == 3


def test_effective_fields_ignore_the_order_of_names_but_not_of_patterns() -> None:
    one = make_spec(target_modules=("a", "b"), rank_pattern=(("a", 1), ("b", 2)))
    same = make_spec(
        target_modules=("b", "a"), rank_pattern=(("a", 1), ("b", 2)), base_model_name_or_path="elsewhere"
    )
    other = make_spec(target_modules=("a", "b"), rank_pattern=(("b", 2), ("a", 1)))
    assert one.effective_fields() == same.effective_fields()
    assert one.effective_fields() != other.effective_fields()
