"""Deltas of a pass with cold rows: below a row's split layer from CPU workers, else on the device.

Per (layer, input group): copy x out and signal before the base products, wait and add after them.
The host waits only for files that are still being read: streams, events and words define the
order, so on CUDA all of it is enqueued ahead (``handover``). On the CPU, where the calling thread is
the compute stream, the same calls take effect one after the other (``host_handover``).

Source: Toppings, section 4.2 (invocation without synchronisation), with stream operations in place
of a fused kernel.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ...runtime.errors import ModelError
from ..device.base import Event
from ..forward.batch import LoraBatch
from ..lora.adapter_layout import GroupKey
from ..lora.base import LoraBackend
from ..lora.deltas import add_deltas
from .handover import Handover
from .invocation import Invocation


@dataclass(frozen=True, slots=True)
class Arrival:
    """A layer group that is being loaded."""

    event: Event  # recorded after its copies
    memory: Sequence[torch.Tensor]  # its places on the device
    # Ensures that the copies are enqueued, and reports files that are late: results computed
    # without them are void.
    bring: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class ColdPlan:
    """The sources of a pass's deltas.

    ``batches`` and ``arrivals`` have one entry per layer: the rows with deltas that the device
    computes there, and the running loads that they need. ``reads``, by layer, wait until workers can
    read its matrices; they are called before x is sent.
    """

    invocations: Mapping[GroupKey, tuple[Invocation, ...]]
    batches: tuple[LoraBatch | None, ...]
    arrivals: tuple[tuple[Arrival, ...], ...]
    reads: Mapping[int, Sequence[Callable[[], None]]] = field(default_factory=dict)


class ColdDeltas:
    """Implements ``step.DeltaPass`` for one pass."""

    is_repeatable = False  # sends and waits differ between passes
    has_factors = False  # of no effect on passes that are not repeated

    def __init__(self, handover: Handover, backend: LoraBackend, plan: ColdPlan) -> None:
        """``backend`` computes on ``handover.exchange.compute``."""
        self._handover = handover
        self._exchange = handover.exchange
        self._backend = backend
        self._plan = plan
        self._has_arrived = [not arrivals for arrivals in plan.arrivals]
        self._sent: set[int] = set()  # ids of invocations, kept alive by the plan
        self._last_key: GroupKey = (-1, 0)  # of the last x that the workers got

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        """Send x to the workers of this group.

        Raises ``ModelError`` if the group comes before one that was sent: a worker's word tells
        how many of its jobs have their x, so it would compute others without.
        """
        key = _key(group)
        invocations = self._plan.invocations.get(key)
        if invocations is None:
            return
        if key <= self._last_key:
            raise ModelError(f"the model calls input group {key} after {self._last_key}")
        self._last_key = key
        for await_read in self._plan.reads.get(key[0], ()):
            await_read()
        self._handover.begin()
        for invocation in invocations:
            self._handover.send(invocation, x)
            self._sent.add(id(invocation))

    def add(
        self, group: Hashable, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int]
    ) -> None:
        """Add the device's own deltas, then those of the workers as they arrive."""
        key = _key(group)
        layer = key[0]
        batch = self._plan.batches[layer]
        if batch is not None:
            self._await_layer(layer)
            self._exchange.device.launch(
                self._exchange.compute,
                partial(add_deltas, self._backend, x, ys, target_indices, batch),
                reads=(x, *[part for arrival in self._plan.arrivals[layer] for part in arrival.memory]),
                writes=ys,
            )
        invocations = self._plan.invocations.get(key)
        if invocations is not None:
            self._take_in(invocations, ys)

    def of_head(self, batch: LoraBatch) -> "ColdDeltas":
        """Those of the output head; ``batch`` has the tokens that need logits.

        The device computes them, behind the loads of the last layer.
        """
        plan = self._plan
        batches = (batch,) * len(plan.batches)
        return ColdDeltas(self._handover, self._backend, ColdPlan({}, batches, plan.arrivals))

    def release_workers(self) -> None:
        """Release workers that still wait for x: the pass has failed, and its results are void.

        Enqueued behind the computation, because their y overwrites earlier ones read there.
        """
        exchange = self._exchange
        exchange.order(exchange.compute, exchange.transfer)
        for invocations in self._plan.invocations.values():
            for invocation in invocations:
                if id(invocation) not in self._sent:
                    exchange.device.signal(exchange.transfer, invocation.ready, invocation.sequence)

    def _await_layer(self, layer: int) -> None:
        """Hold the compute stream until the adapters' layer groups are there."""
        if self._has_arrived[layer]:
            return
        for arrival in self._plan.arrivals[layer]:
            if arrival.bring():
                self._exchange.device.wait_event(self._exchange.compute, arrival.event)
        self._has_arrived[layer] = True

    def _take_in(self, invocations: Sequence[Invocation], ys: Sequence[torch.Tensor]) -> None:
        for invocation in invocations:
            self._handover.wait(invocation)
        self._handover.end()
        for invocation in invocations:
            self._handover.add(invocation, ys)


def _key(group: Hashable) -> GroupKey:
    assert isinstance(group, tuple), "targets of adapters belong to a (layer, input group)"
    layer, input_group = group
    return layer, input_group
