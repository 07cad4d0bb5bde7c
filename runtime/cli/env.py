"""``corun env``: versions, devices and limits, for bug reports."""

import argparse
import importlib.util
import os
import platform
import runpy
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ..machine.devices import describe_cuda_devices, load_cuda_driver
from ..machine.facts import MachineFacts, read_machine_facts

_PACKAGES = (
    "corun",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "triton",
    "cuda-bindings",
    "numba",
    "numpy",
    "msgspec",
    "pydantic",
    "starlette",
    "uvicorn",
    "uvloop",
    "peft",
)
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_NUM_THREADS",
    "NUMBA_THREADING_LAYER",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "TRITON_INTERPRET",
)
_GIB = 2**30


def run(arguments: argparse.Namespace) -> int:
    """Print one "name: value" line per fact."""
    del arguments  # the command has no options
    for name, value in environment(read_machine_facts()):
        print(f"{name + ':':<22} {value}")
    return 0


def environment(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of everything by which two machines may differ."""
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    for package in _PACKAGES:
        yield package, _version(package)
    yield from _machine(facts)
    yield from _devices()
    yield "numba threading", ", ".join(_numba_layers()) or "none"
    for name in _VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _machine(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    from ...cpu_workers.kernels.simd import arithmetic, isa

    quota = "no quota" if facts.cpu_quota is None else f"quota of {facts.cpu_quota:g} CPUs"
    limit = facts.memory_limit_bytes
    yield "cpu", facts.cpu_model
    yield "cpu features", ", ".join(sorted(filter(_matters, isa.machine_features()))) or "none"
    levels = [f"{level.name} ({level.benefit})" for level in isa.machine_levels()]
    yield "cpu levels", "; ".join(levels)
    yield "cpu kernels", arithmetic.describe()
    yield "cpus", f"{len(facts.allowed_cpus)} allowed, {quota}, {facts.num_cpus} used"
    yield "numa nodes", str(len(facts.numa_nodes))
    yield "memory", f"{_gib(facts.memory_total_bytes)}, {_gib(facts.memory_available_bytes)} free"
    yield "memory limit", "none" if limit is None else _gib(limit)
    yield ("/dev/shm", f"{_gib(facts.shm_total_bytes)}, {_gib(facts.shm_available_bytes)} free")


def _matters(feature: str) -> bool:
    """Whether kernels of a library here are faster with the feature."""
    return feature.startswith(("amx", "avx", "bf16", "f16c", "fma", "neon", "sve"))


def _devices() -> Iterator[tuple[str, str]]:
    yield "torch built for cuda", _torch_cuda_version() or "no"
    driver = load_cuda_driver()
    devices = () if driver is None else describe_cuda_devices(driver)
    if not devices:
        yield "cuda devices", "none"
    for index, description in enumerate(devices):
        yield f"cuda device {index}", description


def _torch_cuda_version() -> str | None:
    """Read it from torch's own file: importing torch takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    return None if version is None else str(version)


def _numba_layers() -> list[str]:
    """Return numba's threading layers that can be loaded here, in its order of preference."""
    layers = []
    for name, module in (("tbb", "tbbpool"), ("omp", "omppool"), ("workqueue", "workqueue")):
        try:
            importlib.import_module(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        layers.append(name)
    return layers


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
