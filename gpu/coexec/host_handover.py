"""Moves x to workers and y back where the calling thread is the compute stream: on the CPU.

Does the work of the device operations at once, in a few compiled calls: there are no streams to
order, and the workers' memory is directly accessible. Only long waits use the device, so that they
can be released.
"""

from collections.abc import Sequence

import torch

from ...cpu_workers.kernels.lora.handover import add_rows, send_bytes
from ..device.cpu_wait import wait_awake
from .handover import AddByCopy, Exchange, Handover, StreamHandover
from .invocation import Invocation

_ITEM_BYTES = 2  # bfloat16: the only dtype of workers


class HostHandover:
    """See ``Handover``; for bfloat16, called by the thread that runs ``exchange.compute``."""

    def __init__(self, exchange: Exchange) -> None:
        assert exchange.transfer == exchange.compute, "transfer and compute must be one stream"
        self.exchange = exchange

    def begin(self) -> None:
        """See ``Handover``: the caller has computed x, and has read earlier ys."""

    def send(self, invocation: Invocation, x: torch.Tensor) -> None:
        width = invocation.shape.in_features
        assert x.dtype == torch.bfloat16 and x.shape[1] == width and x.is_contiguous(), x.shape
        row_bytes = width * _ITEM_BYTES
        send_bytes(
            invocation.memory.address + invocation.x_offset,
            x.data_ptr() + invocation.start * row_bytes,
            (invocation.end - invocation.start) * row_bytes,
            invocation.ready.host_address,
            invocation.sequence,
        )

    def wait(self, invocation: Invocation) -> None:
        if not wait_awake(invocation.done.host_address, invocation.sequence):
            exchange = self.exchange
            exchange.device.wait(exchange.compute, invocation.done, invocation.sequence)

    def end(self) -> None:
        """See ``Handover``: y is visible to the thread that waited."""

    def add(self, invocation: Invocation, ys: Sequence[torch.Tensor]) -> None:
        """See ``Handover``; rounds as torch does."""
        terms = invocation.memory.address + invocation.y_offset
        terms_stride = invocation.shape.y_columns * _ITEM_BYTES
        for (first, width), y in zip(invocation.shape.columns, ys, strict=True):
            if width == 0:
                continue
            assert y.dtype == torch.bfloat16 and y.stride(1) == 1, (y.dtype, y.stride())
            stride = y.stride(0) * _ITEM_BYTES
            add_rows(
                y.data_ptr() + invocation.start * stride,
                stride,
                terms + first * _ITEM_BYTES,
                terms_stride,
                invocation.end - invocation.start,
                min(width, y.shape[1]),
            )


def make_handover(exchange: Exchange, where: torch.device, *, max_tokens: int, max_columns: int) -> Handover:
    """``max_columns``: padded columns of all targets of the widest input group together."""
    if where.type == "cpu":
        return HostHandover(exchange)
    return StreamHandover(exchange, AddByCopy(max_tokens, max_columns, where))
