"""Jobs as a worker gets them, and bare ones: x, y and the regions of all layers of one adapter."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from corun.cpu_workers.deltas.base import ITEM_BYTES, DeltaJob
from corun.cpu_workers.deltas.select import Deltas
from corun.cpu_workers.kernels.lora.regions import Matrices, TargetShape, plan_packed, write_region
from corun.shm.region import Region, read_header
from corun.shm.segment import Segment
from paired import seconds


@dataclass(frozen=True)
class Shapes:
    """Frozen: figures of two runs compare only if these agree."""

    in_features: int = 4096
    columns: tuple[int, ...] = (4096, 1024, 1024)  # q, k, v
    num_tokens: int = 64
    ranks: tuple[int, ...] = (16, 64)
    num_layers: int = 32
    curve_ranks: tuple[int, ...] = (8, 16, 32, 64, 128)
    curve_tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    seed: int = 0


class Memory:
    """Where x, y and the regions lie: segments of shared memory, or private memory."""

    def __init__(self, sizes_bytes: dict[str, int], *, is_shared: bool) -> None:
        self._segments: list[Segment] = []
        self.buffers: dict[str, np.ndarray] = {}
        for name, num_bytes in sizes_bytes.items():
            if is_shared:
                # Mapped a second time, as by a worker: the creator is another process there.
                with Segment.create(num_bytes, kind=name) as created:
                    segment = Segment.attach(created.fd, kind=name)
                self._segments.append(segment)
                self.buffers[name] = segment.view(np.uint8, 0, num_bytes)
            else:
                pages = np.zeros(num_bytes + 4096, np.uint8)
                start = -pages.ctypes.data % 4096
                self.buffers[name] = pages[start : start + num_bytes]
        for buffer in self.buffers.values():
            buffer[:] = 0  # every page exists before anything is measured
        self.addresses = {name: int(b.ctypes.data) for name, b in self.buffers.items()}

    def close(self) -> None:
        """Drop the views, then the segments."""
        self.buffers.clear()
        for segment in self._segments:
            segment.close()


class Walk:
    """Jobs of all layers of one adapter, one after the other."""

    def __init__(self, shapes: Shapes, rank: int, tokens: int, *, is_shared: bool) -> None:
        targets = [TargetShape(rank, n, 0.5) for n in shapes.columns]
        self.region: Region = plan_packed(shapes.in_features, ITEM_BYTES, targets)
        self.num_layers, self.num_tokens = shapes.num_layers, tokens
        self._x_bytes = tokens * shapes.in_features * ITEM_BYTES
        self._y_bytes = tokens * self.region.y_columns * ITEM_BYTES
        self._memory = Memory(
            {
                "bench arena": self.region.num_bytes * self.num_layers,
                "bench x": self._x_bytes * self.num_layers,
                "bench y": self._y_bytes * self.num_layers,
            },
            is_shared=is_shared,
        )
        self._fill(shapes, rank)
        self._next = itertools.cycle(range(self.num_layers))

    def _fill(self, shapes: Shapes, rank: int) -> None:
        rng = np.random.default_rng(shapes.seed)
        matrices = [
            Matrices(_random(rng, rank, shapes.in_features), _random(rng, n, rank)) for n in shapes.columns
        ]
        arena, x = (self._memory.buffers[name] for name in ("bench arena", "bench x"))
        first = arena[: self.region.num_bytes]
        write_region(self.region, matrices, first.data)
        arena.reshape(self.num_layers, -1)[1:] = first
        x.view(np.uint16)[:] = _random(rng, 1, x.size // ITEM_BYTES)[0]

    def region_bytes(self, layer: int) -> memoryview:
        """The arena from a layer's region on."""
        return self._memory.buffers["bench arena"].data[layer * self.region.num_bytes :]

    def job(self, layer: int, region: Region) -> DeltaJob:
        """All tokens of one layer."""
        addresses = self._memory.addresses
        return DeltaJob(
            region,
            addresses["bench arena"] + layer * self.region.num_bytes,
            addresses["bench x"] + layer * self._x_bytes,
            self._x_bytes // self.num_tokens,
            addresses["bench y"] + layer * self._y_bytes,
            self._y_bytes // self.num_tokens,
            self.num_tokens,
        )

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def as_worker_us(self, deltas: Deltas, num_jobs: int) -> float:
        """Median microseconds of a job, from its header on."""
        return _median_us(num_jobs, lambda: self._step(deltas))

    def _step(self, deltas: Deltas) -> None:
        layer = next(self._next)
        deltas.compute(self.job(layer, read_header(self.region_bytes(layer))))

    def bare_us(self, deltas: Deltas, num_jobs: int, num_layers: int) -> float:
        """Median microseconds of the back end alone, walking over ``num_layers`` layers."""
        backend = deltas.choose(self.region, self.num_tokens)
        jobs = itertools.cycle([self.job(layer, self.region) for layer in range(num_layers)])
        return _median_us(num_jobs, lambda: backend.compute(next(jobs)))


def _median_us(num_jobs: int, work: Callable[[], None]) -> float:
    return 1e6 * statistics.median(seconds(work) for _ in range(num_jobs))


def _random(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    values = rng.standard_normal((rows, columns), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
