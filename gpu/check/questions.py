"""The questions to a GPU, and what one process does to answer one of them. Loads no torch by itself."""

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...runtime.config.environment import MAX_CONNECTIONS

# How questions and peers are started, each in a process of its own.
PROGRAM = (sys.executable, "-m", "corun.gpu.check")
GRACE_S = 20.0  # for a process to import before its question, and to close after it


class Findings:
    """What a question has found so far, in a file: a killed question leaves its figures."""

    def __init__(self, path: Path, *, is_shown: bool = True) -> None:
        self._path = path
        self._is_shown = is_shown
        self.values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Keep a figure, and show it."""
        self.values[name] = value
        if self._is_shown:
            print(f"    {name}: {json.dumps(value)}", flush=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.values), encoding="utf-8")
        os.replace(part, self._path)


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def answer(_name: str, _kind: str, _limit_s: float, figures: Findings) -> None:
    """Hardware, driver and versions; ``has_gpu`` decides whether the rest is asked."""
    import torch

    figures.put("has_gpu", torch.cuda.is_available())
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in cpu_info if line.startswith("model name")]
    figures.put("cpu", names[0] if names else platform.machine())
    figures.put("cores", len(os.sched_getaffinity(0)))
    figures.put("kernel", platform.release())
    figures.put("memlock_limit", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    figures.put("python", platform.python_version())
    figures.put("corun", _corun())
    figures.put("cuda", torch.version.cuda)
    for package in ("torch", "triton", "cuda-bindings", "transformers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            figures.put(package, importlib.metadata.version(package))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        figures.put("gpu", properties.name)
        figures.put("gpu_memory_gib", rounded(properties.total_memory / 2**30))
        asked = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max")
        command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader", "-i0"]
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            figures.put("nvidia-smi", dict(zip(asked, said.stdout.strip().split(", "), strict=True)))


def _corun() -> str:
    """The version, in a checkout with its commit."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return __version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        described = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return f"{__version__} ({described})"
    return __version__


@dataclass(frozen=True, slots=True)
class Question:
    """One question; ``kinds`` on CUDA, each in a process of its own."""

    name: str
    kinds: tuple[str, ...]
    limit_s: float  # per process
    module: str  # its ``answer`` finds the figures
    num_queues: str = "32"  # of CUDA, as the engine sets it

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes, beside that of the caller."""
        return {MAX_CONNECTIONS: self.num_queues}


BOTH = ("stream", "host")
QUESTIONS = (
    Question("memory", ("stream",), 40, ".sync"),
    Question("round-trip", BOTH, 30, ".sync"),
    Question("streams-8", ("stream",), 30, ".sync", num_queues="8"),
    Question("streams-32", ("stream",), 30, ".sync"),
    Question("link", BOTH, 40, ".sync"),
    Question("order", BOTH, 80, ".sync"),
    Question("uploads", ("stream",), 40, ".sync"),
    Question("capture", ("stream",), 30, ".sync"),
    Question("kernels", ("cuda",), 120, ".steps"),
    Question("attention", ("cuda",), 60, ".steps"),
    Question("steps", ("cuda",), 300, ".steps"),
    Question("cold", ("cuda",), 240, ".cold"),
)
MACHINE = Question("machine", ("cpu",), 60, ".questions")


def run_question(name: str, kind: str, limit_s: float, figures: Findings) -> None:
    """Answer one question in this process."""
    question = next(question for question in (MACHINE, *QUESTIONS) if question.name == name)
    importlib.import_module(question.module, __package__).answer(name, kind, limit_s, figures)
