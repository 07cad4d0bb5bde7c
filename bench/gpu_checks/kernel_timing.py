"""Times of kernels, and what a row of the report says about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_checks.ceilings import median_s

_WORST = 1e9


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call, the median over passes through all calls.

    ``device_us`` replays a CUDA graph of them, so that it is the kernels' time alone; ``eager_us``
    launches them from Python, which for short kernels is what Python takes. None on the CPU.
    """

    device_us: float | None
    eager_us: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting; errors in units of their tolerance."""

    error: float
    control: float  # of a reference that is wrong on purpose
    num_bytes: int
    num_flops: int
    times: Times


def measure(calls: Sequence[Callable[[], object]], device: torch.device) -> Times:
    """Run all calls in turn, as layers follow each other, so that caches are cold for each."""
    if device.type != "cuda":
        for call in calls:
            call()
        return Times(None, None)

    def run() -> None:
        for call in calls:
            call()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    scale = 1e6 / len(calls)
    device_s = median_s(graph.replay, is_cuda=True)
    eager_s = median_s(run, is_cuda=True, has_head_start=False)
    return Times(device_s * scale, eager_s * scale)


def make_row(
    name: str,
    setting: dict[str, Any],
    measured: Measured,
    *,
    copy_gb_per_s: float | None,
    matrix_tflops: float | None,
) -> dict[str, Any]:
    """A row of the report. ``share_of_floor`` is 1 where the kernels reach the ceiling.

    The floor is the longer of: bytes through memory at the rate of a copy, operations at the rate
    of a large matrix product. Without ceilings or times there is none.
    """
    row: dict[str, Any] = {
        "kernel": name,
        **setting,
        # JSON has no infinity, which is what NaN counts as.
        "error_over_tolerance": round(min(measured.error, _WORST), 4),
        "control_error_over_tolerance": round(min(measured.control, _WORST), 2),
        # The control must fail, else the comparison could not.
        "pass": measured.error <= 1.0 < measured.control,
    }
    device_us = measured.times.device_us
    if device_us is None or copy_gb_per_s is None or matrix_tflops is None:
        return row
    memory_us = measured.num_bytes / copy_gb_per_s / 1e3
    matrix_us = measured.num_flops / matrix_tflops / 1e6
    floor_us = max(memory_us, matrix_us)
    assert measured.times.eager_us is not None
    return row | {
        "us": round(device_us, 2),
        "eager_us": round(measured.times.eager_us, 2),
        "floor_us": round(floor_us, 2),
        "bound_by": "memory" if memory_us >= matrix_us else "matrix",
        "share_of_floor": round(floor_us / device_us, 3),
    }
