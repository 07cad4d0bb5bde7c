"""How the workers' deltas come to the base products: ``cold_deltas.AddDeltas`` of each device."""

from collections.abc import Sequence
from functools import partial

import torch

from .cold_deltas import Exchange
from .invocation import Invocation


def add_from_host(exchange: Exchange, invocation: Invocation, ys: Sequence[torch.Tensor]) -> None:
    """On the CPU: y lies where the device can read it."""
    exchange.device.launch(
        exchange.compute,
        partial(_add, invocation, invocation.y, ys),
        reads=(invocation.y,),
        writes=ys,
    )


class AddByCopy:
    """On CUDA: y is copied to the device first, by the compute stream itself.

    A copy engine that is busy with adapters holds it up by one chunk of theirs at most.
    """

    def __init__(self, max_slice_tokens: int, max_columns: int, device: torch.device) -> None:
        """``max_columns``: padded columns of all targets of the widest group together."""
        self._flat = torch.empty(
            max_slice_tokens * max_columns, dtype=torch.bfloat16, device=device
        )

    def __call__(
        self, exchange: Exchange, invocation: Invocation, ys: Sequence[torch.Tensor]
    ) -> None:
        """Add one invocation's y; the buffer is the stream's own, so the next one waits."""
        landed = self._flat[: invocation.y.numel()].view(invocation.y.shape)
        exchange.device.copy(exchange.compute, landed, invocation.y)
        exchange.device.launch(
            exchange.compute, partial(_add, invocation, landed, ys), reads=(landed,), writes=ys
        )


def _add(invocation: Invocation, deltas: torch.Tensor, ys: Sequence[torch.Tensor]) -> None:
    for (first, width), y in zip(invocation.columns, ys, strict=True):
        rows = y[invocation.start : invocation.end]
        rows += deltas[:, first : first + min(width, y.shape[1])]
