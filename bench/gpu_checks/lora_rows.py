"""Triton's LoRA products in bf16 against float32, and their time: decode and prefill.

Tolerance, per element: u |reference| + 4e-6 times the same sums over absolute values, u = 2^-8: the
result is rounded to bf16 once, all sums are float32's, in any order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from corun.gpu.lora.base import LoraBackend
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from corun.gpu.step import LoraBatch

from gpu_checks.kernel_timing import Measured, measure

_U = 2.0**-8
_ACCUMULATION = 4e-6
_SCALING = 0.5


@dataclass(frozen=True, slots=True)
class LoraShape:
    """One linear, and how much weight there has to be in all, so that caches stay cold."""

    in_features: int
    out_features: int
    min_weight_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens in a row that share an adapter of their own, of this rank."""

    num_tokens: int
    rank: int


MakeBackend = Callable[[LoraTable], LoraBackend]
_MAX_TARGETS = 1024


def measure_lora(
    make_backend: MakeBackend,
    shape: LoraShape,
    segments: Sequence[Segment],
    device: torch.device,
) -> Measured:
    """Correctness on one target, then the time over as many targets as keep caches cold."""
    problem = _Problem(make_backend, shape, segments, device)
    found = problem.base.clone()
    problem.add_delta(found, 0)
    expected, magnitude = problem.reference(scaling=_SCALING)
    tolerance = _U * expected.abs() + _ACCUMULATION * magnitude
    error = _ratio(found, expected, tolerance)
    # A delta of another scaling must be outside, or the check sees nothing.
    control = _ratio(found, problem.reference(scaling=1.1 * _SCALING)[0], tolerance)
    out = problem.base.clone()
    times = measure(
        [partial(problem.add_delta, out, target) for target in range(problem.num_targets)],
        device,
    )
    return Measured(error, control, problem.num_bytes, problem.num_flops, times)


def _ratio(found: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> float:
    ratios = ((found.float() - expected).abs() / tolerance).nan_to_num(nan=torch.inf)
    return float(ratios.max())


class _Problem:
    """One adapter for each segment, with the same shapes for every target."""

    def __init__(
        self,
        make_backend: MakeBackend,
        shape: LoraShape,
        segments: Sequence[Segment],
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._segments = segments
        width = shape.in_features + shape.out_features
        weight_bytes = 2 * width * sum(segment.rank for segment in segments)
        self.num_targets = min(_MAX_TARGETS, max(2, -(-shape.min_weight_bytes // weight_bytes)))
        self._table = LoraTable(self.num_targets, len(segments), device)
        self._backend = make_backend(self._table)
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*sizes: int) -> torch.Tensor:
            made = torch.empty(sizes, dtype=torch.bfloat16, device=device)
            return made.normal_(generator=generator)

        self._matrices = []
        rows = []
        for segment in segments:
            # As trained ones: A keeps the size of x, B is small.
            pairs = [
                (
                    normal(segment.rank, shape.in_features) * shape.in_features**-0.5,
                    normal(shape.out_features, segment.rank) * segment.rank**-0.5,
                )
                for _ in range(self.num_targets)
            ]
            self._matrices.append(pairs[0])
            packed = {i: self._backend.pack(a, b, _SCALING) for i, (a, b) in enumerate(pairs)}
            rows.append(self._table.add(DeviceAdapter(packed)))
        self._batch = _batch(segments, rows, device)
        self._num_tokens = self._batch.segment_ends_host[-1]
        self._x = normal(self._num_tokens, shape.in_features)
        self.base = normal(self._num_tokens, shape.out_features)

    @property
    def num_bytes(self) -> int:
        """Of one target: weights and x read, y read and written."""
        shape = self._shape
        weights = sum(s.rank for s in self._segments) * (shape.in_features + shape.out_features)
        return 2 * (weights + self._num_tokens * (shape.in_features + 2 * shape.out_features))

    @property
    def num_flops(self) -> int:
        """Of both products of one target."""
        width = self._shape.in_features + self._shape.out_features
        return 2 * width * sum(s.num_tokens * s.rank for s in self._segments)

    def add_delta(self, y: torch.Tensor, target: int) -> None:
        """One call."""
        self._backend.add_delta(self._x, y, target, self._batch)

    def reference(self, *, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 result of the first target, and the same sums over absolute values."""
        expected = self.base.float()
        magnitude = expected.abs()
        starts, ends = self._batch.segment_starts_host, self._batch.segment_ends_host
        for (a, b), start, end in zip(self._matrices, starts, ends, strict=True):
            x, a32, b32 = self._x[start:end].float(), a.float(), b.float()
            expected[start:end] += scaling * (x @ a32.t()) @ b32.t()
            magnitude[start:end] += scaling * (x.abs() @ a32.abs().t()) @ b32.abs().t()
        return expected, magnitude


def _batch(segments: Sequence[Segment], rows: Sequence[int], device: torch.device) -> LoraBatch:
    starts, ends, position = [], [], 0
    for segment in segments:
        starts.append(position)
        position += segment.num_tokens
        ends.append(position)

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return LoraBatch(
        segment_starts=tensor(starts),
        segment_ends=tensor(ends),
        table_rows=tensor(rows),
        segment_starts_host=tuple(starts),
        segment_ends_host=tuple(ends),
        table_rows_host=tuple(rows),
        max_segment_tokens=max(segment.num_tokens for segment in segments),
        max_rank=max(segment.rank for segment in segments),
    )
