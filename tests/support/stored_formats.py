"""Models with linears or experts as published checkpoints quantise them, and what they represent.

Written element by element, as the formats are described; the nearest code of each weight.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from corun.gpu.model import quantization_plan
from safetensors.torch import load_file, save_file
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

Tensors = dict[str, torch.Tensor]
_BLOCK = 32
_LARGEST_FLOAT = 448.0  # of 8 bits, e4m3
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _fp8(matrix: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Codes, scales [blocks of rows, blocks of columns], values."""
    out, width = matrix.shape
    padded = torch.zeros(-(-out // rows) * rows, -(-width // columns) * columns)
    padded[:out, :width] = matrix
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / _LARGEST_FLOAT
    of_each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :width]
    codes = (matrix / of_each).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * of_each


def _fp8_blocks(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, dense = _fp8(matrix, _BLOCK, _BLOCK)
    return {"weight": codes, "weight_scale_inv": scales}, dense


def _fp8_whole(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, dense = _fp8(matrix, *matrix.shape)
    one = scales.squeeze()
    return {"weight": codes, "weight_scale_inv": one, "activation_scale": one.clone()}, dense


def _fp8_rows(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, dense = _fp8(matrix, 1, matrix.shape[1])
    return {"weight": codes, "weight_scale": scales}, dense


def _int8_rows(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = matrix.abs().amax(1, keepdim=True) / 127
    codes = (matrix / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes * scales


def _bitsandbytes(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = matrix.abs().amax(1)
    codes = (matrix * 127 / largest[:, None]).round().to(torch.int8)
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0).byte()}
    return stored, codes * largest[:, None] * (1 / 127)


def _words(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """[a, b] -> int32 [a, b * bits / 32], the first in the lowest bits."""
    fields = codes.long().unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    words = fields.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _groups(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes of 4 bits, scales and zero points of groups of 32, values."""
    blocks = matrix.unflatten(1, (-1, _BLOCK))
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = ((high - low).clamp(min=1e-6) / 15).bfloat16().float()
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (blocks / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    dense = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1), scales, zeros, dense.flatten(1)


def _symmetric_groups(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same in 8 bits, with zero points of 128."""
    blocks = matrix.unflatten(1, (-1, _BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=1e-6) / 127
    codes = (blocks / scales[..., None]).round()
    dense = codes * scales[..., None]
    return (codes + 128).flatten(1), scales, torch.full_like(scales, 128), dense.flatten(1)


def _packed(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, dense = _groups(matrix)
    return {
        "weight_packed": _words(codes),
        "weight_scale": scales,
        "weight_zero_point": _words(zeros.T).T,
        "weight_shape": torch.tensor(matrix.shape),
    }, dense


def _act_order(matrix: torch.Tensor, bits: int = 4) -> tuple[Tensors, torch.Tensor]:
    order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(0))
    in_groups = _groups if bits == 4 else _symmetric_groups
    codes, scales, zeros, dense = in_groups(matrix[:, order])
    back = order.argsort()
    return {
        "qweight": _words(codes[:, back], bits).T,
        "qzeros": _words((zeros - 1).T, bits),
        "scales": scales.T,
        "g_idx": (torch.arange(matrix.shape[1]) // _BLOCK)[back].int(),
    }, dense[:, back]


def _awq(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, dense = _groups(matrix)

    def words(values: torch.Tensor) -> torch.Tensor:  # the even ones of eight before the odd ones
        return _words(values.unflatten(1, (-1, 4, 2)).transpose(2, 3).flatten(1))

    return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T}, dense


def _mxfp4_linear(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    stored, dense = _experts(matrix.T[None])
    codes, exponents = stored["_blocks"][0], stored["_scales"][0]
    return {"weight_packed": codes.flatten(1), "weight_scale": exponents}, dense[0].T


def _experts(matrices: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Of gpt-oss: [experts, in, out]."""
    blocks = matrices.transpose(1, 2).unflatten(2, (-1, _BLOCK))
    exponents = blocks.abs().amax(-1).clamp(min=1e-6).log2().floor() - 2
    scaled = blocks * torch.exp2(-exponents)[..., None]
    codes = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    dense = _E2M1[codes] * scaled.sign() * torch.exp2(exponents)[..., None]
    codes += 8 * (scaled < 0)
    stored = {
        "_blocks": (codes[..., ::2] + 16 * codes[..., 1::2]).byte(),
        "_scales": (exponents + 127).byte(),
    }
    return stored, dense.flatten(2).transpose(1, 2)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


Write = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
FORMATS: dict[str, tuple[Write, dict[str, Any]]] = {
    "fp8 blocks": (_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}),
    "fp8": (_fp8_whole, {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}),
    "compressed fp8": (
        _fp8_rows,
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "compressed int8": (_int8_rows, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "compressed int4": (
        _packed,
        _compressed(
            "pack-quantized", num_bits=4, type="int", strategy="group", symmetric=False, group_size=_BLOCK
        ),
    ),
    "bitsandbytes int8": (_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "gptq act-order": (
        _act_order,
        {"quant_method": "gptq", "bits": 4, "group_size": _BLOCK, "desc_act": True, "sym": False},
    ),
    "gptq act-order, 8 bits": (
        partial(_act_order, bits=8),
        {"quant_method": "gptq", "bits": 8, "group_size": _BLOCK, "desc_act": True, "sym": True},
    ),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": _BLOCK, "version": "gemm"}),
    "mxfp4": (_experts, {"quant_method": "mxfp4"}),
    "compressed mxfp4": (
        _mxfp4_linear,
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=_BLOCK),
    ),
}


def store_in(form: str, directory: Path, target: Path) -> Path:
    """Write a copy of a model in a format to ``target``, and dequantised again to ``directory``.

    Embeddings, heads, norms and routers stay as they are.
    """
    write, config_entry = FORMATS[form]
    shutil.copytree(directory, target)
    file = directory / "model.safetensors"
    full, stored = load_file(file), {}
    for name, tensor in list(full.items()):
        path = name.rpartition(".")[0]
        stays = any(one in name for one in ("embed", "lm_head", "router", "mlp.gate."))
        is_expert = form == "mxfp4"
        if stays or tensor.ndim != (3 if is_expert else 2):
            stored[name] = tensor
            continue
        parts, dense = write(tensor)
        full[name] = dense.contiguous()
        before = name if is_expert else f"{path}."
        stored |= {f"{before}{end}": one.contiguous() for end, one in parts.items()}
    save_file(full, file, metadata={"format": "pt"})
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = config_entry
    (target / "config.json").write_text(json.dumps(config))
    return target


@contextmanager
def fp8_modules(product: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let transformers make its modules of fp8 without a GPU; ``product`` stands for their kernels.

    product: of x, codes, scales, rows and columns of a scale, bias.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(quantization_plan.MODULE_PACKAGES, fp8=()))
        for place, name, stand_in in (
            (FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None),
            (finegrained_fp8, "fp8_linear", product),
        ):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        yield
