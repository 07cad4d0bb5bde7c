"""How long does ``corun serve`` take from the start of its process until it is ready?

The resident memory of the server process, which computes nothing, has a bound, too.

The first start finds no caches, the later ones those of the first. The model is the benchmarks' of
150 million parameters with its ten adapters, or that of 1 billion, or the packaged demo.

Half of a start is imports of Python modules, so before each start a process imports only torch: the
control, which shows the machine's current speed. If it varies, later starts above the bound are
inconclusive. Processor time of the server and its engine depends less on other load.

With ``--adapters N`` it has N of 20 MB each instead, which must be listed, and one of them must
answer, within 2 s of the model being ready: at start only their headers are read.

    python bench/startup.py [--starts 5] [--model demo|150m|1b] [--quantization int8] [--adapters 500]
"""

import argparse
import json
import os
import shutil
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
from corun.runtime.demo import demo_adapters_path, demo_model_path
from models import ATTENTION_TARGETS, SIZES, make_adapters, save_adapter, save_model
from paired import report, seconds
from serve import free_port
from transformers import LlamaConfig

_DEMO = "demo"
MAX_WARM_START_S = {_DEMO: 3.5, "tiny": 3.5, "150m": 7.0, "1b": 5.0}  # beside reading the weights' files
MAX_FRONT_MB = 130.0
MAX_ADAPTERS_S = 2.0  # from the model being ready until all adapters are listed and one answers
MAX_CONTROL_RANGE = 1.25  # the slowest control over the fastest
_LARGE_RANK = 128  # 20 MB on q, k, v and o of this model
_TIMEOUT_S = 180.0
_READ_BYTES = 2**20
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
    cpu_s: float  # of all its processes until then
    front_mb: float  # resident in the server process
    stages_s: dict[str, float]
    compiled: tuple[str, ...]
    first_answer_s: float  # of the adapter that is last by name, which is unused before

    @property
    def adapters_s(self) -> float:
        """From the model being ready until all adapters are listed, and one has answered."""
        return self.stages_s.get("adapters", 0.0) + self.stages_s["answer"] + self.first_answer_s


def import_torch(environment: Mapping[str, str]) -> None:
    """The control."""
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)


def judge(warm_s: Sequence[float], controls_s: Sequence[float], most_s: float) -> bool | None:
    """Whether every later start is within the bound; None = the machine varied too much to say."""
    if max(warm_s) < most_s:
        return True
    return None if max(controls_s) > MAX_CONTROL_RANGE * min(controls_s) else False


def start_once(
    model: Path, lora_dir: Path, environment: Mapping[str, str], *options: str, last_said: str = ""
) -> Start:
    """Start a server, wait until it is ready and has said ``last_said``, and stop it."""
    port = free_port()
    command = [
        sys.executable,
        *"-m corun.runtime.cli serve".split(),
        str(model),
        *("--lora-dir", str(lora_dir)),
        *("--port", str(port)),
        *options,
    ]
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
        server = psutil.Process(process.pid)
        times = [one.cpu_times() for one in (server, *server.children(recursive=True))]
        cpu_s, front_mb = sum(one.user + one.system for one in times), server.memory_info().rss / 1e6
        first_answer_s = seconds(lambda: _ask_last(f"http://127.0.0.1:{port}", lora_dir))
        while not any(last_said in line for _, line in lines):
            if time.perf_counter() - start_s > _TIMEOUT_S:
                raise RuntimeError(f"the server has not said {last_said!r}")
            time.sleep(_POLL_S)
    finally:
        process.terminate()
        process.wait(timeout=30)
        reader.join()
    stamped = [(when_s - start_s, line) for when_s, line in lines]
    compiled = tuple(line.partition(": ")[2] for _, line in stamped if "compil" in line)
    return Start(ready_s, cpu_s, front_mb, _stages(stamped, ready_s), compiled, first_answer_s)


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


def _ask_last(url: str, lora_dir: Path) -> None:
    """See that all adapters are listed, and ask the last. Raises ``RuntimeError`` if one is not."""
    names = sorted(path.name for path in lora_dir.iterdir() if path.is_dir())
    with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:  # noqa: S310 -- our own
        listed = {one["id"] for one in json.load(answer)["data"]}
    if missing := set(names) - listed:
        raise RuntimeError(f"{len(missing)} adapters are not listed, among them {min(missing)}")
    body = json.dumps({"model": names[-1], "prompt": "t1 t2", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 -- our own
        answer.read()


def _make_large_adapters(model: Path, directory: Path, number: int) -> None:
    """Copies of one."""
    first = directory / "adapter-0000"
    config = LlamaConfig.from_pretrained(model)
    save_adapter(first, config, _LARGE_RANK, ATTENTION_TARGETS, seed=0)
    for index in range(1, number):
        shutil.copytree(first, directory / f"adapter-{index:04}")


def _read_weights(model: Path) -> None:
    """Read the files of the weights once, which the page cache has."""
    for path in model.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass


def _stages(stamped: list[tuple[float, str]], ready_s: float) -> dict[str, float]:
    """Seconds from one stage's first line to the next's; the first one is what comes before."""
    begins = [("processes", 0.0)]
    for text, name in _STAGES:
        when = next((when for when, line in stamped if text in line), None)
        if when is not None:
            begins.append((name, when))
    ends = [when for _, when in begins[1:]] + [ready_s]
    pairs = zip(begins, ends, strict=True)
    return {name: round(max(0.0, end - begin), 2) for (name, begin), end in pairs}


def make_files(name: str, directory: Path, num_adapters: int | None) -> tuple[Path, Path]:
    """Make what is served, or find the demo: the model's directory and the adapters'."""
    if name == _DEMO:
        return demo_model_path(), demo_adapters_path()
    model, lora_dir = directory / "model", directory / "adapters"
    save_model(SIZES[name], model)
    if num_adapters is None:
        make_adapters(model, lora_dir)
    else:
        _make_large_adapters(model, lora_dir, num_adapters)
    return model, lora_dir


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5, help="starts with compiled kernels")
    parser.add_argument("--model", choices=(_DEMO, *SIZES), default="150m")
    parser.add_argument("--quantization", help="of the weights; default: bfloat16")
    parser.add_argument(
        "--adapters", type=int, help="this number of adapters of 20 MB, instead of ten of all ranks"
    )
    return parser.parse_args()


def main() -> None:
    """Read the options and measure."""
    arguments = _arguments()
    options = () if arguments.quantization is None else ("--quantization", arguments.quantization)
    with tempfile.TemporaryDirectory() as directory:
        model, lora_dir = make_files(arguments.model, Path(directory), arguments.adapters)
        environment = os.environ | {
            "NUMBA_CACHE_DIR": f"{directory}/numba",
            "TRITON_CACHE_DIR": f"{directory}/triton",
            "XDG_CACHE_HOME": f"{directory}/cache",
            "XDG_STATE_HOME": f"{directory}/state",
        }
        # An installed package has its bytecode, one that is imported from a checkout keeps it.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        starts, controls_s = [], []
        for number in range(1 + arguments.starts):
            controls_s.append(seconds(lambda: import_torch(environment)))
            starts.append(start_once(model, lora_dir, environment, *options))
            print(
                f"start {number + 1}: {starts[-1].ready_s:.2f} s; importing torch alone: "
                f"{controls_s[-1]:.2f} s",
                flush=True,
            )
        reading_s = seconds(lambda: _read_weights(model))
    first, *later = starts
    most_s = MAX_WARM_START_S[arguments.model] + reading_s
    warm_s = [start.ready_s for start in later]
    stages_s = {
        name: statistics.median(start.stages_s.get(name, 0.0) for start in later)
        for name in later[0].stages_s
    }
    front_mb = [round(start.front_mb, 1) for start in starts]
    figures = {
        "first_s": round(first.ready_s, 2),
        "first_stages_s": first.stages_s,
        "first_said": first.compiled,
        "later_s": [round(value, 2) for value in warm_s],
        "later_cpu_s": [round(start.cpu_s, 2) for start in later],
        "later_median_s": round(statistics.median(warm_s), 2),
        "reading_s": round(reading_s, 2),
        "importing_torch_s": [round(value, 2) for value in controls_s[1:]],
        "later_stages_s": stages_s,
        "server_process_mb": front_mb,
        "adapters_s": [round(start.adapters_s, 2) for start in later],
    }
    bounds = {
        f"adapters are listed and one answers within {MAX_ADAPTERS_S} s of the model being ready": (
            max(start.adapters_s for start in later) <= MAX_ADAPTERS_S
        ),
        f"every later start takes < {most_s:.1f} s": judge(warm_s, controls_s[1:], most_s),
        f"the server process holds at most {MAX_FRONT_MB} MB": max(front_mb) <= MAX_FRONT_MB,
    }
    workload = {name: getattr(arguments, name) for name in ("model", "quantization", "adapters")}
    report("startup", workload, figures, bounds)


if __name__ == "__main__":
    main()
