"""Run by a test in a process without numba and the like: all that the GPU scripts import and start.

The questions' own device is CUDA's, on a GPU of threads; their worker is a process that polls.
"""

import importlib
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from corun.gpu.device import cuda_memory
from corun.gpu.device.host_memory import HostMemory
from corun.shm.errors import ShmError
from corun.shm.segment import Segment
from gpu_checks import importable, rig, round_trips
from gpu_checks.figures import Figures
from support.fake_cuda import FakeGpu, fake_device

# What questions and groups import on a GPU only.
_ON_A_GPU = (
    "corun.gpu.device.cuda_kernels",
    "corun.gpu.attention.triton_kernels",
    "corun.gpu.lora.triton_backend",
    "cuda.bindings.driver",
)


def _import_all() -> None:
    names = [path.stem for path in (importable.ROOT / "bench" / "gpu_checks").glob("*.py")]
    for name in (*(f"gpu_checks.{name}" for name in names if name != "__init__"), *_ON_A_GPU):
        importlib.import_module(name)


def _has_posix_segments() -> bool:
    try:
        Segment.create(4096, kind="bare", backing="posix").close()
    except ShmError:
        return False
    return True


def _ask_for_round_trips(path: Path) -> Figures:
    ranges: list[tuple[int, int]] = []

    class NotedMemory(HostMemory):
        """Tells the fake what is host memory: all else is the device's."""

        def __init__(self, memory: memoryview, **arguments: object) -> None:
            super().__init__(memory, **arguments)  # type: ignore[arg-type]
            ranges.append((self.address, self.num_bytes))

    setattr(cuda_memory, "HostMemory", NotedMemory)  # noqa: B010 - it is only imported there
    figures = Figures(path)
    with ExitStack() as stack:
        made = fake_device(FakeGpu(host_ranges=ranges), wait_timeout_s=30.0)
        rig.open_device = lambda kind: stack.enter_context(made)[0]
        round_trips.round_trips("cpu", 60.0, figures)
    return figures


def main() -> None:
    """Import, start and measure; print one JSON line last."""
    _import_all()
    with tempfile.TemporaryDirectory() as folder:
        figures = _ask_for_round_trips(Path(folder) / "figures")
    found = {"posix": _has_posix_segments(), "numba": "numba" in sys.modules, **figures.values}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
