"""Linears are replaced in place, release their weights, and add the deltas of their pass."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from corun.gpu.forward.batch import StepContext
from corun.gpu.linear.base import MakeLinear
from corun.gpu.linear.numba_backend import NumbaLinear
from corun.gpu.linear.onednn import OnednnLinear
from corun.gpu.linear.plain import ModuleLinear, PlainLinear
from corun.gpu.linear.wrapper import CorunLinear, detach_from_weight_files, wrap_linears
from corun.gpu.lora.deltas import ResidentDeltas
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from support.lora import make_batch
from torch import nn


class SpecialLinear(nn.Linear):
    """Not exactly nn.Linear: it may compute something else."""


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8)
        self.block = nn.ModuleDict({"up": self.up, "down": nn.Linear(8, 6, bias=False)})
        self.special = SpecialLinear(6, 6)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.block["down"](torch.relu(self.up(hidden)))
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


class Codes(nn.Module):
    """A quantised linear of a library: no weight, and results of another layout and type."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.codes = nn.Buffer((linear.weight.detach() * 16).round().to(torch.int8))
        self.bias = linear.bias

    def full(self) -> torch.Tensor:
        return self.codes.float() / 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.full().double() @ x.double().transpose(-1, -2)
        return y.transpose(-1, -2) + self.bias


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [PlainLinear, OnednnLinear])
@torch.inference_mode()
def test_wrapped_model_computes_the_same(make: MakeLinear) -> None:
    model = Tiny().eval()
    ids = torch.tensor([[1, 2, 3, 10]])
    expected = model(ids)
    assert wrap_linears(model, StepContext(), make, {}, {}) == 3
    torch.testing.assert_close(model(ids), expected)
    assert isinstance(model.lm_head, CorunLinear)
    assert model.up is model.block["up"]
    assert type(model.special) is SpecialLinear
    assert wrap_linears(model, StepContext(), make, {}, {}) == 0


@torch.inference_mode()
def test_packing_releases_the_weight_but_not_a_tied_one() -> None:
    model = Tiny().eval()
    alive = weakref.ref(model.block.get_parameter("down.weight"))
    tied = model.embed.weight
    wrap_linears(model, StepContext(), OnednnLinear, {}, {})
    gc.collect()
    assert alive() is None
    assert model.embed.weight is tied
    assert torch.equal(model.lm_head.weight, tied)


@torch.inference_mode()
def test_a_tied_embedding_reads_the_packed_weight_and_releases_its_own() -> None:
    model = Tiny().eval().to(torch.bfloat16)
    weight = model.embed.weight.detach().clone()
    alive = weakref.ref(model.embed.weight)
    wrap_linears(model, StepContext(), NumbaLinear, {}, {})
    gc.collect()
    assert alive() is None
    assert torch.equal(model.embed.weight, weight)
    ids = torch.tensor([[10, 0, 3], [7, 7, 1]])
    assert torch.equal(model.embed(ids), weight[ids])
    assert torch.equal(model.embed(ids[:, :0]), weight[ids[:, :0]])


def test_what_is_left_of_a_model_leaves_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    torch.arange(66.0).numpy().tofile(path)
    model = Tiny().eval()
    model.embed.weight.data = torch.from_file(str(path), size=66).view(11, 6)
    assert str(path) in Path("/proc/self/maps").read_text()
    wrap_linears(model, StepContext(), OnednnLinear, {}, {})
    detach_from_weight_files(model)
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(model.embed.weight, torch.arange(66.0).view(11, 6))


def test_a_linear_of_another_dtype_is_computed_by_torch() -> None:
    model = Tiny().eval().to(torch.bfloat16)
    model.up.to(torch.float32)
    wrap_linears(model, StepContext(), NumbaLinear, {}, {})
    assert "backend=plain" in repr(model.up)
    assert "backend=numba" in repr(model.block["down"])


def test_features_and_dtype_can_still_be_read() -> None:
    model = Tiny().eval()
    bias = model.up.bias.detach().clone()
    wrap_linears(model, StepContext(), OnednnLinear, {}, {})
    up = model.up
    assert (up.in_features, up.out_features) == (6, 8)
    assert up.weight.dtype == torch.float32
    assert torch.equal(up.bias, bias)
    assert model.block["down"].bias is None
    assert "backend=onednn" in repr(model)


def make_at(_path: str, linear: nn.Module) -> ModuleLinear | None:
    return ModuleLinear(linear, linear.full) if isinstance(linear, Codes) else None


@pytest.mark.parametrize("has_codes", [False, True])
@torch.inference_mode()
def test_deltas_of_the_pass_are_added_to_targets_only(has_codes: bool) -> None:
    model = Tiny().eval()
    codes = Codes(model.up)
    if has_codes:
        model.up.weight.copy_(codes.full())
    table = LoraTable(2, 2, "cpu")
    backend = TorchLora(table, dtype=torch.float32)
    up_a, up_b = torch.randn(3, 6), torch.randn(8, 3)
    row = table.add(DeviceAdapter({1: backend.pack(up_a, up_b, 2.0)}))
    ids = torch.tensor([[4, 5, 6, 7]])
    base = model(ids)
    changed = Tiny().eval()
    changed.load_state_dict(model.state_dict())
    changed.up.weight += 2.0 * up_b @ up_a
    adapted = changed(ids)

    context = StepContext()
    if has_codes:
        model.block["up"] = codes
        model.set_submodule("up", codes)
    wrap_linears(model, context, PlainLinear, {"block.down": 0, "block.up": 1}, {}, make_at)
    assert model.up is model.block["up"]
    assert f"backend={'module' if has_codes else 'plain'}" in repr(model.up)
    assert torch.equal(model.up.weight, codes.full()) == has_codes
    without = model(ids)
    torch.testing.assert_close(without, base)
    context.deltas = ResidentDeltas(backend, make_batch([(1, 3, 0)], table, [row]))
    mixed = model(ids)
    torch.testing.assert_close(mixed[:, 1:3], adapted[:, 1:3], rtol=1e-4, atol=1e-5)
    assert torch.equal(mixed[:, [0, 3]], without[:, [0, 3]])
    context.deltas = None
    torch.testing.assert_close(model(ids), base)


def test_unknown_target_path_is_our_bug() -> None:
    with pytest.raises(AssertionError, match=r"no nn.Linear at \['block.sideways'\]"):
        wrap_linears(Tiny(), StepContext(), PlainLinear, {"block.sideways": 0}, {})
