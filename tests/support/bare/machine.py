"""Run by a test in a process without numba and the like: what ``gpu_check`` needs on a bare one.

The device is CUDA's, on a GPU of threads; the peer is a process that lacks as much.
"""

import importlib
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import gpu_check
import torch
from corun.gpu.device import cuda_memory
from corun.gpu.device.host_memory import TorchDevice
from support.cuda.fake_cuda import FakeGpu, fake_device, noted_memory


def main() -> None:
    """Import, start and measure; print one JSON line last."""
    importlib.import_module("cuda.bindings.driver")  # imported on a GPU only
    ranges: list[tuple[int, int]] = []
    setattr(cuda_memory, "HostMemory", noted_memory(ranges))  # noqa: B010 - it is only imported
    setattr(gpu_check, "FULL", gpu_check.TINY)  # noqa: B010 - a constant
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def open_device(kind: str) -> tuple[TorchDevice, torch.device]:
            made = fake_device(FakeGpu(host_ranges=ranges), sync=kind)
            return stack.enter_context(made)[0], torch.device("cpu")

        setattr(gpu_check, "open_device", open_device)  # noqa: B010
        figures = gpu_check.Figures(Path(folder, "figures"))
        gpu_check.run_question("order", "stream", 60.0, figures)
    sys.stdout.write(json.dumps({"numba": "numba" in sys.modules, **figures.values}) + "\n")


if __name__ == "__main__":
    main()
