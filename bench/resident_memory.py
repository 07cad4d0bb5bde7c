"""How much memory does an engine keep for a model, over the bytes of its weights?

Two engines in processes of their own, one with the model and one with a model of a few kilobytes,
each after a start and a first answer; the difference of their resident memory is what the model's
weights take. With and without an output head that is tied to the embedding. The last line is JSON.

    python bench/resident_memory.py
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
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


def serve_and_print(model: str) -> None:
    """In a process of its own: start, answer, print."""
    with Engine(model=model, dtype="bfloat16", memory_gib=0.25, max_model_len=256) as engine:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.generate([list(range(3, 35))], params)
        print(engine.get_model_info().summary[0])
        print(resident_bytes())


def measured_bytes(model: Path) -> int:
    """Resident memory of an engine that serves ``model``."""
    command = [sys.executable, __file__, "--serve", str(model)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(output, end="", flush=True)
    return int(output.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_and_print(arguments.serve)
        return
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    with tempfile.TemporaryDirectory() as directory:
        tiny = llama_config(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        tiny.vocab_size = 96
        save_model(tiny, Path(directory) / "tiny")
        tiny_bytes = measured_bytes(Path(directory) / "tiny")
        for name, is_tied in (("untied", False), ("tied", True)):
            path = Path(directory) / name
            config = llama_config(tie_word_embeddings=is_tied)
            weight_bytes = save_model(config, path) * torch.bfloat16.itemsize
            used_bytes = measured_bytes(path) - tiny_bytes
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
