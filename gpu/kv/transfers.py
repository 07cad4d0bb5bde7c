"""Copies KV blocks between the device and host memory, concurrently with steps.

Transfers that requests wait for start at once. Prefetches run while no request waits for a copy, a
few batches at a time, so that a demand transfer passes those not yet started. Copies to the host
use the other direction of the link; their enqueued amount is limited, too, so that closing does not
wait long. Only the engine's thread enqueues.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...profiles.link import Direction
from ...runtime.plan import KvTransfer, TransferId, TransferResult
from ..device.base import DeviceError, DeviceTimeoutError, Event, Stream
from ..device.lost import raise_if_lost
from ..device.watch import EventWatch
from ..model.kv_pool import KvPool
from .host import HostKv

_LOG = logging.getLogger(__name__)

# A copy occupies the copy engine for at most this many bytes, so that other copies can interleave.
_PIECE_BYTES = 4 << 20
# A batch is enqueued together and has one event. Batches are enqueued between steps, so this limits
# how much a lane moves during one: 1 GiB, 32 MiB and 256 MiB.
_BATCH_BYTES = 16 << 20
_MAX_DEMAND_BATCHES = 64
_MAX_PREFETCH_BATCHES = 2
_MAX_TO_HOST_BATCHES = 16
# A stream skips everything behind a failure, so it ends at once.
_FAILURE_TIMEOUT_S = 0.05


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent blocks in adjacent slots."""

    block: int
    slot: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class _Moving:
    """A transfer that has not ended."""

    transfer: KvTransfer
    runs: deque[_Run]  # to be enqueued
    num_batches: int = 0  # enqueued, and not known to be done
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether none of its copies is running or will be started."""
        return not self.runs and not self.num_batches

    def fail(self, error: str) -> None:
        """Store the first error, and enqueue no more."""
        self.error = self.error or error
        self.runs.clear()


@dataclass(slots=True, eq=False)
class _Batch:
    moving: _Moving
    event: Event
    is_made: bool = False  # False after the event = a copy failed


@dataclass(slots=True, eq=False)
class _Lane:
    """Transfers in sequence on one stream."""

    stream: Stream
    max_batches: int
    waiting: deque[_Moving] = field(default_factory=deque)  # with runs to be enqueued
    under_way: deque[_Batch] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.under_way


class KvTransfers:
    """Runs ``KvTransfer``s. Used only by the engine's thread."""

    def __init__(self, host: HostKv, pool: KvPool, notify: Callable[[], None]) -> None:
        """Start the thread that polls copies.

        Args:
            host: The slots; closed with this object.
            pool: The blocks.
            notify: Called by that thread when ``take_results`` has something to do.
        """
        assert host.block_bytes == pool.block_bytes, (host.block_bytes, pool.block_bytes)
        self._host = host
        self._pool = pool
        self._device = host.device
        self._moving: dict[TransferId, _Moving] = {}
        self._demand = _Lane(host.demand, _MAX_DEMAND_BATCHES)
        self._prefetch = _Lane(host.prefetch, _MAX_PREFETCH_BATCHES)
        self._to_host = _Lane(host.to_host, _MAX_TO_HOST_BATCHES)
        self._watch = EventWatch(self._device.is_done, notify, host.watch_cpus)

    @property
    def is_idle(self) -> bool:
        return not self._moving

    def start(self, transfer: KvTransfer) -> None:
        """Start a transfer, with the next ``take_results``.

        It sees everything enqueued earlier on the kernels' stream, and does not overwrite data that
        is still read there.
        """
        transfer_id = transfer.transfer_id
        assert transfer_id not in self._moving, f"transfer {transfer_id} is started twice"
        moving = _Moving(transfer, deque(self._runs(transfer)))
        self._moving[transfer_id] = moving
        if transfer.direction is Direction.TO_HOST:
            lane = self._to_host
        else:
            lane = self._demand if transfer.is_demand else self._prefetch
        lane.waiting.append(moving)

    def take_section(self, section: int) -> None:
        """See ``HostKv``."""
        self._host.take_section(section)

    def give_section(self, section: int) -> None:
        """See ``HostKv``."""
        size = self._host.sections.slots_per_section
        for moving in self._moving.values():
            assert all(slot // size != section for slot in moving.transfer.host_slots), (section, moving)
        self._host.give_section(section)

    def promote(self, transfer_id: TransferId) -> None:
        """Make a prefetch urgent, as a request waits for it; ignores transfers that have ended."""
        moving = self._moving.get(transfer_id)
        if moving is not None and moving in self._prefetch.waiting:
            self._prefetch.waiting.remove(moving)
            self._demand.waiting.append(moving)

    def take_results(self, *, is_link_wanted: bool = False) -> list[TransferResult]:
        """Enqueue what may start now; return transfers that ended since the last call.

        ``is_link_wanted``: requests wait for other transfers to the device.

        Raises ``EngineDeadError`` if the device is lost, or if polling has failed.
        """
        self._watch.check()
        try:
            self._enqueue_waiting(is_link_wanted=is_link_wanted)
        except Exception as error:
            raise_if_lost(error)
            raise
        ended = [moving for moving in self._moving.values() if moving.has_ended]
        for moving in ended:
            del self._moving[moving.transfer.transfer_id]
        return [TransferResult(moving.transfer.transfer_id, moving.error) for moving in ended]

    @contextmanager
    def polling_suspended(self) -> Iterator[None]:
        """Suspend polling of copies while this thread computes and could not use the results."""
        with self._watch.paused():
            yield

    def close(self) -> None:
        """Drop transfers not yet started, wait for the rest with a deadline, free host memory.

        Idempotent.
        """
        self._watch.close()
        lanes = (self._demand, self._prefetch, self._to_host)
        for lane in lanes:
            lane.waiting.clear()
        self._host.close()
        for lane in lanes:
            for batch in lane.under_way:
                self._device.release_event(batch.event)
            lane.under_way.clear()
        self._moving.clear()

    def _enqueue_waiting(self, *, is_link_wanted: bool) -> None:
        for lane in (self._demand, self._prefetch, self._to_host):
            self._poll(lane)
        self._advance(self._demand)
        if self._demand.is_idle and not is_link_wanted:
            self._advance(self._prefetch)
        self._advance(self._to_host)

    def _poll(self, lane: _Lane) -> None:
        """Handle batches that are done."""
        while lane.under_way and self._device.is_done(lane.under_way[0].event):
            batch = lane.under_way.popleft()
            self._watch.discard(batch.event)
            self._device.release_event(batch.event)
            batch.moving.num_batches -= 1
            if not batch.is_made:
                batch.moving.fail(self._failure_of(lane.stream))

    def _failure_of(self, stream: Stream) -> str:
        """Clear the failure of a stream and return its text."""
        try:
            self._device.synchronize(stream, timeout_s=_FAILURE_TIMEOUT_S)
        except DeviceTimeoutError as error:  # already reported, and other copies are running
            _LOG.debug("%s", error)
        except DeviceError as error:
            raise_if_lost(error)
            return f"copying KV blocks failed: {error}"
        return "copying KV blocks failed: an earlier copy on the same stream failed"

    def _advance(self, lane: _Lane) -> None:
        """Enqueue batches up to the lane's limit."""
        while lane.waiting and len(lane.under_way) < lane.max_batches:
            moving = lane.waiting[0]
            if moving.runs:
                self._enqueue(lane, moving)
            if not moving.runs:
                lane.waiting.popleft()

    def _enqueue(self, lane: _Lane, moving: _Moving) -> None:
        """Copy the transfer's next blocks and record an event, also after an error."""
        batch = _Batch(moving, self._device.event())

        def make() -> None:
            batch.is_made = True

        try:
            self._await_kernels(lane.stream)
            num_bytes = 0
            while moving.runs and num_bytes < _BATCH_BYTES:
                run = moving.runs.popleft()
                self._copy(lane.stream, run, moving.transfer.direction)
                num_bytes += run.num_blocks * self._host.block_bytes
            # Skipped if an earlier operation of the stream failed.
            self._device.launch(lane.stream, make)
        except Exception as error:  # fails this transfer once its enqueued copies are done
            raise_if_lost(error)
            _LOG.exception("could not copy KV blocks; the transfer fails")
            moving.fail(f"copying KV blocks failed: {type(error).__name__}: {error}")
        self._device.record(lane.stream, batch.event)
        moving.num_batches += 1
        lane.under_way.append(batch)
        self._watch.add(batch.event)

    def _await_kernels(self, stream: Stream) -> None:
        """Hold the stream until the kernels enqueued so far are done: they use the blocks."""
        if self._host.compute is None:
            return
        event = self._device.event()
        self._device.record(self._host.compute, event)
        self._device.wait_event(stream, event)
        self._device.release_event(event)

    def _copy(self, stream: Stream, run: _Run, direction: Direction) -> None:
        """Copy adjacent blocks, in pieces."""
        on_device = self._pool.bytes_of(run.block, run.num_blocks)
        on_host = self._host.bytes_of(run.slot, run.num_blocks)
        for start in range(0, on_host.numel(), _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, on_host.numel())
            if direction is Direction.TO_HOST:
                self._device.copy(stream, on_host[start:end], on_device[start:end])
            else:
                self._device.copy(stream, on_device[start:end], on_host[start:end])

    def _runs(self, transfer: KvTransfer) -> Sequence[_Run]:
        """Its blocks, grouped into adjacent runs, as every copy has a fixed cost."""
        runs: list[_Run] = []
        max_blocks = math.ceil(_PIECE_BYTES / self._host.block_bytes)
        for block, slot in zip(transfer.block_ids, transfer.host_slots, strict=True):
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.num_blocks < max_blocks
                and block == last.block + last.num_blocks
                and slot == last.slot + last.num_blocks
                and self._host.follows(slot)
            ):
                runs[-1] = _Run(last.block, last.slot, last.num_blocks + 1)
            else:
                runs.append(_Run(block, slot, 1))
        return runs
