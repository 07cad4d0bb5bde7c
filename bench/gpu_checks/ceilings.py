"""What the machine can do at best: copy bandwidths, bf16 matrix rate, the link by chunk size."""

import statistics
import time
from collections.abc import Callable

import torch

from gpu_checks import layout
from gpu_checks.figures import Figures

_NUM_SAMPLES = 7
_CHUNKED_BYTES = 256 << 20
_MAX_CHUNKS = 512  # enqueued at once; the launch queue takes no more than some 1000
_HEAD_START_CYCLES = 10_000_000  # some 5 ms


def median_s(work: Callable[[], object], *, is_cuda: bool, has_head_start: bool = True) -> float:
    """Seconds of one call, the median after two warm-ups; by events of the device on CUDA.

    With a head start something that takes milliseconds is ahead there, so that enqueueing is not
    what is measured.
    """
    samples: list[float] = []
    for sample in range(_NUM_SAMPLES + 2):
        if is_cuda:
            if has_head_start:
                torch.cuda._sleep(_HEAD_START_CYCLES)
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            took_s = start.elapsed_time(end) / 1e3
        else:
            start_s = time.perf_counter()
            work()
            took_s = time.perf_counter() - start_s
        if sample >= 2:
            samples.append(took_s)
    return statistics.median(samples)


def copy_gb_per_s(num_bytes: int, device: torch.device) -> float:
    """Copy within the device; bytes read and bytes written both count."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    took_s = median_s(lambda: destination.copy_(source), is_cuda=device.type == "cuda")
    return 2.0 * num_bytes / took_s / 1e9


def matrix_tflops(dim: int, device: torch.device) -> float:
    """bf16 product of two square matrices of random numbers."""
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (
        torch.randn(dim, dim, device=device, generator=generator).to(torch.bfloat16)
        for _ in range(2)
    )
    out = torch.empty_like(a)
    took_s = median_s(lambda: torch.mm(a, b, out=out), is_cuda=device.type == "cuda")
    return 2.0 * dim * dim * dim / took_s / 1e12


def ceilings(kind: str, limit_s: float, figures: Figures) -> None:
    """The two ceilings and the link. ``limit_s`` is kept from outside."""
    is_cuda = kind != "cpu"
    sizes = layout.FULL if is_cuda else layout.TINY
    device = torch.device("cuda" if is_cuda else "cpu")
    copy = copy_gb_per_s(sizes.bandwidth_bytes, device)
    figures.put("copy_within_device_gb_per_s", _significant(copy))
    figures.put("bf16_matrix_tflops", _significant(matrix_tflops(sizes.matrix_dim, device)))
    num_bytes = min(_CHUNKED_BYTES, 4 * sizes.bandwidth_bytes)
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    ways = {"to_device": (on_device, host), "to_host": (host, on_device)}
    for name, (destination, source) in ways.items():
        rate = _link_gb_per_s(destination, source, num_bytes, is_cuda=is_cuda)
        figures.put(f"{name}_gb_per_s", _significant(rate))
        by_chunk = {}
        for chunk_bytes in sizes.chunk_bytes:
            rate = _link_gb_per_s(destination, source, chunk_bytes, is_cuda=is_cuda)
            by_chunk[str(chunk_bytes)] = _significant(rate)
        figures.put(f"{name}_gb_per_s_by_chunk_bytes", by_chunk)


def _link_gb_per_s(
    destination: torch.Tensor, source: torch.Tensor, chunk_bytes: int, *, is_cuda: bool
) -> float:
    chunks = zip(destination.split(chunk_bytes), source.split(chunk_bytes), strict=True)
    pairs = list(chunks)[:_MAX_CHUNKS]

    def copy() -> None:
        for to, origin in pairs:
            to.copy_(origin, non_blocking=True)

    num_bytes: int = sum(origin.numel() for _, origin in pairs)
    return num_bytes / median_s(copy, is_cuda=is_cuda) / 1e9


def _significant(value: float) -> float:
    return float(f"{value:.4g}")
