"""Quantises a model at start and says what it left, and by how much memory grew at most.

Run as ``python -P quantized_start.py int8 DIR``; prints the bytes of all weights, and those of the
peak. ``nf4`` in the place of ``int8``: a checkpoint of bitsandbytes becomes a full model.
"""

import json
import sys
from pathlib import Path

import torch
from corun.gpu.forward.batch import StepContext
from corun.gpu.linear.numba_backend import NumbaLinear
from corun.gpu.linear.quantized import quantize
from corun.gpu.linear.quantized_linear import PackedWeight, QuantizedLinear
from corun.gpu.linear.wrapper import wrap_linears
from corun.gpu.model.quantization import QuantizedLinears
from corun.gpu.model.quantization_plan import Quantization
from corun.gpu.model.source import ModelSource, load_config
from corun.gpu.model.stored_quantization import StoredQuantization
from safetensors.torch import load_file, save_file
from support.four_bit import four_bit_config, quantize_in_four_bits
from transformers import AutoConfig, AutoModelForCausalLM


def save(directory: Path) -> None:
    """200 MiB of float32, nearly all of it in linears."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=96,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def store_in_four_bits(directory: Path) -> None:
    """Store one matrix in the place of all linears of the layers, which are as large."""
    stored, matrix = load_file(directory / "model.safetensors"), torch.randn(1024, 1024)
    found, _ = quantize_in_four_bits("*", matrix.bfloat16())
    for name in [name for name in stored if name.endswith("proj.weight")]:
        del stored[name]
        stored |= {key.replace("*", name): tensor.clone() for key, tensor in found.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = four_bit_config(llm_int8_skip_modules=["lm_head"])
    (directory / "config.json").write_text(json.dumps(config))


def memory_bytes(line: str) -> int:
    """A line of this process's status."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line):
            return int(text.split()[1]) * 1024
    raise KeyError(line)


def main(mode: str, directory: Path) -> None:
    plan = Quantization(8, 8, None)
    save(directory)
    if mode == "nf4":
        plan = Quantization(None, None, StoredQuantization("bitsandbytes"))
        store_in_four_bits(directory)
    packed = PackedWeight.of(quantize(torch.randn(64, 64), 8))
    for warmed in (QuantizedLinear(packed, None), NumbaLinear(torch.randn(64, 64).bfloat16(), None)):
        warmed(torch.randn(3, 64).bfloat16())  # compiles its kernels
    source = ModelSource(str(directory))
    linears = QuantizedLinears(source, load_config(source), plan, None)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_bytes = memory_bytes("VmRSS")
    model = linears.load_rest(torch.bfloat16, torch.device("cpu"), "eager")
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    wrap_linears(model, StepContext(), NumbaLinear, {}, {}, linears.make)
    weights = linears.finish(sizes)
    peak_bytes = memory_bytes("VmHWM") - before_bytes
    sys.stdout.write(f"{weights.num_bytes} {peak_bytes}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
