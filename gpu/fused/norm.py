"""RMS norms of transformers' decoders in one pass, in bfloat16."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from ...cpu_workers.kernels import fused as kernels
from ..forward.kernel_threads import num_kernel_threads
from ..forward.launcher import current_launcher

Norm = TypeVar("Norm")


class FusedNorm:
    """Replaces the ``forward`` of an RMS norm: [..., features] -> [..., features]."""

    def __init__(self, factors: torch.Tensor, epsilon: float, *, rounds_twice: bool) -> None:
        """``factors``: [features], multiplied with the normed row, in float32.

        ``rounds_twice``: the normed row is also rounded before the multiplication.
        """
        self._factors = factors.detach().float().contiguous()
        self._epsilon = np.float32(epsilon)
        self._rounds_twice = rounds_twice
        self._features = len(factors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norm each row of bfloat16."""
        features = self._features
        assert x.dtype == torch.bfloat16 and x.shape[-1] == features, (x.dtype, x.shape)
        rows = x if x.is_contiguous() else x.contiguous()
        launcher = current_launcher()
        y = launcher.new_output(rows.shape, torch.bfloat16)
        launcher.launch(
            kernels.norm, rows.data_ptr(), features, self._factors.data_ptr(), y.data_ptr(),
            rows.numel() // features, features, self._epsilon, self._rounds_twice,
            num_kernel_threads(),
        )  # fmt: skip
        return y


def is_weighted_norm(module: nn.Module) -> bool:
    """Whether a module is a norm by its name, and not one of torch's own."""
    is_norm = "norm" in type(module).__name__.lower() and not isinstance(module, nn.LayerNorm)
    return is_norm and any(True for _ in module.parameters(recurse=False))


def norm_candidates(
    module: nn.Module, dtype: torch.dtype, make: Callable[..., Norm]
) -> Iterator[Norm]:
    """Possible kernels for a module that looks like an RMS norm; a check decides.

    ``make``: ``FusedNorm``, or a class with the same arguments.
    """
    if not is_weighted_norm(module):
        return
    # Only of norms: a linear's weight may be packed, and unpacking a model takes half a second.
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or not isinstance(weight, torch.Tensor):
        return
    if weight.ndim == 1 and weight.dtype == dtype:
        # Llama and later families; OLMo 2 and gpt-oss; Gemma.
        yield make(weight, epsilon, rounds_twice=True)
        yield make(weight, epsilon, rounds_twice=False)
        yield make(1.0 + weight.float(), epsilon, rounds_twice=False)
