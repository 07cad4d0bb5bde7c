"""Which machine and which versions a report is about."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from gpu_checks.figures import Figures


def machine(kind: str, limit_s: float, figures: Figures) -> None:
    """Hardware, driver and versions; ``has_gpu`` decides whether the rest is asked."""
    has_gpu = torch.cuda.is_available()
    figures.put("has_gpu", has_gpu)
    figures.put("cpu", _cpu_name())
    figures.put("cores", len(os.sched_getaffinity(0)))
    figures.put("kernel", platform.release())
    figures.put("python", platform.python_version())
    figures.put("torch", torch.__version__)
    figures.put("cuda", torch.version.cuda)
    for package in ("triton", "cuda-bindings", "numpy", "numba", "posix_ipc"):
        figures.put(package, _version(package))
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
        figures.put(variable, os.environ.get(variable))
    if kind != "cpu" and has_gpu:
        properties = torch.cuda.get_device_properties(0)
        figures.put("gpu", properties.name)
        figures.put("gpu_memory_gib", round(properties.total_memory / 2**30, 1))
        figures.put("multiprocessors", properties.multi_processor_count)
        figures.put("driver", _driver_version())


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0]
