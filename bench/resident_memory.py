"""How much memory does a model take in an engine, relative to the bytes of its weights?

Two engines in processes of their own, one with the model and one with a model of a few kilobytes,
each after a start and a first answer. The difference of their resident memory is that of the
model's weights. With and without an output head that is tied to the embedding.

And how much memory do the processes of ``corun serve`` use beside the weights, when ready and after
a load of ten adapters? Pages that several processes share count in part for each (PSS), so run it
where no other process uses torch. The last line is JSON.

    python bench/resident_memory.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from corun import Engine, SamplingParams
from models import llama_config, make_adapters, save_model
from paired import report
from serve import corun_server

MAX_OVER_WEIGHTS = 1.2
MAX_BESIDE_READY_MIB = 350  # weights
MAX_BESIDE_LOADED_MIB = 100  # when ready, KV and adapters
_QUANTIZATIONS = ("none", "int8", "int4")
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
    arguments = {"model": str(model), **{name: str(value) for name, value in options.items()}}
    command = [sys.executable, __file__, "--serve", json.dumps(arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(output, end="", flush=True)
    resident, held = output.split()[-2:]
    return Memory(int(resident), int(held))


@dataclass(frozen=True, slots=True)
class Served:
    """What the processes of a server hold, in MiB."""

    weights: float
    ready: float
    after_load: float
    kv_and_adapters: float  # after the load

    @property
    def beside_ready(self) -> float:
        """Beside the weights, when ready."""
        return self.ready - self.weights

    @property
    def beside_loaded(self) -> float:
        """Beside what was there when ready, KV and adapters."""
        return self.after_load - self.ready - self.kv_and_adapters


def serve(model: Path, adapters: Path, quantization: str) -> Served:
    """Start a server, ask each adapter three times, and look before and after."""
    options = ["--device", "cpu", "--memory-gib", "1.5", "--watch-lora-dir", "off"]
    options += [] if quantization == "none" else ["--quantization", quantization]
    names = [path.name for path in sorted(adapters.iterdir())]
    with corun_server(model, adapters, *options, preloaded=()) as (host, port, pid):
        url = f"http://{host}:{port}"
        ready_bytes = _shared_out_bytes(pid)
        for name in names * 3:
            body = {"model": name, "prompt": list(range(3, 131)), "max_tokens": 32}
            httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
        used = _memory_bytes(httpx.get(f"{url}/metrics").text)
        loaded_bytes = _shared_out_bytes(pid)
    kind = None if quantization == "none" else quantization
    with Engine(model=str(model), device="cpu", memory_gib=0.25, quantization=kind) as engine:
        weight_bytes = engine.get_model_info().weight_bytes
    return Served(*(value / _MIB for value in (weight_bytes, ready_bytes, loaded_bytes, used)))


def _shared_out_bytes(pid: int) -> int:
    """PSS of a process and its children."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(int(one.memory_full_info().pss) for one in processes)


def _memory_bytes(metrics: str) -> float:
    """KV of requests that run or have ended, and adapters."""
    kinds = ('kind="running_kv"', 'kind="history_kv"', 'kind="adapters"')
    lines = [line for line in metrics.splitlines() if line.startswith("corun:memory_bytes{")]
    on_device = [line for line in lines if 'level="device"' in line]
    return sum(float(line.split()[-1]) for line in on_device if any(k in line for k in kinds))


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
        adapters = Path(directory) / "adapters"
        make_adapters(Path(directory) / "untied", adapters)
        for quantization in _QUANTIZATIONS:
            served = serve(Path(directory) / "untied", adapters, quantization)
            figures[f"served, {quantization}"] = asdict(served)
            print(f"served, {quantization}: {served}", flush=True)
            bounds[f"served, {quantization}: weights + {MAX_BESIDE_READY_MIB} MiB when ready"] = (
                served.beside_ready <= MAX_BESIDE_READY_MIB
            )
            bounds[f"served, {quantization}: {MAX_BESIDE_LOADED_MIB} MiB more after a load"] = (
                served.beside_loaded <= MAX_BESIDE_LOADED_MIB
            )
    report("resident_memory", {"model": "llama-150m bf16"}, figures, bounds)


if __name__ == "__main__":
    main()
