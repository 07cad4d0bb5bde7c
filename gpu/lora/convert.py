"""Turns the bytes of an adapter that fits the model into tensors and packs them for a backend.

Owns the check that every value is a finite number in the type it is served in. Knows nothing of
files, names in requests or memory budgets.
"""

from collections.abc import Mapping

import torch

from ...runtime.adapters.resolved import RawTensor, ResolvedAdapter
from ...runtime.errors import AdapterError
from .base import LoraBackend
from .table import DeviceAdapter

_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def estimate_bytes(adapter: ResolvedAdapter, dtype: torch.dtype) -> int:
    """Bytes on the device in ``dtype`` without the padding of a backend's layout."""
    return adapter.num_bytes(dtype.itemsize)


def convert_adapter(
    adapter: ResolvedAdapter, backend: LoraBackend, dtype: torch.dtype
) -> DeviceAdapter:
    """Pack all targets for ``backend``; the matrices pass through ``dtype``, the model's.

    Raises ``AdapterError`` naming the tensor if a value is not finite, or overflows ``dtype``.
    """
    return DeviceAdapter(
        {
            lora.target.index: backend.pack(
                to_tensor(lora.a, dtype), to_tensor(lora.b, dtype), lora.scaling
            )
            for lora in adapter.targets
        }
    )


def check_values(adapter: ResolvedAdapter) -> None:
    """Raise ``AdapterError`` naming the first tensor with a value that is not finite."""
    for lora in adapter.targets:
        for raw in (lora.a, lora.b):
            to_tensor(raw, _DTYPES[raw.dtype])


def to_tensor(raw: RawTensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy the bytes of ``raw`` into a CPU tensor [*raw.shape] of ``dtype``.

    Raises ``AdapterError`` naming the tensor if a value is not finite, or overflows ``dtype``.
    """
    stored = torch.frombuffer(raw.data, dtype=_DTYPES[raw.dtype]).view(raw.shape)
    if not bool(stored.isfinite().all()):
        raise AdapterError(f"{raw.name} holds values that are not finite (NaN or infinity)")
    tensor = stored.to(dtype, copy=True)
    if not bool(tensor.isfinite().all()):
        largest = float(stored.abs().max())
        raise AdapterError(
            f"{raw.name} holds {largest:g}, over the largest number of {dtype} "
            f"({torch.finfo(dtype).max:g}); use another --dtype"
        )
    return tensor
