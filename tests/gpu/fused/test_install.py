"""One-pass kernels give the modules' own bits, and are not installed where they would not."""

import functools
import inspect
import logging
import re
import textwrap
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from corun.gpu.fused.activation import ActivationTables, FusedGatedMlp, GateUpGatedMlp
from corun.gpu.fused.install import NUMBA, FusedNorm, install_fused_kernels, select_fused_kernels
from corun.gpu.fused.rope import rotate
from support.architectures import make_model
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

VOCAB_SIZE = 96


def draw_model(architecture: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return make_model(architecture).to(dtype)


def run(model: nn.Module, num_tokens: int) -> torch.Tensor:
    with torch.inference_mode():
        tokens = torch.arange(num_tokens)[None] % VOCAB_SIZE
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits


# Norms, gated activations and rotary embeddings of two layers.
@pytest.mark.parametrize(
    ("architecture", "replaced"),
    [
        ("llama3-rope", (5, 2, 2)),
        ("gemma2", (9, 2, 2)),
        ("qwen3", (9, 2, 2)),
        ("phi3", (5, 2, 2)),
        ("cohere", (0, 2, 0)),  # another norm, and pairs of neighbours
        ("gpt-neox", (0, 0, 2)),  # torch's own norm, nothing gated
    ],
)
def test_logits_keep_their_bits(architecture: str, replaced: tuple[int, ...]) -> None:
    model = draw_model(architecture)
    expected = {num: run(model, num) for num in (1, 50)}
    counts = install_fused_kernels(model, lambda: run(model, 5))
    assert tuple(kind.replaced for kind in counts.values()) == replaced
    for num, logits in expected.items():
        assert torch.equal(run(model, num), logits)


def test_many_rows_over_threads_are_what_one_thread_computes() -> None:
    torch.manual_seed(0)
    module = LlamaRMSNorm(1024).bfloat16()
    fused = FusedNorm(module.weight, module.variance_epsilon, rounds_twice=True)
    x = torch.randn(1, 70, 1024).bfloat16()
    whole = fused(x)  # above the size from which threads share the rows
    assert torch.equal(whole, torch.cat([fused(x[:, i : i + 1]) for i in range(70)], dim=1))
    assert torch.equal(fused(x.transpose(0, 1)), whole.transpose(0, 1))


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu_new", "relu2"])
def test_every_activation_is_exact_for_every_gate(name: str) -> None:
    table = ActivationTables().of(ACT2FN[name])
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    expected = ACT2FN[name](every)
    assert torch.equal(table.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(table[numbers], expected[numbers])


class _ScaledNorm(LlamaRMSNorm):  # type: ignore[misc]
    factor = 1.0

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states) * self.factor


def test_each_module_of_a_class_is_compared() -> None:
    norms = [_ScaledNorm(64).bfloat16() for _ in range(4)]
    norms[2].factor = 1.01
    install_fused_kernels(nn.ModuleList(norms), lambda: None)
    assert [isinstance(one.forward, FusedNorm) for one in norms] == [True, True, False, True]


class _OtherNorm(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states) * 1.01


class _OtherMlp(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + x


def _with_other_norm(model: PreTrainedModel) -> None:
    model.model.norm = _OtherNorm(64).bfloat16()


def _with_other_mlp(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = _OtherMlp(model.config).bfloat16()


def _with_other_rotation(model: PreTrainedModel) -> None:
    attention = model.model.layers[1].self_attn
    forward = type(attention).forward

    class Other(type(attention)):  # type: ignore[misc]
        def forward(self, *arguments: object, **named: object) -> object:
            return forward(self, *arguments, **named)

    attention.__class__ = Other


@pytest.mark.parametrize(
    ("change", "replaced"),
    [(_with_other_norm, (4, 2, 2)), (_with_other_mlp, (5, 1, 2)), (_with_other_rotation, (5, 2, 1))],
)
def test_what_computes_something_else_is_left_alone(
    change: Callable[[PreTrainedModel], None], replaced: tuple[int, ...]
) -> None:
    model = draw_model("llama3-rope")
    change(model)
    expected = run(model, 9)
    counts = install_fused_kernels(model, lambda: run(model, 5))
    assert tuple(kind.replaced for kind in counts.values()) == replaced
    assert torch.equal(run(model, 9), expected)


def _doubled(argument: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator with an effect: it drops an argument."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def decorated(*arguments: Any, **named: Any) -> Any:
            named.pop(argument, None)
            return function(*arguments, **named)

        return decorated

    return decorate


def _hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does not name the decorated function."""

    def decorated(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return decorated


def _with_forward(model: PreTrainedModel, forward: object) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.__class__ = type("Other", (type(attention),), {"forward": forward})


def test_decorated_rotations_stay_decorated(caplog: pytest.LogCaptureFixture) -> None:
    model = draw_model("llama3-rope")
    expected = run(model, 9)
    forward = type(model.model.layers[0].self_attn).forward
    _with_forward(model, _doubled("one")(_doubled("other")(forward)))
    counts = install_fused_kernels(model, lambda: run(model, 5))
    assert counts["rotary embeddings"].replaced == 2
    assert not caplog.records
    assert torch.equal(run(model, 9), expected)
    attention = model.model.layers[0].self_attn
    x, tables = torch.randn(1, 3, 64).bfloat16(), (torch.randn(1, 3, 16).bfloat16(),) * 2
    with torch.inference_mode():
        attention(x, tables, None, one=1, other=2)


def _with_hidden_rotation(model: PreTrainedModel) -> None:
    _with_forward(model, _hidden(type(model.model.layers[0].self_attn).forward))


def _with_named_arguments(model: PreTrainedModel) -> None:
    """As if the modules' own file called its function with other arguments."""
    module = types.ModuleType("other")
    file = inspect.getsource(modeling_llama.LlamaAttention.forward)
    call = "apply_rotary_pos_emb(query_states, key_states, cos, sin)"
    assert call in file
    exec(
        textwrap.dedent(file).replace(call, call.replace(" cos, sin", " cos=cos, sin=sin")),
        vars(modeling_llama),
        vars(module),
    )
    _with_forward(model, module.forward)


def _with_other_names(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.precision = module.__dict__.pop("variance_epsilon")
            module.__class__ = _OtherNorms


class _OtherNorms(LlamaRMSNorm):  # type: ignore[misc]
    @property
    def variance_epsilon(self) -> torch.Tensor:
        return torch.tensor(self.precision)


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (_with_hidden_rotation, "rotary embeddings", "LlamaRotaryEmbedding"),
        (_with_named_arguments, "rotary embeddings", "Other"),
        (_with_other_names, "norms", "_OtherNorms"),
    ],
)
def test_a_kind_of_which_no_form_is_known_is_a_warning(
    change: Callable[[PreTrainedModel], None], kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = draw_model("llama3-rope")
    change(model)
    expected = run(model, 9)
    counts = install_fused_kernels(model, lambda: run(model, 5))
    assert counts[kind].replaced == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"no {kind}, because corun does not know the form of {name}" in record.message
    assert f"in transformers {transformers.__version__}" in record.message
    assert torch.equal(run(model, 9), expected)


def test_other_bits_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = draw_model("cohere")
    install_fused_kernels(model, lambda: run(model, 5))
    assert not caplog.records


def test_the_log_says_once_per_class_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    def imprecise(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rotate(*arguments)
        return q * 1.01, k

    model = draw_model("llama3-rope")
    with caplog.at_level(logging.INFO):
        counts = install_fused_kernels(model, lambda: run(model, 5), replace(NUMBA, rotate=imprecise))
    assert counts["rotary embeddings"].replaced == 0
    (line,) = [one.message for one in caplog.records if "LlamaAttention" in one.message]
    assert "2 LlamaAttention keep their own rotary embeddings" in line
    assert re.search(r"inputs of about 1, [\d.]+% of .* by up to \d steps .* at \[0, \d, 0, \d+\]", line)


class _PackedLinear(nn.Module):
    @property
    def weight(self) -> torch.Tensor:
        raise AssertionError("unpacking a model's weights takes long")


def test_no_weight_is_asked_for_but_those_of_norms() -> None:
    model = nn.ModuleList([_PackedLinear(), LlamaRMSNorm(64).bfloat16()])
    assert install_fused_kernels(model, lambda: None)["norms"].replaced == 1


def test_a_feed_forward_knows_its_layout() -> None:
    model = draw_model("phi3")
    install_fused_kernels(model, lambda: run(model, 5))
    assert isinstance(model.model.layers[0].mlp.forward, GateUpGatedMlp)
    model = draw_model("llama3-rope")
    install_fused_kernels(model, lambda: run(model, 5))
    assert isinstance(model.model.layers[0].mlp.forward, FusedGatedMlp)


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [("off", torch.bfloat16, "configured"), ("auto", torch.float32, "they compute bfloat16")],
)
def test_nothing_is_replaced_where_it_is_not_wanted_or_not_served(
    name: str, dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = draw_model("llama3-rope", dtype)
    with caplog.at_level(logging.INFO):
        assert select_fused_kernels(name, model, lambda: run(model, 5)) == "off"
    assert reason in caplog.text
    assert not any("forward" in vars(module) for module in model.modules())
