"""The link between host and device: bandwidth against chunk size and concurrency.

Copies are timed by marks on the streams, so neither enqueuing nor polling counts, and in series
that are long against the resolution of a mark. Copies that are shorter than their enqueuing count
with the time of enqueuing, as a load cannot make them faster either.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...gpu.device.base import Stream
from ...gpu.device.host_memory import HostMemory, TorchDevice
from ...shm.segment import Segment
from ..busy import relative_spread
from ..fit import fit_line
from ..models import LinkModel
from ..profile import LinkPoint
from ..rounds import Case, Progress, Repeats, measure_rounds, medians
from .stopwatch import stopwatch_of

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 60.0
_LEAST_BYTES = 64 * 2**20  # of the copies of one measurement together


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The measurements, and the line through the single copies."""

    model: LinkModel
    points: tuple[LinkPoint, ...]
    spreads: tuple[float, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Copies:
    """Concurrent copies, each on a stream of its own."""

    chunk_bytes: int
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.concurrency} copies of {self.chunk_bytes} bytes"


class LinkBench:
    """The device's own copies from registered memory, paced if the options say so.

    Its streams are made by the constructor, before the device's first operation.
    """

    def __init__(self, device: TorchDevice, where: torch.device, concurrency: Sequence[int]) -> None:
        self._device = device
        self._where = where
        self._stopwatch = stopwatch_of(where)
        self._concurrency = tuple(concurrency)
        self._streams = [device.stream(f"link {index}") for index in range(max(concurrency))]

    def measure(self, chunk_bytes: Sequence[int], repeats: Repeats, on_progress: Progress) -> LinkTimes:
        """Copy chunks of all sizes, one at a time and several at a time."""
        num_streams, largest_bytes = len(self._streams), max(chunk_bytes)
        with contextlib.ExitStack() as stack:
            segment = stack.enter_context(Segment.create(num_streams * largest_bytes, kind="link profile"))
            memory = self._device.register(segment.pages, name="link profile")
            stack.callback(memory.close)
            target = torch.zeros(num_streams, largest_bytes, dtype=torch.uint8, device=self._where)
            return self._measure(memory, target, chunk_bytes, repeats, on_progress)

    def _measure(
        self,
        memory: HostMemory,
        target: torch.Tensor,
        chunk_bytes: Sequence[int],
        repeats: Repeats,
        on_progress: Progress,
    ) -> LinkTimes:
        plans = [_Copies(size, number) for size in chunk_bytes for number in self._concurrency]
        cases = [Case(plan.name, partial(self._copies_s, memory, target, plan)) for plan in plans]
        measured = measure_rounds(
            cases,
            repeats,
            num_needed=2 * len(self._concurrency),
            clock=time.perf_counter,
            on_progress=on_progress,
        )
        times_s = medians(measured.values)
        kept = [plan for plan in plans if plan.name in times_s]
        points = tuple(
            LinkPoint(p.chunk_bytes, p.concurrency, p.chunk_bytes * p.concurrency / times_s[p.name])
            for p in kept
        )
        return LinkTimes(
            _fit([(p.chunk_bytes, measured.values[p.name]) for p in kept if p.concurrency == 1]),
            points,
            tuple(relative_spread(values) for values in measured.values.values()),
            measured.left_out,
        )

    def _copies_s(self, memory: HostMemory, target: torch.Tensor, copies: _Copies) -> float:
        """Seconds of one copy, or of as many as are made at one time."""
        device, streams = self._device, self._streams[: copies.concurrency]
        size, stride = copies.chunk_bytes, target.shape[1]
        pairs = [
            (target[index, :size], memory.tensor(index * stride, (size,), torch.uint8))
            for index in range(copies.concurrency)
        ]
        # What paces a link holds it to the time of every single copy.
        is_paced = device.link.is_paced
        num_copies = 1 if is_paced else -(-_LEAST_BYTES // (size * copies.concurrency))
        marks: list[Any] = []
        self._mark(streams[0], marks)
        start = device.event()
        device.record(streams[0], start)
        for stream in streams[1:]:
            device.wait_event(stream, start)
        for _ in range(num_copies):
            for stream, (destination, source) in zip(streams, pairs, strict=True):
                device.copy(stream, destination, source)
        for stream in streams:
            self._mark(stream, marks)
        for stream in streams:
            device.synchronize(stream, timeout_s=_TIMEOUT_S)
        device.release_event(start)
        first, *ends = marks
        return max(self._stopwatch.between_s(first, end) for end in ends) / num_copies

    def _mark(self, stream: Stream, marks: list[Any]) -> None:
        self._device.launch(stream, lambda: marks.append(self._stopwatch.mark()))


def _fit(single: Sequence[tuple[int, list[float]]]) -> LinkModel:
    """The line through the bytes of single copies and the fastest of their times.

    The fastest, because other programs only add time. If even these do not grow with the bytes,
    other programs took longer than the copies. Then the time of the largest copy counts for its
    bytes alone, with a warning, as the machine also serves under such load.
    """
    fastest = [(float(size), min(times_s)) for size, times_s in single]
    sizes, times_s = zip(*fastest, strict=True)
    line = fit_line(sizes, times_s)
    if line.slope > 0.0:
        return LinkModel(1.0 / line.slope, line.intercept)
    size, time_s = max(fastest)
    _LOG.warning(
        "larger copies take no longer on the link (%s): other programs disturb it, or it is not a "
        "link; its rate is that of the largest",
        ", ".join(f"{size:.0f} bytes {time_s * 1e6:.3g} us" for size, time_s in fastest),
    )
    return LinkModel(size / time_s, 0.0)
