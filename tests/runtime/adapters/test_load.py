"""Genuine adapters of PEFT with one defect each."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corun.gpu.model.targets import build_target_map
from corun.runtime.adapters.digest import ContentDigest
from corun.runtime.adapters.load import OpenAdapter, open_adapter
from corun.runtime.adapters.resolve import ResolveError
from corun.runtime.adapters.resolved import RawTensor, StoredTensor
from corun.runtime.adapters.target_map import Target, TargetMap
from corun.runtime.errors import AdapterChangedError, AdapterError
from numpy.typing import NDArray
from safetensors.numpy import save_file
from support.architectures import make_model
from support.peft_adapters import WEIGHTS, edit_config, edit_tensors, rename_tensors, save_adapter

_TARGET_MAP = build_target_map(make_model("llama3-rope"))


def read(directory: Path, max_rank: int = 64) -> OpenAdapter:
    with open_adapter(directory, _TARGET_MAP, max_rank=max_rank) as source:
        list(source.read_layers(_leave))
        return source


def _leave(tensors: Sequence[StoredTensor]) -> None:
    """Ignore the tensors."""


def test_the_digest_is_the_same_in_any_directory_and_changes_with_content(tmp_path: Path) -> None:
    save_adapter(tmp_path / "one")
    save_adapter(tmp_path / "two")
    save_adapter(tmp_path / "other", seed=1)
    edit_config(tmp_path / "two", base_model_name_or_path="elsewhere", lora_dropout=0.5)
    digest = read(tmp_path / "one").digest
    assert read(tmp_path / "two").digest == digest
    assert read(tmp_path / "two").digest.hexadecimal == digest.hexadecimal
    assert read(tmp_path / "other").digest != digest
    edit_config(tmp_path / "two", lora_alpha=9)
    assert read(tmp_path / "two").digest != digest


def test_names_with_the_adapters_name_in_them(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    rename_tensors(tmp_path, ".weight", ".default.weight")
    assert len(read(tmp_path).adapter.targets) == 4


def test_copies_of_the_base_are_in_no_layer(tmp_path: Path) -> None:
    """Layers have places in memory, and these have none."""
    saved = ["embed_tokens"]
    save_adapter(tmp_path, target_modules=["q_proj"], layers_to_transform=[1], modules_to_save=saved)

    class Same:
        def differing_rows(
            self, name: str, tensor: RawTensor, parts: Iterable[memoryview]
        ) -> NDArray[np.bool_]:
            assert sum(part.nbytes for part in parts) == tensor.num_bytes
            return np.zeros(tensor.shape[0], np.bool_)

    with open_adapter(tmp_path, _TARGET_MAP, max_rank=64, base=Same()) as source:
        assert source.adapter.rows
        assert list(source.read_layers(_leave)) == [1]


@pytest.mark.parametrize("config", [{"trainable_token_indices": [3, 5]}, {"modules_to_save": ["lm_head"]}])
def test_rows_of_tokens_that_are_not_finite(tmp_path: Path, config: dict[str, Any]) -> None:
    """Refused before there is a place for them."""

    class Other:
        def differing_rows(
            self, name: str, tensor: RawTensor, parts: Iterable[memoryview]
        ) -> NDArray[np.bool_]:
            return np.ones(sum(1 for _ in parts) and tensor.shape[0], np.bool_)

    save_adapter(tmp_path, **config)
    name = "trainable_tokens_delta" if "trainable_token_indices" in config else "lm_head"
    edit_tensors(tmp_path, **{name: lambda rows: rows.index_fill(0, torch.tensor([1]), torch.nan)})
    with (
        pytest.raises(AdapterError, match=rf"{tmp_path}: base_model.*{name}.* not finite"),
        open_adapter(tmp_path, _TARGET_MAP, max_rank=64, base=Other()) as source,
    ):
        _ = source.adapter


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication="),
    ],
)
def test_variants_that_peft_writes_are_refused(tmp_path: Path, config: dict[str, Any], field: str) -> None:
    save_adapter(tmp_path, **config)
    with pytest.raises(AdapterError) as caught:
        read(tmp_path)
    assert field in str(caught.value)
    assert "adapter_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "reason"), [(0.0, "is 0 at 2"), (float("nan"), "not finite"), (float("inf"), "finite")]
)
def test_magnitudes_are_checked_before_anything_is_read(tmp_path: Path, value: float, reason: str) -> None:
    """By name, when the adapter is opened, so before memory is taken for it."""
    save_adapter(tmp_path, use_dora=True)

    def spoil(tensor: Any) -> Any:
        tensor[2] = value
        return tensor

    edit_tensors(tmp_path, layers__1__self_attn__v_proj__lora_magnitude=spoil)
    with pytest.raises(AdapterError, match=reason) as caught:
        open_adapter(tmp_path, _TARGET_MAP, max_rank=64)
    assert "layers.1.self_attn.v_proj.lora_magnitude_vector" in str(caught.value)


def test_a_magnitude_below_zero_is_read(tmp_path: Path) -> None:
    """Training may lead there, and PEFT computes with it."""
    save_adapter(tmp_path, use_dora=True)
    edit_tensors(tmp_path, lora_magnitude=lambda tensor: -tensor)
    adapter = read(tmp_path).adapter
    assert all(lora.magnitudes is not None for lora in adapter.targets)


def test_dora_on_an_embedding_is_refused_by_name(tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    with pytest.raises(AdapterError) as caught:
        read(tmp_path)
    assert isinstance(caught.value, ResolveError)
    problems = caught.value.problems
    assert any("embed_tokens: DoRA on embeddings is not served" in one for one in problems)


def test_expert_parameters_are_refused(tmp_path: Path) -> None:
    save_adapter(
        tmp_path, "mixtral", target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]
    )
    with pytest.raises(AdapterError, match="target_parameters"):
        read(tmp_path)
    edit_config(tmp_path, target_parameters=...)
    with pytest.raises(AdapterError, match="expert targets are not served yet"):
        open_adapter(tmp_path, build_target_map(make_model("mixtral")), max_rank=64)


def test_truncated_tensors(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    path = tmp_path / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="truncated or damaged"):
        read(tmp_path)


def test_missing_and_extra_tensors(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    edit_tensors(
        tmp_path,
        layers__0__self_attn__q_proj__lora_A=...,
        layers__1__self_attn__q_proj__lora_A="base_model.model.model.layers.1.extra.lora_A.weight",
    )
    with pytest.raises(AdapterError) as caught:
        read(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "model.layers.0.self_attn.q_proj: lora_A is missing" in message
    assert "no linear module model.layers.1.extra" in message


def test_shapes_of_another_model(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    edit_tensors(tmp_path, lora_A=lambda tensor: tensor[:, :-2])
    with pytest.raises(AdapterError, match=r"shape \[4, 62\].*need \[4, 64\]"):
        read(tmp_path)


def test_adapter_of_another_architecture(tmp_path: Path) -> None:
    save_adapter(tmp_path, "phi3", target_modules=["qkv_proj"])
    with pytest.raises(AdapterError, match=r"no linear module model.layers.0.self_attn.qkv_proj"):
        read(tmp_path)


def test_rank_limit(tmp_path: Path) -> None:
    save_adapter(tmp_path, r=64)
    assert read(tmp_path).adapter.max_rank == 64
    with pytest.raises(AdapterError, match=r"rank 64 is over the limit of 63 .--max-lora-rank"):
        read(tmp_path, max_rank=63)


def test_a_file_of_pickles(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model.bin is refused"):
        read(tmp_path)


def test_configurations_of_an_older_peft(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    old = {"fan_in_fan_out", "inference_mode", "peft_type", "task_type", "bias", "lora_dropout"}
    old |= {"r", "lora_alpha", "target_modules", "base_model_name_or_path", "modules_to_save"}
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    edit_config(tmp_path, **dict.fromkeys(set(fields) - old, ...), enable_lora=None, merge_weights=False)
    assert len(read(tmp_path).adapter.targets) == 4


_MANY_LAYERS = 12  # by name 10 and 11 come before 2


def save_layers(directory: Path, *, spoilt_layer: int | None = None) -> TargetMap:
    """Make an adapter of many small layers, and the model for it."""
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors, targets = {}, []
    for layer in range(_MANY_LAYERS):
        path = f"model.layers.{layer}.q"
        targets.append(Target(layer, path, layer, 0, 2, 3, path))
        for matrix, shape in (("A", (1, 2)), ("B", (3, 1))):
            value = float(layer) + (layer == spoilt_layer)
            tensors[f"base_model.model.{path}.lora_{matrix}.weight"] = np.full(shape, value, np.float32)
    save_file(tensors, directory / WEIGHTS)
    return TargetMap(tuple(targets), {})


def registered(directory: Path, target_map: TargetMap) -> ContentDigest:
    with open_adapter(directory, target_map, max_rank=1) as source:
        list(source.read_layers(_leave))
        return source.digest


def test_layers_are_read_in_their_order_and_handed_over_before_they_count(tmp_path: Path) -> None:
    target_map = save_layers(tmp_path)
    found: list[object] = []

    def take(tensors: Sequence[StoredTensor]) -> None:
        for raw, data in tensors:
            assert raw.num_bytes == data.nbytes
            found.append(float(np.frombuffer(data, np.float32)[0]))

    with open_adapter(tmp_path, target_map, max_rank=1) as source:
        for layer in source.read_layers(take):
            found.append(layer)
    assert found == [value for layer in range(_MANY_LAYERS) for value in (layer, layer, layer)]
    assert all(isinstance(layer, int) for layer in found[2::3])


@pytest.mark.parametrize("spoilt_layer", [0, 2, 11])
def test_what_differs_from_what_was_registered_never_counts(tmp_path: Path, spoilt_layer: int) -> None:
    target_map = save_layers(tmp_path)
    digest = registered(tmp_path, target_map)
    save_layers(tmp_path, spoilt_layer=spoilt_layer)
    with open_adapter(tmp_path, target_map, max_rank=1) as source:
        source.expect(digest)
        layers = source.read_layers(_leave)
        assert [next(layers) for _ in range(spoilt_layer)] == list(range(spoilt_layer))
        with pytest.raises(AdapterError, match="have changed since the adapter was registered"):
            next(layers)


def test_another_configuration_is_seen_before_anything_is_read(tmp_path: Path) -> None:
    target_map = save_layers(tmp_path)
    digest = registered(tmp_path, target_map)
    edit_config(tmp_path, lora_alpha=2)
    with (
        open_adapter(tmp_path, target_map, max_rank=1) as source,
        pytest.raises(AdapterError, match="have changed since the adapter was registered"),
    ):
        source.expect(digest)


def test_what_was_begun_is_resumed_only_with_its_configuration_and_file(tmp_path: Path) -> None:
    target_map = save_layers(tmp_path)
    with open_adapter(tmp_path, target_map, max_rank=1) as source:
        header = source.begin()
    assert header is not None
    config = (tmp_path / "adapter_config.json").read_bytes()
    with open_adapter(tmp_path, target_map, max_rank=1) as source:
        source.resume(header)
    edit_config(tmp_path, lora_alpha=2)
    with (
        open_adapter(tmp_path, target_map, max_rank=1) as source,
        pytest.raises(AdapterChangedError, match="changed before they were first read"),
    ):
        source.resume(header)
    (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes())
    os.utime(tmp_path / WEIGHTS, ns=(1, 1))
    with (
        open_adapter(tmp_path, target_map, max_rank=1) as source,
        pytest.raises(AdapterChangedError, match="changed before they were first read"),
    ):
        source.resume(header)


def test_adapters_of_one_recipe_share_what_their_headers_say(tmp_path: Path) -> None:
    target_map = save_layers(tmp_path / "one")
    save_layers(tmp_path / "two")
    edit_config(tmp_path / "two", base_model_name_or_path="elsewhere")
    found = []
    for name in ("one", "two"):
        with open_adapter(tmp_path / name, target_map, max_rank=1) as source:
            found += [source.outline, source.adapter]
    assert all(one is found[0] for one in found)


@pytest.mark.parametrize("spoilt_layer", [None, 6])
def test_files_that_are_written_while_they_are_read(tmp_path: Path, spoilt_layer: int | None) -> None:
    """In place: the rest is read from the new bytes, which count if they are the same."""
    target_map = save_layers(tmp_path)
    digest = registered(tmp_path, target_map)
    save_layers(tmp_path / "new", spoilt_layer=spoilt_layer)
    with open_adapter(tmp_path, target_map, max_rank=1) as source:
        source.expect(digest)
        layers = source.read_layers(_leave)
        assert next(layers) == 0
        (tmp_path / WEIGHTS).write_bytes((tmp_path / "new" / WEIGHTS).read_bytes())
        if spoilt_layer is None:
            assert list(layers) == list(range(1, _MANY_LAYERS))
            return
        for layer in range(1, spoilt_layer):
            assert next(layers) == layer
        with pytest.raises(AdapterError, match="have changed"):
            next(layers)


def test_a_file_that_takes_the_place_of_one_that_is_read(tmp_path: Path) -> None:
    """The open file keeps its content."""
    target_map = save_layers(tmp_path)
    digest = registered(tmp_path, target_map)
    save_layers(tmp_path / "new", spoilt_layer=6)
    with open_adapter(tmp_path, target_map, max_rank=1) as source:
        source.expect(digest)
        layers = source.read_layers(_leave)
        assert next(layers) == 0
        (tmp_path / "new" / WEIGHTS).replace(tmp_path / WEIGHTS)
        assert list(layers) == list(range(1, _MANY_LAYERS))
        assert source.digest == digest
    with open_adapter(tmp_path, target_map, max_rank=1) as source:
        source.expect(digest)
        with pytest.raises(AdapterError, match="have changed"):
            list(source.read_layers(_leave))


def test_files_that_are_written_while_they_are_registered(tmp_path: Path) -> None:
    """There is nothing to compare with, so they may belong to two adapters."""
    target_map = save_layers(tmp_path)
    with open_adapter(tmp_path, target_map, max_rank=1) as source:
        layers = source.read_layers(_leave)
        assert next(layers) == 0
        os.utime(tmp_path / WEIGHTS, ns=(1, 1))
        with pytest.raises(AdapterError, match="changed while it was read"):
            list(layers)


@pytest.mark.parametrize("has_config", [False, True])
def test_a_directory_of_a_gguf_adapter(tmp_path: Path, *, has_config: bool) -> None:
    save_adapter(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "lora-f16.gguf")
    if not has_config:
        (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"lora-f16.gguf is a GGUF adapter, .* PEFT adapter"):
        read(tmp_path)


def test_bad_values_name_the_directory_too(tmp_path: Path) -> None:
    save_adapter(tmp_path)

    def refuse(tensors: Sequence[StoredTensor]) -> None:
        raise AdapterError(f"{tensors[0][0].name} holds nonsense")

    with (
        open_adapter(tmp_path, _TARGET_MAP, max_rank=64) as source,
        pytest.raises(AdapterError, match=rf"{tmp_path}: base_model.* holds nonsense"),
    ):
        list(source.read_layers(refuse))
