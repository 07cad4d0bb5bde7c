"""Moves x to workers and y back by streams: on a device of its own, and for order checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..device.base import Device, DeviceError, Stream
from .invocation import Invocation


@dataclass(frozen=True, slots=True)
class Exchange:
    """The device, and the streams on which deltas are exchanged.

    ``transfer`` is ``compute`` itself where a separate stream gains nothing: on the CPU.
    """

    device: Device[torch.Tensor]
    compute: Stream
    transfer: Stream

    def order(self, first: Stream, then: Stream) -> None:
        """Hold ``then`` until everything enqueued on ``first`` so far is done."""
        if first == then:
            return
        event = self.device.event()
        self.device.record(first, event)
        self.device.wait_event(then, event)
        self.device.release_event(event)

    def take_failure(self, *, timeout_s: float) -> str | None:
        """Wait for the end of both streams; return the failure since the last call, or None.

        After a failure all exchanges since the last call are void; later ones are not.
        Time-outs of waits are failures, and so is a stream that does not end within ``timeout_s``.
        """
        failures = []
        for stream in dict.fromkeys((self.transfer, self.compute)):
            try:
                self.device.synchronize(stream, timeout_s=timeout_s)
            except DeviceError as error:
                failures.append(str(error))
        return failures[0] if failures else None


class Handover(Protocol):
    """Moves x and y of an input group: ``begin``, ``send``s; ``wait``s, ``end``, ``add``s."""

    @property
    def exchange(self) -> Exchange:
        """The exchange; its ``compute`` is the stream of the pass."""

    def begin(self) -> None:
        """Called when x is computed and earlier ys have been read."""

    def send(self, invocation: Invocation, x: torch.Tensor) -> None:
        """Copy the invocation's rows of x out, and signal its team.

        x: [tokens, in_features], contiguous.
        """

    def wait(self, invocation: Invocation) -> None:
        """Hold later operations until the invocation's y is available."""

    def end(self) -> None:
        """Make the awaited ys visible to ``add``."""

    def add(self, invocation: Invocation, ys: Sequence[torch.Tensor]) -> None:
        """Add the invocation's y to its rows of ys, one [tokens, out_features] per target."""


class AddDeltas(Protocol):
    """Adds the workers' results to the base products."""

    def __call__(self, exchange: Exchange, invocation: Invocation, ys: Sequence[torch.Tensor]) -> None:
        """Add ``invocation.y`` to the invocation's tokens of ys, one per target of the group.

        Enqueued on ``exchange.compute``, to which y is visible.
        """


class StreamHandover:
    """By device operations alone, so that the host may run ahead of the device."""

    def __init__(self, exchange: Exchange, add_deltas: AddDeltas) -> None:
        self.exchange = exchange
        self._add_deltas = add_deltas

    def begin(self) -> None:
        self.exchange.order(self.exchange.compute, self.exchange.transfer)

    def send(self, invocation: Invocation, x: torch.Tensor) -> None:
        device, transfer = self.exchange.device, self.exchange.transfer
        device.copy(transfer, invocation.x, x[invocation.start : invocation.end])
        device.signal(transfer, invocation.ready, invocation.sequence)

    def wait(self, invocation: Invocation) -> None:
        exchange = self.exchange
        exchange.device.wait(exchange.transfer, invocation.done, invocation.sequence)

    def end(self) -> None:
        self.exchange.order(self.exchange.transfer, self.exchange.compute)

    def add(self, invocation: Invocation, ys: Sequence[torch.Tensor]) -> None:
        self._add_deltas(self.exchange, invocation, ys)


class AddByCopy:
    """On CUDA: the compute stream first copies y to the device.

    A copy engine that is busy with adapters delays it by at most one of their chunks.
    """

    def __init__(self, max_tokens: int, max_columns: int, device: torch.device) -> None:
        """``max_columns``: padded columns of all targets of the widest group together."""
        self._flat = torch.empty(max_tokens * max_columns, dtype=torch.bfloat16, device=device)

    def __call__(self, exchange: Exchange, invocation: Invocation, ys: Sequence[torch.Tensor]) -> None:
        """Add one invocation's y; the stream owns the buffer, so the next invocation waits."""
        y = invocation.y
        landed = self._flat[: y.numel()].view(y.shape)
        exchange.device.copy(exchange.compute, landed, y)

        def add() -> None:
            for (first, width), rows_of in zip(invocation.shape.columns, ys, strict=True):
                if width == 0:  # the adapter does not have this target
                    continue
                rows = rows_of[invocation.start : invocation.end]
                rows += landed[:, first : first + min(width, rows_of.shape[1])]

        exchange.device.launch(exchange.compute, add, reads=(landed,), writes=ys)
