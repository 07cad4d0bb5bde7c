"""How much memory does an engine keep for a model, over the bytes of its weights?

Two engines in processes of their own, one with the model and one with a model of a few kilobytes,
each after a start and a first answer; the difference of their resident memory is what the model's
weights take. With and without an output head that is tied to the embedding. The last line is JSON.

    python bench/resident_memory.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun import Engine, SamplingParams
from models import llama_config, save_model
from paired import report

MAX_OVER_WEIGHTS = 1.2
_MIB = 2**20


def resident_bytes() -> int:
    """Memory of this process that is in the machine's memory, of files too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell VmRSS")


@dataclass(frozen=True, slots=True)
class Memory:
    """What an engine has in memory, and what of it are weights and adapters."""

    resident_bytes: int
    held_bytes: int


def serve_and_print(options: dict[str, Any]) -> None:
    """In a process of its own: start, answer, print."""
    if "lora_dir" in options:
        options["preload"] = ("all",)
    with Engine(dtype="bfloat16", memory_gib=0.25, max_model_len=256, **options) as engine:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.generate([list(range(3, 35))], params)
        info = engine.get_model_info()
        print(info.summary[0])
        adapter_bytes = sum(adapter.num_bytes for adapter in engine.list_loras())
        print(resident_bytes(), info.weight_bytes + adapter_bytes)


def measured_memory(model: Path, **options: Any) -> Memory:
    """Of an engine that serves ``model``."""
    told = {"model": str(model), **{name: str(value) for name, value in options.items()}}
    command = [sys.executable, __file__, "--serve", json.dumps(told)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(output, end="", flush=True)
    resident, held = output.split()[-2:]
    return Memory(int(resident), int(held))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", metavar="OPTIONS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_and_print(json.loads(arguments.serve))
        return
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    with tempfile.TemporaryDirectory() as directory:
        tiny = llama_config(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        tiny.vocab_size = 96
        save_model(tiny, Path(directory) / "tiny")
        tiny_bytes = measured_memory(Path(directory) / "tiny").resident_bytes
        for name, is_tied in (("untied", False), ("tied", True)):
            path = Path(directory) / name
            config = llama_config(tie_word_embeddings=is_tied)
            save_model(config, path)
            memory = measured_memory(path)
            weight_bytes, used_bytes = memory.held_bytes, memory.resident_bytes - tiny_bytes
            figures[name] = {
                "weights_mib": round(weight_bytes / _MIB, 1),
                "resident_mib": round(used_bytes / _MIB, 1),
                "over_weights": round(used_bytes / weight_bytes, 3),
            }
            bounds[f"{name}: at most {MAX_OVER_WEIGHTS} x the weights"] = (
                used_bytes <= MAX_OVER_WEIGHTS * weight_bytes
            )
            print(f"{name}: {figures[name]}", flush=True)
    report("resident_memory", {"model": "llama-150m bf16"}, figures, bounds)


if __name__ == "__main__":
    main()
