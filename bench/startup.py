"""How long does ``corun serve`` take from its process's start until it is ready, and with what?

The server process, which computes nothing, must stay small, too: its resident memory when ready.

The first start finds no caches, the later ones those of the first. Everything is the
benchmarks' model of 150 million parameters, with its ten adapters.

Half of a start is Python that is imported, so before each a process imports torch and nothing
else: the control, which tells how fast the machine is just then. Where it varies, later starts
above the bound are inconclusive.

    python bench/startup.py [--starts 5]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from models import make_adapters, make_model
from paired import report, seconds
from serve import free_port

MAX_WARM_START_S = 7.0
MAX_FRONT_MB = 130.0
MAX_CONTROL_RANGE = 1.25  # the slowest control over the fastest
_TIMEOUT_S = 180.0
_POLL_S = 0.005
# What begins with the first line of the log that contains the text.
_STAGES = (
    ("importing torch", "engine imports"),
    ("reading the tokenizer", "tokenizer"),
    ("loading ", "weights"),
    ("choosing and compiling", "kernels, packing"),
    ("parity probe)", "parity probe"),
    ("at adapter 1 ", "adapters"),
    ("serving ", "answer"),
)


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds until ready, by stage, and what was said of compilation."""

    ready_s: float
    front_mb: float  # resident in the server process
    stages_s: dict[str, float]
    compiled: tuple[str, ...]


def import_torch(environment: Mapping[str, str]) -> None:
    """The control."""
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)


def judge(warm_s: Sequence[float], controls_s: Sequence[float]) -> bool | None:
    """Whether every later start is within the bound; None = the machine varied too much to say."""
    if max(warm_s) < MAX_WARM_START_S:
        return True
    return None if max(controls_s) > MAX_CONTROL_RANGE * min(controls_s) else False


def start_once(model: Path, lora_dir: Path, environment: Mapping[str, str]) -> Start:
    """Start a server, wait until it is ready, and stop it."""
    port = free_port()
    command = [
        sys.executable, "-m", "corun.runtime.cli", "serve", str(model), "--lora-dir",
        str(lora_dir), "--port", str(port),
    ]  # fmt: skip
    start_s = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read, args=(process, lines))
    reader.start()
    try:
        while not _is_ready(f"http://127.0.0.1:{port}/ready"):
            if process.poll() is not None or time.perf_counter() - start_s > _TIMEOUT_S:
                raise RuntimeError("\n".join(line for _, line in lines))
            time.sleep(_POLL_S)
        ready_s = time.perf_counter() - start_s
        front_mb = psutil.Process(process.pid).memory_info().rss / 1e6
    finally:
        process.terminate()
        process.wait(timeout=30)
        reader.join()
    told = [(when_s - start_s, line) for when_s, line in lines]
    compiled = tuple(line.partition(": ")[2] for _, line in told if "compil" in line)
    return Start(ready_s, front_mb, _stages(told, ready_s), compiled)


def _read(process: "subprocess.Popen[str]", lines: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.append((time.perf_counter(), line.rstrip()))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 -- our own
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def _stages(told: list[tuple[float, str]], ready_s: float) -> dict[str, float]:
    """Seconds from one stage's first line to the next's; the first one is what comes before."""
    begins = [("processes", 0.0)]
    for text, name in _STAGES:
        when = next((when for when, line in told if text in line), None)
        if when is not None:
            begins.append((name, when))
    ends = [when for _, when in begins[1:]] + [ready_s]
    pairs = zip(begins, ends, strict=True)
    return {name: round(max(0.0, end - begin), 2) for (name, begin), end in pairs}


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5, help="starts with compiled kernels")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model")
        lora_dir = Path(directory) / "adapters"
        make_adapters(model, lora_dir)
        environment = os.environ | {
            "NUMBA_CACHE_DIR": f"{directory}/numba", "TRITON_CACHE_DIR": f"{directory}/triton",
        }  # fmt: skip
        # An installed package has its bytecode, one that is imported from a checkout keeps it.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        starts, controls_s = [], []
        for number in range(1 + arguments.starts):
            controls_s.append(seconds(lambda: import_torch(environment)))
            starts.append(start_once(model, lora_dir, environment))
            print(f"start {number + 1}: {starts[-1].ready_s:.2f} s; importing torch alone: "
                  f"{controls_s[-1]:.2f} s", flush=True)  # fmt: skip
    first, *later = starts
    warm_s = [start.ready_s for start in later]
    stages_s = {
        name: statistics.median(start.stages_s[name] for start in later)
        for name in later[0].stages_s
    }
    front_mb = [round(start.front_mb, 1) for start in starts]
    figures = {
        "first_s": round(first.ready_s, 2),
        "first_stages_s": first.stages_s,
        "first_said": first.compiled,
        "later_s": [round(value, 2) for value in warm_s],
        "importing_torch_s": [round(value, 2) for value in controls_s[1:]],
        "later_stages_s": stages_s,
        "server_process_mb": front_mb,
    }
    bounds = {
        f"every later start takes < {MAX_WARM_START_S} s": judge(warm_s, controls_s[1:]),
        f"the server process holds at most {MAX_FRONT_MB} MB": max(front_mb) <= MAX_FRONT_MB,
    }
    report("startup", {"model": "llama-150m bf16", "adapters": 10}, figures, bounds)


if __name__ == "__main__":
    main()
