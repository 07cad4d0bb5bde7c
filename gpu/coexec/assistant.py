"""Prepares and completes passes of cold rows: assigns deltas to workers or the device."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ...shm.errors import ShmError
from ..forward.batch import LoraBatch
from ..forward.lower import lora_batch
from ..lora.adapter_layout import GroupKey
from ..lora.base import LoraBackend
from .cold_deltas import Arrival, ColdDeltas, ColdPlan
from .gateway import AssistedRow, ColdAdapter, WorkerGateway
from .handover import Exchange, Handover
from .invocation import Invocation

_LOG = logging.getLogger(__name__)

_RESULT_TIMEOUT_S = 10.0  # all waits have ended, so the results are available


class ArrivingAdapter(ColdAdapter, Protocol):
    """An adapter on its way to the device."""

    def begin_pass(self) -> int:
        """Called when a pass is about to use it; returns how many first layers are on the host."""

    def await_read(self, layer: int) -> None:
        """Wait for files, for a limited time, until workers may read a layer."""

    def arrival(self, layer: int) -> Arrival | None:
        """What the layer's deltas on the device wait for; None if the layer has arrived."""

    def has_failed(self) -> bool:
        """Whether a layer failed or was late; results computed with it are void."""


@dataclass(frozen=True, slots=True)
class ColdRow:
    """One row of a pass: packed tokens [start, end) and its adapter's progress."""

    start: int
    end: int
    split_layer: int
    table_row: int  # of the LoRA table
    max_rank: int
    arriving: ArrivingAdapter | None  # None = its adapter is on the device

    @property
    def first_layer(self) -> int:
        """The first layer with deltas computed by the device: 0 if the adapter has arrived."""
        return 0 if self.arriving is None else self.split_layer


@dataclass(slots=True)
class AssistedPass:
    """One running pass. ``finish`` or ``abandon`` ends it."""

    deltas: ColdDeltas
    _exchange: Exchange
    _gateway: WorkerGateway | None
    _invocations: dict[GroupKey, tuple[Invocation, ...]]
    _cold_spans: frozenset[tuple[int, int]]

    def finish(self) -> frozenset[tuple[int, int]]:
        """After the end of the pass, return the packed token spans with void deltas."""
        if self._gateway is None or not self._invocations:
            return frozenset()
        void_spans = self._take_results(self._gateway)
        # Always taken, or it would count against the next pass.
        failure = self._exchange.take_failure(timeout_s=_RESULT_TIMEOUT_S)
        if failure is None:
            return void_spans
        _LOG.warning("CPU worker exchange failed; cold rows of this step will be recomputed: %s", failure)
        return self._cold_spans

    def _take_results(self, gateway: WorkerGateway) -> frozenset[tuple[int, int]]:
        try:
            return gateway.collect(self._invocations, timeout_s=_RESULT_TIMEOUT_S)
        except ShmError as error:
            _LOG.warning("results of CPU workers are missing; their rows will be recomputed: %s", error)
            return frozenset((job.start, job.end) for jobs in self._invocations.values() for job in jobs)

    def abandon(self) -> None:
        """End a pass that raised: the workers complete its jobs, and the results are dropped."""
        self.deltas.release_workers()
        self.finish()


class Assistant:
    """Makes the passes of one engine. ``gateway`` None = no workers: layers only wait for loads."""

    def __init__(
        self, handover: Handover, backend: LoraBackend, gateway: WorkerGateway | None, num_layers: int
    ) -> None:
        self.handover = handover
        self._backend = backend
        self._gateway = gateway
        self._num_layers = num_layers

    @property
    def num_ready_workers(self) -> int:
        return 0 if self._gateway is None else self._gateway.num_ready_workers

    def begin(self, rows: Sequence[ColdRow], device: torch.device) -> AssistedPass:
        """Publish the workers' jobs and plan the device's part.

        Raises ``ShmError`` if workers that the plan relies on are not available; then no part of
        the pass may be computed.
        """
        reads = _reads(rows)
        invocations = self._invoke(rows, is_reading=bool(reads))
        batches: list[LoraBatch | None] = []
        arrivals: list[tuple[Arrival, ...]] = []
        # Between two split layers all layers have the same rows on the device.
        first_layer = 0
        for end_layer in sorted({row.first_layer for row in rows} - {0} | {self._num_layers}):
            batches += [_batch(rows, first_layer, device)] * (end_layer - first_layer)
            arrivals += [_arrivals(rows, layer) for layer in range(first_layer, end_layer)]
            first_layer = end_layer
        plan = ColdPlan(invocations, tuple(batches), tuple(arrivals), reads)
        deltas = ColdDeltas(self.handover, self._backend, plan)
        cold_spans = frozenset((row.start, row.end) for row in rows if row.arriving is not None)
        return AssistedPass(deltas, self.handover.exchange, self._gateway, invocations, cold_spans)

    def _invoke(self, rows: Sequence[ColdRow], *, is_reading: bool) -> dict[GroupKey, tuple[Invocation, ...]]:
        assisted = [
            AssistedRow(row.start, row.end, row.split_layer, row.arriving)
            for row in rows
            if row.arriving is not None and row.split_layer > 0
        ]
        if not assisted:
            return {}
        if self._gateway is None:
            raise ShmError("the plan needs CPU workers, and there are none")
        return self._gateway.invoke(assisted, is_reading=is_reading)


def _batch(rows: Sequence[ColdRow], layer: int, device: torch.device) -> LoraBatch | None:
    """The rows for which the device computes a layer's deltas."""
    table_rows = [row.table_row if row.first_layer <= layer else -1 for row in rows]
    starts = [row.start for row in rows] + [rows[-1].end]
    return lora_batch(table_rows, [row.max_rank for row in rows], starts, device)


def _reads(rows: Sequence[ColdRow]) -> dict[int, list[Callable[[], None]]]:
    """Begin the pass; by layer what its workers wait for: files that are not read yet."""
    reads = defaultdict[int, list[Callable[[], None]]](list)
    for row in rows:
        if row.arriving is not None:
            for layer in range(row.arriving.begin_pass(), row.split_layer):
                reads[layer].append(partial(row.arriving.await_read, layer))
    return reads


def _arrivals(rows: Sequence[ColdRow], layer: int) -> tuple[Arrival, ...]:
    """What the device's deltas of a layer wait for, each event once."""
    found = [
        row.arriving.arrival(layer) for row in rows if row.arriving is not None and row.split_layer <= layer
    ]
    return tuple({arrival.event: arrival for arrival in found if arrival is not None}.values())
