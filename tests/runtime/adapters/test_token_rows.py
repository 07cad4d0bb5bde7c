"""Rows of tokens beside LoRA: where PEFT applies them, and what is refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from corun.runtime.adapters.lora_spec import LoraSpec
from corun.runtime.adapters.resolve import ResolveError, resolve_adapter
from corun.runtime.adapters.resolved import RawTensor, ResolvedAdapter, TargetRows
from corun.runtime.adapters.target_map import Target, TargetMap, Vocabulary
from corun.runtime.adapters.token_rows import spans_beside, with_kept

_FEATURES, _TOKENS = 8, 30
_LINEAR = Target(0, "model.layers.0.q", 0, 0, _FEATURES, _FEATURES, "")
_EMBEDDING = Target(1, "model.embed", 0, -1, _TOKENS, _FEATURES, "", is_inside=False, is_embedding=True)
_HEAD = Target(2, "lm_head", 0, 1, _FEATURES, _TOKENS, "", is_inside=False, is_head=True)
_DELTA = "token_adapter.trainable_tokens_delta"


def make_map(*, is_tied: bool = False, has_bias: bool = False) -> TargetMap:
    shape = (_TOKENS, _FEATURES)
    of_head = {"weight": shape} | ({"bias": (_TOKENS,)} if has_bias else {})
    vocabularies = {
        "model.embed": Vocabulary("model.embed", {"weight": shape}),
        "lm_head": Vocabulary("lm_head", of_head, "model.embed" if is_tied else None),
    }
    return TargetMap((_LINEAR, _EMBEDDING, _HEAD), {}, (), vocabularies)


def raw(name: str, *shape: int, dtype: str = "F32") -> RawTensor:
    return RawTensor(f"base_model.model.{name}", dtype, shape, 0, 4 * int(np.prod(shape)))


def lora(path: str, outputs: int = _FEATURES) -> list[RawTensor]:
    return [raw(f"{path}.lora_A.weight", 2, _FEATURES), raw(f"{path}.lora_B.weight", outputs, 2)]


def resolve(*tensors: RawTensor, target_map: TargetMap | None = None, **fields: Any) -> ResolvedAdapter:
    spec = LoraSpec(**{"r": 2, "lora_alpha": 2.0, "use_rslora": False, "target_modules": ("q",), **fields})
    found = [*lora("model.layers.0.q"), *tensors]
    return resolve_adapter(spec, found, target_map or make_map(), max_rank=8)


def problem(*tensors: RawTensor, **options: Any) -> str:
    with pytest.raises(ResolveError) as caught:
        resolve(*tensors, **options)
    (found,) = caught.value.problems
    return found


def spans(rows: TargetRows) -> list[tuple[int, int]]:
    return [(run.first, run.end) for run in rows.runs]


@pytest.mark.parametrize(
    ("is_tied", "indices", "of_head"),
    [
        (False, (("", (9, 3, 4)),), False),
        (True, (("", (9, 3, 4)),), True),
        (True, (("embed", (9, 3, 4)),), True),
        (True, (("embed", (9, 3, 4)), ("lm_head", (9, 3, 4))), True),
    ],
)
def test_rows_of_an_embedding_are_those_of_a_tied_head(is_tied: bool, indices: Any, of_head: bool) -> None:
    adapter = resolve(
        raw(f"model.embed.{_DELTA}", 3, _FEATURES),
        target_map=make_map(is_tied=is_tied),
        trainable_token_indices=indices,
    )
    targets = [_EMBEDDING, _HEAD] if of_head else [_EMBEDDING]
    assert [one.target for one in adapter.rows] == targets
    for one in adapter.rows:
        assert spans(one) == [(3, 5), (9, 10)] and one.num_rows == 3
        assert [run.tensor.start for run in one.runs] == [4 * _FEATURES, 0]
        assert one.num_tokens == _TOKENS
    names = {run.tensor.name for one in adapter.rows for run in one.runs}
    assert len(names) == 2 * len(targets), "both modules read rows under names of their own"


def test_a_tied_head_with_other_tokens_has_its_own_rows() -> None:
    adapter = resolve(
        raw(f"model.embed.{_DELTA}", 2, _FEATURES),
        raw(f"lm_head.{_DELTA}", 1, _FEATURES),
        target_map=make_map(is_tied=True),
        trainable_token_indices=(("embed", (3, 4)), ("lm_head", (7,))),
    )
    assert [spans(one) for one in adapter.rows] == [[(3, 5)], [(7, 8)]]


@pytest.mark.parametrize("shared", [(), ("embed",)])
@pytest.mark.parametrize("ensures", [False, True])
def test_a_whole_weight_is_the_tied_heads_unless_it_is_a_module_of_its_own(
    shared: tuple[str, ...], ensures: bool
) -> None:
    adapter = resolve(
        raw("model.embed.weight", _TOKENS, _FEATURES),
        target_map=make_map(is_tied=True),
        modules_to_save=shared,
        ensure_weight_tying=ensures,
    )
    both = ensures or not shared
    assert [one.target for one in adapter.saved] == [_EMBEDDING, _HEAD][: 1 + both]
    assert not any(one.changes_base for one in adapter.rows), "before a comparison"


def test_rows_that_differ_are_kept_beside_trained_ones() -> None:
    adapter = resolve(
        raw("model.embed.token_adapter.base_layer.weight", _TOKENS, _FEATURES),
        raw(f"model.embed.{_DELTA}", 1, _FEATURES),
        trainable_token_indices=(("", (12,)),),
    )
    (rows,) = adapter.rows
    differs = np.zeros(_TOKENS, np.bool_)
    differs[[2, 5, 12, 13, 29]] = True
    kept = spans_beside(rows, differs)
    assert kept == ((2, 6), (13, 30)), "few rows between others are read with them"
    (rows,) = with_kept(adapter, {"model.embed": kept}).rows
    assert spans(rows) == [(2, 6), (12, 13), (13, 30)] and rows.num_rows == 22
    assert [run.tensor.start // (4 * _FEATURES) for run in rows.runs] == [2, 0, 13]


@pytest.mark.parametrize(
    ("indices", "shape", "text"),
    [
        ((("", (3,)),), (2, _FEATURES), "shape [2, 8], but the model and trainable_token_indices"),
        ((("", (3,)),), (1, 9), "shape [1, 9]"),
        ((("lm_head", (3,)),), (1, _FEATURES), "trainable_token_indices does not name it"),
    ],
)
def test_rows_of_a_wrong_shape_or_name(indices: Any, shape: tuple[int, int], text: str) -> None:
    spec = {"trainable_token_indices": indices}
    tensors = [raw(f"model.embed.{_DELTA}", *shape)]
    with pytest.raises(ResolveError) as caught:
        resolve(*tensors, **spec)
    assert text in caught.value.problems[0]


def test_rows_that_are_announced_and_not_there() -> None:
    found = problem(trainable_token_indices=(("", (3,)),))
    assert found.startswith("model.embed: trainable_token_indices names it, but the file has no")


def test_two_weights_of_one_module() -> None:
    shape = (_TOKENS, _FEATURES)
    found = problem(raw("lm_head.weight", *shape), raw("lm_head.base_layer.weight", *shape))
    assert found.endswith("lm_head.weight") and "already has" in found


def test_of_several_copies_of_a_weight_the_one_is_used_that_peft_uses() -> None:
    """Their names are those of a module of its own in a model with another vocabulary."""
    names = ("original_module.weight", "weight", "modules_to_save.weight")
    for order in (names, names[::-1]):
        shape = (_TOKENS, _FEATURES)
        saved = resolve(*(raw(f"lm_head.{name}", *shape) for name in order)).saved
        assert [one.tensor.name for one in saved] == ["base_model.model.lm_head.weight"]


def test_a_head_with_a_bias_and_dora_are_refused_beside_rows() -> None:
    weight = raw("lm_head.weight", _TOKENS, _FEATURES)
    delta = raw(f"lm_head.{_DELTA}", 1, _FEATURES)
    found = problem(delta, target_map=make_map(has_bias=True), trainable_token_indices=(("lm_head", (3,)),))
    assert found == "lm_head: trained rows of an output head with a bias are not served"
    norms = [
        raw("lm_head.lora_magnitude_vector", _TOKENS),
        raw("model.layers.0.q.lora_magnitude_vector", _FEATURES),
    ]
    tensors = (*lora("lm_head", _TOKENS), *norms, raw("lm_head.base_layer.weight", *weight.shape))
    (rows,) = resolve(*tensors, target_modules=("q", "lm_head"), use_dora=True).rows
    assert "DoRA beside trained rows" in rows.refusal and not rows.changes_base


def test_lora_on_a_tied_embedding_that_is_to_stay_tied() -> None:
    found = problem(
        *lora("lm_head", _TOKENS),
        target_map=make_map(is_tied=True),
        target_modules=("q", "lm_head"),
        ensure_weight_tying=True,
    )
    assert "LoRA on a tied embedding with ensure_weight_tying" in found


def resized(size: int) -> list[RawTensor]:
    return [raw(f"{path}.weight", size, _FEATURES) for path in ("model.embed", "lm_head")]


@pytest.mark.parametrize("size", [_TOKENS - 4, _TOKENS + 3])
def test_a_vocabulary_of_another_size(size: int) -> None:
    rows = resolve(*resized(size)).rows
    assert [one.num_tokens for one in rows] == [size, size]
    assert all(one.changes_base for one in rows)
    beyond = [(_TOKENS, size)] if size > _TOKENS else []
    assert [spans(one) for one in rows] == [beyond, beyond]


@pytest.mark.parametrize(
    ("tensors", "fields", "text"),
    [
        (resized(_TOKENS + 1025), {}, "has 1025 more than the base's; at most 1024 more are"),
        (resized(_TOKENS + 2)[:1], {}, "model.embed has 32, lm_head has 30 tokens"),
        (
            [*resized(_TOKENS + 2), raw(f"model.embed.{_DELTA}", 1, _FEATURES)],
            {"trainable_token_indices": (("embed", (_TOKENS + 2,)),)},
            "has token 32, the file's vocabulary has 32 tokens",
        ),
        (
            [raw(f"{path}.{_DELTA}", 1, _FEATURES) for path in ("model.embed", "lm_head")],
            {"trainable_token_indices": (("embed", (31,)), ("lm_head", (31,)))},
            "lacks the rows of some of the tokens 30 to 31, which the base has not",
        ),
        (
            [*resized(_TOKENS - 1), *lora("lm_head", _TOKENS)],
            {"target_modules": ("q", "lm_head")},
            "LoRA on a vocabulary of another size",
        ),
    ],
)
def test_vocabularies_that_do_not_fit(tensors: list[RawTensor], fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ResolveError) as caught:
        resolve(*tensors, **fields)
    assert text in " ".join(caught.value.problems)


def test_more_tokens_where_another_embedding_may_lack_them() -> None:
    target_map = make_map()
    other = Vocabulary("model.per_layer", {"weight": (_TOKENS, 4)})
    more = replace(target_map, vocabularies={**target_map.vocabularies, other.path: other})
    with pytest.raises(ResolveError, match=r"model.per_layer may lack them"):
        resolve(*resized(_TOKENS + 1), target_map=more)
    assert resolve(*resized(_TOKENS), target_map=more).saved
