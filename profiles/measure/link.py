"""The link between host and device: bandwidth against chunk size and concurrency."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...gpu.device.base import Stream
from ...gpu.device.host_memory import HostMemory, TorchDevice
from ...shm.segment import Segment
from ..busy import relative_spread
from ..curve import median
from ..fit import fit_line
from ..models import LinkModel
from ..profile import LinkPoint
from ..rounds import Case, Progress, Repeats, measure_rounds

_TIMEOUT_S = 60.0
_NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What was measured, and the line through the single copies."""

    model: LinkModel
    points: tuple[LinkPoint, ...]
    spreads: tuple[float, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies at one time, each on a stream of its own."""

    chunk_bytes: int
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.concurrency} copies of {self.chunk_bytes} bytes"


class LinkBench:
    """The device's own copies from registered memory, paced if the options say so.

    Its streams are made at once: before the device's first operation.
    """

    def __init__(
        self, device: TorchDevice, where: torch.device, concurrency: Sequence[int]
    ) -> None:
        self._device = device
        self._where = where
        self._concurrency = tuple(concurrency)
        self._streams = [device.stream(f"link {index}") for index in range(max(concurrency))]

    def measure(
        self, chunk_bytes: Sequence[int], repeats: Repeats, on_progress: Progress
    ) -> LinkTimes:
        """Copy chunks of all sizes, one at a time and several at a time."""
        num_streams, largest_bytes = len(self._streams), max(chunk_bytes)
        with contextlib.ExitStack() as stack:
            segment = stack.enter_context(
                Segment.create(num_streams * largest_bytes, kind="link profile")
            )
            memory = self._device.register(segment.pages, name="link profile")
            stack.callback(memory.close)
            target = torch.zeros(num_streams, largest_bytes, dtype=torch.uint8, device=self._where)
            return self._measure(memory, target, chunk_bytes, repeats, on_progress)

    def _measure(
        self, memory: HostMemory, target: torch.Tensor, chunk_bytes: Sequence[int],
        repeats: Repeats, on_progress: Progress,
    ) -> LinkTimes:  # fmt: skip
        plans = [_Copies(size, number) for size in chunk_bytes for number in self._concurrency]
        cases = [Case(plan.name, partial(self._copies_s, memory, target, plan)) for plan in plans]
        nothing = Case(_NOTHING, partial(self._copies_s, memory, target, _Copies(0, 1)))
        measured = measure_rounds(
            [nothing, *cases], repeats, num_needed=2 * len(self._concurrency) + 1,
            clock=time.perf_counter, on_progress=on_progress,
        )  # fmt: skip
        times_s = {name: median(values) for name, values in measured.values.items()}
        kept = [plan for plan in plans if plan.name in times_s]
        # Enqueuing and asking for the end is not the link's.
        idle_s = times_s[_NOTHING]
        single = [(p.chunk_bytes, times_s[p.name]) for p in kept if p.concurrency == 1]
        line = fit_line([float(size) for size, _ in single], [seconds for _, seconds in single])
        points = tuple(
            LinkPoint(p.chunk_bytes, p.concurrency, p.chunk_bytes * p.concurrency / times_s[p.name])
            for p in kept
        )
        # A slope of nothing would be an infinitely fast link: copies too small to tell.
        fastest = max(point.bytes_per_s for point in points)
        bytes_per_s = 1.0 / line.slope if line.slope > 0 else fastest
        return LinkTimes(
            LinkModel(bytes_per_s, max(0.0, line.intercept - idle_s)),
            points,
            tuple(relative_spread(values) for values in measured.values.values()),
            measured.left_out,
        )

    def _copies_s(self, memory: HostMemory, target: torch.Tensor, copies: _Copies) -> float:
        streams: Sequence[Stream] = self._streams[: copies.concurrency]
        stride = target.shape[1]
        start_s = time.perf_counter()
        for index, stream in enumerate(streams):
            if copies.chunk_bytes:
                source = memory.tensor(index * stride, (copies.chunk_bytes,), torch.uint8)
                self._device.copy(stream, target[index, : copies.chunk_bytes], source)
        for stream in streams:
            self._device.synchronize(stream, timeout_s=_TIMEOUT_S)
        return time.perf_counter() - start_s
