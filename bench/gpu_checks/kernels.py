"""Counting wrong words on the device: by a Triton kernel on CUDA, by torch on the CPU."""

from collections.abc import Callable
from typing import Any

import torch

from gpu_checks.rig import Rig

_BLOCK = 1024

Count = Callable[[torch.Tensor, int, torch.Tensor], None]
"""(values int32, expected, errors int32 [1]): add to ``errors`` how many values differ."""


def make_count(rig: Rig, *, by_tensor: bool = False, is_volatile: bool = False) -> Count:
    """Counts words of device memory or, without a copy, of registered host memory.

    ``by_tensor`` passes host memory to Triton as a torch tensor, otherwise as an address;
    ``is_volatile`` reads past the caches.
    """
    if rig.is_tiny:
        return _count_on_cpu
    from gpu_checks.triton_count import count_kernel as kernel

    to_device = rig.memory.device_address - rig.memory.address

    def count(values: torch.Tensor, expected: int, errors: torch.Tensor) -> None:
        num_words = values.numel()
        source: Any = values
        is_address = not values.is_cuda and not by_tensor
        if is_address:
            source = values.data_ptr() + to_device
        kernel[(-(-num_words // _BLOCK),)](
            source, expected, errors, num_words,
            block=_BLOCK, is_address=is_address, is_volatile=is_volatile,
        )  # fmt: skip

    return count


def _count_on_cpu(values: torch.Tensor, expected: int, errors: torch.Tensor) -> None:
    errors.add_((values != expected).sum().to(torch.int32))


def compile_volatile_count(values: torch.Tensor, errors: torch.Tensor) -> None:
    """Compile the volatile variant for device memory; the first launch still has to load it."""
    from gpu_checks.triton_count import count_kernel

    count_kernel.warmup(
        values, 0, errors, values.numel(),
        block=_BLOCK, is_address=False, is_volatile=True, grid=(1,),
    )  # fmt: skip
