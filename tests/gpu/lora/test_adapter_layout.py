"""From the files of PEFT to regions and back to matrices: the delta must be PEFT's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corun.gpu.lora.adapter_layout import AdapterLayout, GroupPlan
from corun.gpu.lora.base import PackedLora
from corun.gpu.lora.matrix_layout import PACKED, ROWS, MatrixLayout, bits_of, unpack
from corun.gpu.model.targets import build_target_map
from corun.runtime.adapters.load import open_adapter
from corun.runtime.adapters.target_map import Target, TargetMap
from corun.runtime.errors import AdapterError
from corun.shm.arena import RegionPlace
from corun.shm.region import read_header
from support.architectures import make_model
from support.peft_adapters import edit_config, edit_tensors, load_with_peft, save_adapter
from torch.utils._python_dispatch import TorchDispatchMode

LAYOUTS: dict[str, MatrixLayout] = {"packed": PACKED, "rows": ROWS}


def fill(
    directory: Path, layout: AdapterLayout, target_map: TargetMap
) -> tuple[tuple[GroupPlan, ...], list[torch.Tensor]]:
    """The regions of an adapter, in memory with previous contents."""
    with open_adapter(directory, target_map, max_rank=64) as source:
        plans = layout.plan(source.adapter)
        parts = [torch.full((plan.region.num_bytes,), 0xA5, dtype=torch.uint8) for plan in plans]
        writer = layout.writer(plans, parts)
        assert list(source.read_layers(writer.write)) == sorted({plan.key[0] for plan in plans})
        assert not writer.missing
    return plans, parts


class NoMemory(TorchDispatchMode):
    """Inside, torch may view memory and copy, but not allocate."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        is_view = any(result.alias_info is not None for result in function._schema.returns)
        assert is_view, f"{name} makes a tensor"
        return function(*args, **(kwargs or {}))


def unpacked(packed: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """As loads do it, between two tensors on the way of which memory was not clean."""
    wider = torch.full((height + 2, width), 7, dtype=packed.dtype)
    mode: Any = NoMemory
    with mode():
        unpack(packed, wider[1:-1])
    assert (wider[[0, -1]] == 7).all()
    narrow = torch.full((width, height + 2), 7, dtype=packed.dtype)
    with mode():
        unpack(packed, narrow[:, 1:-1].t())  # as kernels want B
    assert (narrow[:, [0, -1]] == 7).all()
    assert torch.equal(narrow[:, 1:-1].t(), wider[1:-1])
    return wider[1:-1]


def matrices(
    layout: AdapterLayout, plans: tuple[GroupPlan, ...], parts: list[torch.Tensor]
) -> dict[int, tuple[Target, PackedLora]]:
    """The contents of filled regions: A, and B as in the adapter."""
    found = {}
    for plan, part in zip(plans, parts, strict=True):
        for one in layout.matrices_in(RegionPlace(*plan.key, 0, part.numel()), part):
            lora = layout.views(one, part)
            if layout.matrices is PACKED:
                a = unpacked(lora.a, one.rank, one.target.in_features)
                b = unpacked(lora.b, one.target.out_features, one.rank)
                lora = PackedLora(a, b, lora.rank, lora.scaling)
            else:
                lora = replace(lora, b=lora.b.t())
            found[one.target.index] = one.target, lora
    return found


_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama3-rope", {}),
    ("llama3-rope", {"target_modules": "all-linear", "r": 1}),
    ("llama3-rope", {"use_rslora": True, "lora_alpha": 3}),
    (
        "llama3-rope",
        {
            "target_modules": ["q_proj", "o_proj", "down_proj"],
            "rank_pattern": {r"layers\.0\..*q_proj": 7, "down_proj": 3},
            "alpha_pattern": {"o_proj": 5, r"^model\.layers\.1.*": 11},
            "use_rslora": True,
        },
    ),
    ("llama3-rope", {"layers_to_transform": [1], "layers_pattern": "layers"}),
    ("llama3-rope", {"layers_to_transform": 0, "exclude_modules": ["v_proj"]}),
    ("llama3-rope", {"target_modules": r"model\.layers\.1\.(self_attn|mlp)\..*(q|up)_proj"}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 5}),
    ("gpt-neox", {"target_modules": ["query_key_value", "dense", "dense_4h_to_h"]}),
    ("gemma3", {"target_modules": "all-linear", "rank_pattern": {"q_proj": 9}}),
    ("mixtral", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    ("starcoder2", {"target_modules": ["c_fc", "c_proj", "q_proj"], "alpha_pattern": {"c_fc": 1}}),
]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("architecture", "config"), _CASES)
def test_deltas_are_those_of_peft(
    tmp_path: Path, architecture: str, config: dict[str, Any], kind: str
) -> None:
    save_adapter(tmp_path, architecture, **config)
    edit_config(tmp_path, base_model_name_or_path=None)
    model = load_with_peft(tmp_path, architecture)
    target_map = build_target_map(make_model(architecture))
    layout = AdapterLayout(target_map, LAYOUTS[kind], torch.float32)
    found = matrices(layout, *fill(tmp_path, layout, target_map))
    adapted = {
        path.removeprefix("base_model.model."): module
        for path, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert {target.path for target, _ in found.values()} == set(adapted)
    for target, lora in found.values():
        expected = adapted[target.path].get_delta_weight("default")
        torch.testing.assert_close(lora.scaling * lora.b @ lora.a, expected)


def make_layout(
    dtype: torch.dtype = torch.float32, matrices: MatrixLayout = PACKED
) -> tuple[AdapterLayout, TargetMap]:
    """A model with q, k and v that read the same x."""
    plain = build_target_map(make_model("llama3-rope"))
    groups = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    targets = [
        Target(
            t.index,
            t.path,
            t.layer,
            groups[t.path.rpartition(".")[2]],
            t.in_features,
            t.out_features,
            t.physical_path,
        )
        for t in plain.targets
        if t.path.rpartition(".")[2] in groups
    ]
    target_map = TargetMap(tuple(targets), plain.refused)
    return AdapterLayout(target_map, matrices, dtype), target_map


def test_a_region_has_all_targets_of_its_group(tmp_path: Path) -> None:
    """k has no matrices, and its columns of y between those of q and v."""
    save_adapter(tmp_path, r=4, lora_alpha=2)
    layout, target_map = make_layout(torch.bfloat16)
    plans, parts = fill(tmp_path, layout, target_map)
    assert [plan.key for plan in plans] == [(0, 0), (1, 0)]
    region = read_header(parts[0].numpy().data)
    assert region == plans[0].region
    assert [target.rank for target in region.targets] == [4, 0, 4]
    assert [target.padded_columns for target in region.targets] == [64, 32, 32]
    assert [target.scaling for target in region.targets] == [0.5, 0.0, 0.5]
    assert (region.in_features, region.item_bytes) == (64, 2)


def test_fill_writes_every_byte_of_the_matrices(tmp_path: Path) -> None:
    """Padding is zero although the memory held something else before."""
    save_adapter(tmp_path, r=3, target_modules=["q_proj"])
    layout, target_map = make_layout(torch.bfloat16)
    plans, parts = fill(tmp_path, layout, target_map)
    for plan, part in zip(plans, parts, strict=True):
        (one,) = layout.matrices_in(RegionPlace(*plan.key, 0, part.numel()), part)
        lora = layout.views(one, part)
        assert lora.a.data_ptr() % 2 == 0
        assert lora.a.shape == (1, 16, 8, 4)
        assert not lora.a[:, :, 3:].any()
        assert lora.b.shape == (4, 2, 16, 2)
        assert not lora.b[:, 1, :, 1].any()
        assert lora.b[:, 1, :, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "width"), [(1, 16), (8, 64), (13, 37), (64, 29)])
def test_unpacking_gives_the_rows_back(dtype: torch.dtype, rank: int, width: int) -> None:
    matrix = torch.randn(rank, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    a = torch.empty(PACKED.a_shape(rank, width, dtype.itemsize), dtype=dtype)
    PACKED.write_a(bits_of(matrix), bits_of(a))
    assert torch.equal(unpacked(a, rank, width), matrix)
    b = torch.empty(PACKED.b_shape(width, rank, dtype.itemsize), dtype=dtype)
    PACKED.write_b(bits_of(matrix.t()), bits_of(b))
    assert torch.equal(unpacked(b, width, rank), matrix.t())


def test_bits_share_the_memory() -> None:
    matrix = torch.ones(2, 3, dtype=torch.bfloat16)
    bits = bits_of(matrix)
    bits[0, 1] = 0
    assert bits.dtype == np.uint16
    assert matrix[0].tolist() == [1.0, 0.0, 1.0]


def test_a_value_that_is_not_finite_is_found_on_the_way(tmp_path: Path) -> None:
    save_adapter(tmp_path)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[1, 2] = float("nan")
        return tensor

    edit_tensors(tmp_path, layers__1__self_attn__v_proj__lora_B=spoil)
    layout, target_map = make_layout()
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.v_proj\.lora_B.*not finite"):
        fill(tmp_path, layout, target_map)
    source = open_adapter(tmp_path, target_map, max_rank=64)
    with source, pytest.raises(AdapterError, match="not finite"):
        list(source.read_layers(layout.check))


def test_no_region_of_an_adapter_is_larger_than_the_largest(tmp_path: Path) -> None:
    """Buffers of loads are made before any adapter is known."""
    layout, target_map = make_layout(torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    layout.read_base = lambda one: (torch.ones(one.out_features, one.in_features), None)
    save_adapter(tmp_path, r=13, target_modules=targets, use_dora=True)
    plans, _ = fill(tmp_path, layout, target_map)
    largest = max(plan.region.num_bytes for plan in plans)
    assert layout.max_region_bytes(13) == largest
    assert layout.max_region_bytes(8) < largest <= layout.max_region_bytes(16)
