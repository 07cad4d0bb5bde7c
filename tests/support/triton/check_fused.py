"""Puts the Triton kernels between products into models, and runs these; to be run as a program.

``python -m support.triton.check_fused cpu|cuda ARCHITECTURE...``, where ``other`` is a Llama some
modules of which compute something else. On the CPU TRITON_INTERPRET=1 must be set before Triton is
imported, and the models are in float16, because the interpreter computes bfloat16 wrongly. Prints
one JSON object: for each architecture how many modules of each kind were ``replaced``, errors of
logits relative to the largest, without a KV pool (``plain``) and with one (``paged``), and the
``launches`` of a pass by kernel.
"""

import json
import sys
from collections import Counter
from typing import Any
from unittest import mock

import torch
from corun.gpu.attention.triton_backend import TritonAttention
from corun.gpu.execution.runner import ModelRunner
from corun.gpu.forward.batch import StepContext
from corun.gpu.forward.triton_launch import KernelLauncher
from corun.gpu.fused import install
from corun.gpu.fused.install import install_fused_kernels, triton_kernels
from corun.gpu.model.attention_hook import PagedAttentionHook
from corun.gpu.model.kv_pool import KvLayout, KvPool
from corun.gpu.model.probe import ProbeRow, layer_shapes, record_attention
from support.architectures import make_model
from transformers import PreTrainedModel

_FIRST, _SECOND = tuple(range(3, 9)), tuple(range(40, 42))


def _counting(launches: Counter[str]) -> Any:
    """Counts launches by kernel."""
    launch = KernelLauncher.__call__

    def counted(launcher: KernelLauncher, *arguments: Any, **constants: Any) -> None:
        launches[launcher.kernel.fn.__name__] += 1
        launch(launcher, *arguments, **constants)

    return mock.patch.object(KernelLauncher, "__call__", counted)


def _with_other_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Its first layer doubles what is not a tensor and has another norm, its second a rotation."""
    first, second = model.model.layers
    own_norm, own_layer = type(first.input_layernorm), type(first)
    own_attention = type(second.self_attn)

    class Norm(own_norm):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * 1.01

    class Layer(own_layer):  # type: ignore[misc,valid-type]
        def forward(self, hidden: Any, *arguments: Any, **named: Any) -> Any:
            result = super().forward(hidden, *arguments, **named)
            return result if isinstance(hidden, torch.Tensor) else result + result

    class Attention(own_attention):  # type: ignore[misc,valid-type]
        def forward(self, *arguments: Any, **named: Any) -> Any:
            return super().forward(*arguments, **named)

    first.input_layernorm.__class__, first.__class__ = Norm, Layer
    second.self_attn.__class__ = Attention
    return model


def make_runner(model: PreTrainedModel) -> tuple[PagedAttentionHook, ModelRunner]:
    """Put Triton's attention and a pool into a model; its own modules stay."""
    context = StepContext()
    hook = PagedAttentionHook(context)
    model.set_attn_implementation(hook.name)
    shapes = layer_shapes(record_attention(model, hook))
    pool = KvPool(KvLayout(shapes, 2, model.dtype), 8, model.device)
    hook.attach(TritonAttention(), pool)
    return hook, ModelRunner(model, context, pool)


def _run_packed(runner: ModelRunner) -> torch.Tensor:
    """Two prompts, one of them in two chunks, then a token of each; logits [2, vocabulary]."""
    cut = len(_FIRST) // 2
    runner.probe_step([ProbeRow(0, 0, _FIRST[:cut]), ProbeRow(1, 0, _SECOND[:-1])])
    runner.probe_step([ProbeRow(0, cut, _FIRST[cut:-1])])
    rows = [ProbeRow(i, len(one) - 1, one[-1:]) for i, one in enumerate((_FIRST, _SECOND))]
    return runner.probe_step(rows)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max())


@torch.inference_mode()
def check(architecture: str, device: torch.device) -> dict[str, Any]:
    """Compare with the model's own modules."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    model = make_model("llama3-rope" if architecture == "other" else architecture)
    if architecture == "other":
        model = _with_other_modules(model)
    model = model.to(device, dtype)

    model.set_attn_implementation("eager")

    def last_logits() -> torch.Tensor:
        return torch.stack(
            [model(input_ids=torch.tensor([one], device=device)).logits[0, -1] for one in (_FIRST, _SECOND)]
        )

    expected = last_logits()
    hook, runner = make_runner(model)
    kernels = triton_kernels(dtype, device)
    counts = install_fused_kernels(model, lambda: record_attention(model, hook), kernels)
    launches: Counter[str] = Counter()
    paged = _run_packed(runner)
    with _counting(launches):
        runner.probe_step([ProbeRow(0, 0, _FIRST[:1])])
    model.set_attn_implementation("eager")
    return {
        "replaced": [kind.replaced for kind in counts.values()],
        "plain": _error(last_logits(), expected),
        "paged": _error(paged, expected),
        "launches": launches,
    }


def main(device: str, *architectures: str) -> None:
    """Print what is found, by architecture."""
    install._NUM_TOKENS = (1, 2)  # the interpreter takes long for many
    found = {name: check(name, torch.device(device)) for name in architectures}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
