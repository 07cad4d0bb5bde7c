"""Turns the bytes of an adapter's tensors into tensors of the type that they are served in.

Owns the check that every value is a finite number in that type. Knows nothing of files, names in
requests or memory budgets.
"""

import math
from collections.abc import Mapping

import torch

from ...runtime.adapters.resolved import RawTensor
from ...runtime.errors import AdapterError

STORED_DTYPES: Mapping[str, torch.dtype] = {  # by their names in safetensors
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def to_tensor(raw: RawTensor, data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of ``raw`` as a CPU tensor [*raw.shape] of ``dtype``, over ``data`` if they can be.

    Raises ``AdapterError`` naming the tensor if a value is not finite, or overflows ``dtype``.
    """
    stored = torch.frombuffer(data, dtype=STORED_DTYPES[raw.dtype]).view(raw.shape)
    if not _is_finite(stored):
        raise AdapterError(f"{raw.name} holds values that are not finite (NaN or infinity)")
    if stored.dtype == dtype:
        return stored
    tensor = stored.to(dtype)
    if not _is_finite(tensor):
        largest = float(stored.abs().max())
        raise AdapterError(
            f"{raw.name} holds {largest:g}, over the largest number of {dtype} "
            f"({torch.finfo(dtype).max:g}); use another --dtype"
        )
    return tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: a tenth of the time that ``isfinite`` takes."""
    if not tensor.numel():
        return True
    lowest, highest = torch.aminmax(tensor)  # both are NaN if a value is
    return math.isfinite(lowest) and math.isfinite(highest)
