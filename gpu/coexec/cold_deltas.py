"""Deltas of a pass with cold rows: below a row's split layer from CPU workers, else on the device.

Per (layer, input group): copy x out and signal before the base products, wait and add after them.
Nothing here waits for the host: the order is made by streams, events and words, so on CUDA all of
it is enqueued ahead. On the CPU, where the compute stream is the caller's own thread, the same
calls take effect one after the other.

Source: Toppings, section 4.2 (invocation without synchronisation), with stream operations in place
of a fused kernel.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..device.base import Device, Event, Stream
from ..lora.base import LoraBackend
from ..step import LoraBatch
from .invocation import Invocation

GroupKey = tuple[int, int]  # layer, input group within it


@dataclass(frozen=True, slots=True)
class Arrival:
    """A layer group that is being loaded."""

    event: Event  # recorded behind its copies
    memory: torch.Tensor  # where it comes to lie on the device
    # Sees to the copies being enqueued, and tells of files that are late: what is computed without
    # them is void.
    bring: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class ColdPlan:
    """What the deltas of one pass are made of.

    ``batches`` and ``arrivals`` have one entry per layer: the rows whose deltas the device computes
    there, and the loads under way that they need.
    """

    invocations: Mapping[GroupKey, tuple[Invocation, ...]]
    batches: tuple[LoraBatch | None, ...]
    arrivals: tuple[tuple[Arrival, ...], ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The device, and the streams on which deltas are exchanged.

    ``transfer`` is ``compute`` itself where a wait on a stream of its own gains nothing: the CPU.
    """

    device: Device[torch.Tensor]
    compute: Stream
    transfer: Stream

    def order(self, first: Stream, then: Stream) -> None:
        """Hold ``then`` until ``first`` has come to where it is now."""
        if first == then:
            return
        event = self.device.event()
        self.device.record(first, event)
        self.device.wait_event(then, event)
        self.device.release_event(event)


class AddDeltas(Protocol):
    """Enqueues the sum of what workers computed and the base products."""

    def __call__(
        self, exchange: Exchange, invocation: Invocation, ys: Sequence[torch.Tensor]
    ) -> None:
        """Add ``invocation.y`` to the invocation's tokens of ys, one per target of the group.

        On ``exchange.compute``, which sees y already.
        """
        ...


class WaitObserver(Protocol):
    """Is told of waits as they are made; for measurements on the CPU, where they take effect."""

    def signalled(self, key: GroupKey, invocation: Invocation) -> None:
        """X is out and the worker may begin."""
        ...

    def wait_begins(self, key: GroupKey, invocation: Invocation) -> None:
        """The base products of the group are done."""
        ...

    def wait_ends(self, key: GroupKey, invocation: Invocation) -> None:
        """Y is there."""
        ...


class NoObserver:
    """Nobody measures."""

    def signalled(self, key: GroupKey, invocation: Invocation) -> None:
        """Do nothing."""

    def wait_begins(self, key: GroupKey, invocation: Invocation) -> None:
        """Do nothing."""

    def wait_ends(self, key: GroupKey, invocation: Invocation) -> None:
        """Do nothing."""


class ColdDeltas:
    """See ``step.DeltaPass``; for one pass."""

    def __init__(
        self,
        exchange: Exchange,
        backend: LoraBackend,
        add_deltas: AddDeltas,
        plan: ColdPlan,
        observer: WaitObserver,
    ) -> None:
        """``backend`` computes on ``exchange.compute``."""
        self._exchange = exchange
        self._backend = backend
        self._add_deltas = add_deltas
        self._plan = plan
        self._observer = observer
        self._has_arrived = [not arrivals for arrivals in plan.arrivals]
        self._signalled: set[int] = set()  # ids of invocations, which the plan keeps alive

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        """Send x to the workers of this group."""
        key = _key(group)
        invocations = self._plan.invocations.get(key, ())
        if not invocations:
            return
        exchange = self._exchange
        exchange.order(exchange.compute, exchange.transfer)
        for invocation in invocations:
            rows = x[invocation.start : invocation.end]
            exchange.device.copy(exchange.transfer, invocation.x, rows)
            exchange.device.signal(exchange.transfer, invocation.ready, invocation.sequence)
            self._signalled.add(id(invocation))
            self._observer.signalled(key, invocation)

    def add(
        self,
        group: Hashable,
        x: torch.Tensor,
        ys: Sequence[torch.Tensor],
        target_indices: Sequence[int],
    ) -> None:
        """Add the device's own deltas, then those of the workers as they come."""
        key = _key(group)
        layer = key[0]
        batch = self._plan.batches[layer]
        if batch is not None:
            self._await_layer(layer)
            self._exchange.device.launch(
                self._exchange.compute,
                partial(self._backend.add_deltas, x, ys, target_indices, batch),
                reads=(x, *[arrival.memory for arrival in self._plan.arrivals[layer]]),
                writes=ys,
            )
        self._take_in(key, ys)

    def release_workers(self) -> None:
        """Let the workers go on that still wait for x: the pass has failed, and all is void.

        Behind what was computed: their y takes the place of earlier ones that are read there.
        """
        exchange = self._exchange
        exchange.order(exchange.compute, exchange.transfer)
        for invocations in self._plan.invocations.values():
            for invocation in invocations:
                if id(invocation) not in self._signalled:
                    exchange.device.signal(exchange.transfer, invocation.ready, invocation.sequence)

    def _await_layer(self, layer: int) -> None:
        """Hold the compute stream until the adapters' layer groups are there.

        The host waits only for files that are still being read.
        """
        if self._has_arrived[layer]:
            return
        for arrival in self._plan.arrivals[layer]:
            if arrival.bring():
                self._exchange.device.wait_event(self._exchange.compute, arrival.event)
        self._has_arrived[layer] = True

    def _take_in(self, key: GroupKey, ys: Sequence[torch.Tensor]) -> None:
        invocations = self._plan.invocations.get(key, ())
        if not invocations:
            return
        exchange = self._exchange
        for invocation in invocations:
            self._observer.wait_begins(key, invocation)
            exchange.device.wait(exchange.transfer, invocation.done, invocation.sequence)
            self._observer.wait_ends(key, invocation)
        exchange.order(exchange.transfer, exchange.compute)
        for invocation in invocations:
            self._add_deltas(exchange, invocation, ys)


def _key(group: Hashable) -> GroupKey:
    assert isinstance(group, tuple), "targets of adapters belong to a (layer, input group)"
    layer, input_group = group
    return layer, input_group
