"""The library's Conv1D becomes an equivalent linear."""

import copy

import torch
from corun.gpu.model.skeleton import linears_for_conv1d
from support.architectures import make_model
from torch import nn


def test_linears_compute_what_conv1d_did() -> None:
    model = make_model("gpt2")
    replaced = copy.deepcopy(model)
    paths = linears_for_conv1d(replaced)
    assert {path.rpartition(".")[2] for path in paths} == {"c_attn", "c_proj", "c_fc"}
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(replaced(tokens).logits, model(tokens).logits)
    for path in paths:
        linear, conv = replaced.get_submodule(path), model.get_submodule(path)
        assert type(linear) is nn.Linear
        assert linear.weight.shape == (linear.out_features, linear.in_features)
        assert torch.equal(linear.weight, conv.get_parameter("weight").T)


def test_no_weight_is_copied() -> None:
    model = make_model("gpt2")
    before = {one.data_ptr() for one in model.parameters()}
    linears_for_conv1d(model)
    assert {one.data_ptr() for one in model.parameters()} == before


def test_models_without_any_are_left_alone() -> None:
    assert linears_for_conv1d(make_model("qwen3")) == frozenset()
