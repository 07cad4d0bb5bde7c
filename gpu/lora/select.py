"""Chooses the back end of LoRA products: as configured, or the first that passes a probe."""

import logging

import torch

from ...runtime.config.engine import LORA_BACKENDS
from ...runtime.errors import ConfigError
from ..forward.batch import LoraBatch
from .base import LoraBackend
from .table import DeviceAdapter, LoraTable
from .torch_backend import TorchLora

_LOGGER = logging.getLogger(__name__)


def select_lora_backend(
    name: str, *, table: LoraTable, device: torch.device | str, dtype: torch.dtype, most_values: int = 0
) -> LoraBackend:
    """Return the back end that serves the adapters of ``table``.

    ``most_values``: tokens x targets x rank of the largest batch, for which CUDA reserves memory.

    ``auto`` takes the grouped kernels of the device (Triton on CUDA, numba on the CPU) if a small
    product agrees with torch, otherwise torch, with a warning. Raises ConfigError if the configured
    back end cannot work here. The probe compiles the kernels.
    """
    device = torch.device(device)
    if name not in LORA_BACKENDS:
        known = ", ".join(LORA_BACKENDS)
        raise ConfigError(f"--lora-backend {name!r} is unknown; choose one of {known}")
    if name == "torch":
        return _chosen(TorchLora(table, dtype=dtype), "configured")
    wanted = name if name != "auto" else "triton" if device.type == "cuda" else "numba"
    reason = _why_not(wanted, device, dtype)
    if reason is None:
        return _chosen(
            _make(wanted, table, dtype, most_values), "configured" if name != "auto" else "probe passed"
        )
    if name != "auto":
        raise ConfigError(f"--lora-backend {name} cannot be used: {reason}")
    _LOGGER.warning(
        "LoRA backend: torch, a loop over adapters, which is slow, because %s does not work: %s",
        wanted,
        reason,
    )
    return TorchLora(table, dtype=dtype)


def _chosen(backend: LoraBackend, reason: str) -> LoraBackend:
    _LOGGER.info("LoRA backend: %s (%s)", backend.name, reason)
    return backend


def _make(name: str, table: LoraTable, dtype: torch.dtype, most_values: int = 0) -> LoraBackend:
    if name == "numba":
        from .numba_backend import NumbaLora

        return NumbaLora(table, dtype=dtype)
    from .triton_backend import TritonLora

    return TritonLora(table, dtype=dtype, most_values=most_values)


def _why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a back end cannot be used here; None if it can."""
    if name == "numba" and device.type != "cpu":
        return f"it supports only the CPU, the model runs on {device.type}"
    if name == "numba" and dtype not in {torch.float32, torch.bfloat16}:
        return f"it supports float32 and bfloat16, the model is {dtype}"
    if name == "triton" and device.type != "cuda":
        return f"it supports only CUDA, the model runs on {device.type}"
    try:
        agrees = _probe(name, device, dtype)
    except Exception as error:  # any error of a compiler; the reason is logged or raised
        return f"its probe failed: {type(error).__name__}: {error}"
    return None if agrees else "its product is wrong on this machine"


def _probe(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether two adapters, with one token and seventeen, give the same result as torch."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    matrices = [(draw(rank, 64), draw(48, rank)) for rank in (3, 16)]
    x, base = draw(20, 64), draw(20, 48)
    results = []
    for backend_name in (name, "torch"):
        table = LoraTable(1, 2, device)
        backend = (
            TorchLora(table, dtype=dtype) if backend_name == "torch" else _make(backend_name, table, dtype)
        )
        rows = tuple(table.add(DeviceAdapter({0: backend.pack(a, b, 0.5)})) for a, b in matrices)
        table.upload()
        y = base.clone()
        backend.add_delta(x, y, 0, _probe_batch(rows, device))
        results.append(y.float())
    # The rounding of both results, and float32 sums in another order: sums of absolute values are
    # below 1000 here.
    tolerance = torch.finfo(dtype).eps * results[1].abs() + 1000 * torch.finfo(torch.float32).eps
    return bool(((results[0] - results[1]).abs() <= tolerance).all())


def _probe_batch(rows: tuple[int, ...], device: torch.device) -> LoraBatch:
    starts, ends = (0, 2), (1, 19)
    return LoraBatch(
        segment_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        segment_ends=torch.tensor(ends, dtype=torch.int32, device=device),
        table_rows=torch.tensor(rows, dtype=torch.int32, device=device),
        segment_starts_host=starts,
        segment_ends_host=ends,
        table_rows_host=rows,
        max_piece_tokens=17,
        max_rank=16,
    )
