"""Lets engines on the CPU device exchange with CPU workers as on CUDA: by streams, not by the host.

The exchange has a stream of its own, which is another thread here, and y is copied to the device
before it is added.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from corun.gpu.coexec import handover, select
from corun.gpu.coexec.handover import AddByCopy, Exchange, Handover, StreamHandover
from corun.gpu.device.base import Stream
from corun.gpu.device.host_memory import TorchDevice


@contextmanager
def exchanged_by_streams() -> Iterator[None]:
    """For engines that are built inside."""

    def apart(device: TorchDevice, compute: Stream, transfer: Stream) -> Exchange:
        assert transfer == compute, "they are apart already"
        return Exchange(device, compute, device.stream("exchange", is_urgent=True))

    def by_streams(
        exchange: Exchange, where: torch.device, *, max_slice_tokens: int, max_columns: int
    ) -> Handover:
        return StreamHandover(exchange, AddByCopy(max_slice_tokens, max_columns, where))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "Exchange", apart)
        patch.setattr(select, "make_handover", by_streams)
        yield
