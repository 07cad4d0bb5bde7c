"""Converts the bytes of an adapter's tensors to tensors of the model's type.

Independent of files, names and memory budgets.
"""

from collections.abc import Mapping

import torch

from ...runtime.adapters.resolved import RawTensor
from ...runtime.adapters.values import check_values

STORED_DTYPES: Mapping[str, torch.dtype] = {  # by name in safetensors
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def to_tensor(raw: RawTensor, data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """``raw`` as a CPU tensor [*raw.shape] of ``dtype``, over ``data`` if possible.

    Raises ``AdapterError`` naming the tensor if ``check_values`` does.
    """
    check_values(raw, data, str(dtype).removeprefix("torch."))
    return torch.frombuffer(data, dtype=STORED_DTYPES[raw.dtype]).view(raw.shape).to(dtype)
