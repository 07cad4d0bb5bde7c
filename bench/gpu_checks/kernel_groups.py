"""The settings that ``gpu_kernels`` measures, in groups that each run in a process of their own.

On the CPU the torch back ends stand in, at tiny sizes, to run the control flow.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from corun.gpu.attention.base import AttentionBackend
from corun.gpu.lora.base import LoraBackend
from corun.gpu.lora.table import LoraTable

from gpu_checks.attention_rows import LLAMA_8B, TINY, measure_attention
from gpu_checks.ceilings import copy_gb_per_s, matrix_tflops
from gpu_checks.figures import Figures
from gpu_checks.kernel_timing import Measured, make_row
from gpu_checks.lora_rows import LoraShape, Segment, measure_lora

Setting = tuple[dict[str, Any], Callable[[], Measured]]

_MIXED_RANKS = (8, 16, 32, 64, 128)
# Llama 8B: q and o, k and v, gate and up, down.
_LINEARS = (
    LoraShape(4096, 4096), LoraShape(4096, 1024), LoraShape(4096, 14336), LoraShape(14336, 4096),
)  # fmt: skip
_TINY_LINEARS = (LoraShape(64, 48, min_weight_bytes=1),)


def run_group(name: str, kind: str, limit_s: float, figures: Figures) -> None:
    """Measure one group, row by row; what the time does not allow is named."""
    end_s = time.monotonic() + limit_s
    device = torch.device("cpu" if kind == "cpu" else "cuda")
    # The references are float32 products, not tf32's, whatever the machine is set to.
    torch.set_float32_matmul_precision("highest")
    ceilings: dict[str, float | None] = {"copy_gb_per_s": None, "matrix_tflops": None}
    if device.type == "cuda":
        ceilings = {
            "copy_gb_per_s": copy_gb_per_s(2 << 30, device),
            "matrix_tflops": matrix_tflops(8192, device),
        }
    figures.put("ceilings", ceilings)
    left_out = []
    for setting, work in _GROUPS[name](device):
        if time.monotonic() > end_s:
            left_out.append(setting)
            continue
        figures.add("rows", make_row(name, setting, work(), **ceilings))
    figures.put("left_out", left_out)


def _attention_backend(device: torch.device) -> AttentionBackend:
    if device.type == "cpu":
        from corun.gpu.attention.torch_backend import TorchAttention

        return TorchAttention()
    from corun.gpu.attention.triton_backend import TritonAttention

    return TritonAttention()


def _make_lora(table: LoraTable) -> LoraBackend:
    if table.device.type == "cpu":
        from corun.gpu.lora.torch_backend import TorchLora

        return TorchLora(table, dtype=torch.bfloat16)
    from corun.gpu.lora.triton_backend import TritonLora

    return TritonLora(table, dtype=torch.bfloat16)


def _attention_decode(device: torch.device) -> Iterator[Setting]:
    is_tiny = device.type == "cpu"
    shape, backend = TINY if is_tiny else LLAMA_8B, _attention_backend(device)
    contexts = (17, 40) if is_tiny else (128, 512, 1024, 2048, 4096)
    for context in contexts:
        for batch in (1, 3) if is_tiny else (1, 4, 16, 64):
            rows = [(1, context)] * batch
            setting = {"batch": batch, "context_tokens": context}
            yield setting, partial(measure_attention, backend, shape, rows, device)


def _attention_prefill(device: torch.device) -> Iterator[Setting]:
    is_tiny = device.type == "cpu"
    shape, backend = TINY if is_tiny else LLAMA_8B, _attention_backend(device)
    chunks = (
        ((8, 8), (8, 24)) if is_tiny
        else ((128, 128), (512, 512), (512, 2048), (512, 4096), (2048, 2048), (2048, 4096))
    )  # fmt: skip
    for num_queries, context in chunks:
        for batch in (1, 2) if is_tiny else (1, 4):
            rows = [(num_queries, context)] * batch
            setting = {
                "batch": batch, "chunk_tokens": num_queries, "context_tokens": context,
            }  # fmt: skip
            yield setting, partial(measure_attention, backend, shape, rows, device)


def _lora_decode(device: torch.device) -> Iterator[Setting]:
    is_tiny = device.type == "cpu"
    for batch in (1, 3) if is_tiny else (1, 8, 32, 64):
        ranks = [_MIXED_RANKS[index % len(_MIXED_RANKS)] for index in range(batch)]
        for shape in _TINY_LINEARS if is_tiny else _LINEARS:
            segments = [Segment(1, rank) for rank in ranks]
            setting = {"batch": batch, "sum_of_ranks": sum(ranks), "max_rank": max(ranks)}
            setting |= _described(shape)
            yield setting, partial(measure_lora, _make_lora, shape, segments, device)


def _lora_prefill(device: torch.device) -> Iterator[Setting]:
    is_tiny = device.type == "cpu"
    batches = (
        ((9, (8,)), (20, (8, 3))) if is_tiny
        else ((512, (16,)), (512, (64,)), (2048, (16,)), (2048, (64,)), (512, (8, 16, 64, 128)))
    )  # fmt: skip
    for num_tokens, ranks in batches:
        for shape in _TINY_LINEARS if is_tiny else _LINEARS:
            segments = [Segment(num_tokens, rank) for rank in ranks]
            setting = {
                "segment_tokens": num_tokens, "ranks": list(ranks), **_described(shape),
            }  # fmt: skip
            yield setting, partial(measure_lora, _make_lora, shape, segments, device)


def _described(shape: LoraShape) -> dict[str, int]:
    return {"in_features": shape.in_features, "out_features": shape.out_features}


_GROUPS: dict[str, Callable[[torch.device], Iterator[Setting]]] = {
    "attention decode": _attention_decode,
    "attention prefill": _attention_prefill,
    "LoRA decode": _lora_decode,
    "LoRA prefill": _lora_prefill,
}
