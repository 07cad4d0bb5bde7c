"""Turns the bytes of an adapter's tensors into tensors of the type that they are served in.

Owns the checks that every value is a finite number in that type, and that small ones are not lost
in it. Knows nothing of files, names in requests or memory budgets.
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

MAX_LOSS = 0.01  # of a tensor's norm
_SAFE_RMS = 2.0**-18  # from this root mean square on float16 loses less than that of it


def to_tensor(raw: RawTensor, data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of ``raw`` as a CPU tensor [*raw.shape] of ``dtype``, over ``data`` if they can be.

    Raises ``AdapterError`` naming the tensor if a value is not finite or overflows ``dtype``, or if
    the values are so small that more than ``MAX_LOSS`` of the tensor's norm is lost in ``dtype``.
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
    loss = _loss(stored, tensor)
    if loss > MAX_LOSS:
        largest = float(stored.abs().max())
        raise AdapterError(
            f"{raw.name} holds {largest:g} at most, too small for {dtype}, in which {loss:.0%} of "
            "it would be lost; use another --dtype"
        )
    return tensor


def _loss(exact: torch.Tensor, tensor: torch.Tensor) -> float:
    """How much of the norm of ``exact`` is lost in ``tensor``, which is of a narrower range.

    Rounding alone loses 3e-4 of a tensor in float16. More is lost only below 2**-14, where numbers
    are 2**-24 apart, and what is under half of that becomes zero.
    """
    if torch.finfo(tensor.dtype).tiny <= torch.finfo(exact.dtype).tiny or not exact.numel():
        return 0.0
    norm = torch.linalg.vector_norm(exact, dtype=torch.float32)
    if float(norm) >= _SAFE_RMS * math.sqrt(exact.numel()):
        return 0.0
    largest = float(exact.abs().max())
    if not largest:
        return 0.0
    scaled, lost = exact.double() / largest, (exact.double() - tensor.double()) / largest
    return float(torch.linalg.vector_norm(lost) / torch.linalg.vector_norm(scaled))


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: a tenth of the time that ``isfinite`` takes."""
    if not tensor.numel():
        return True
    lowest, highest = torch.aminmax(tensor)  # both are NaN if a value is
    return math.isfinite(lowest) and math.isfinite(highest)
