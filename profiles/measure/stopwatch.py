"""Times parts of a pass: on the CPU by the clock, on CUDA by events."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...gpu.forward.batch import DeltaPass


class Stopwatch(Protocol):
    """Marks moments of the device's current stream."""

    def mark(self) -> Any:
        """A mark of the moment after all enqueued operations."""
        ...

    def synchronize(self) -> None:
        """Wait until all marks have their times."""
        ...

    def between_s(self, first: Any, then: Any) -> float:
        """Seconds between two marks, after ``synchronize``."""
        ...


class HostStopwatch:
    """For devices that compute in the calling thread."""

    def mark(self) -> Any:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: all marks have their times."""

    def between_s(self, first: Any, then: Any) -> float:
        return float(then - first)


class CudaStopwatch:
    """For one CUDA device."""

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._where)

    def between_s(self, first: Any, then: Any) -> float:
        return float(first.elapsed_time(then)) / 1e3


def stopwatch_of(where: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CudaStopwatch(where) if where.type == "cuda" else HostStopwatch()


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """One input group of one layer in one pass, in seconds."""

    layer: int
    group: int
    begin_s: float  # until the copy of x is enqueued
    base_s: float  # the base products
    add_s: float  # until the deltas are added


class GroupTimer:
    """A ``DeltaPass`` around another one, or around none, that times every input group."""

    is_repeatable = False  # it records the times of its calls
    has_factors = False

    def __init__(self, stopwatch: Stopwatch, inner: DeltaPass | None) -> None:
        self._stopwatch = stopwatch
        self._inner = inner
        self._marks: list[tuple[Hashable, Any, Any, Any, Any]] = []
        self._begun: tuple[Any, Any] | None = None

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        before = self._stopwatch.mark()
        if self._inner is not None:
            self._inner.begin(group, x)
        self._begun = before, self._stopwatch.mark()

    def add(
        self, group: Hashable, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int]
    ) -> None:
        before = self._stopwatch.mark()
        if self._inner is not None:
            self._inner.add(group, x, ys, target_indices)
        after = self._stopwatch.mark()
        assert self._begun is not None, "a group is begun before its deltas are added"
        self._marks.append((group, *self._begun, before, after))

    def spans(self) -> tuple[GroupSpan, ...]:
        """The times of all groups; waits for the device."""
        self._stopwatch.synchronize()
        return tuple(self._span(*marks) for marks in self._marks)

    def _span(self, key: Hashable, m0: Any, m1: Any, m2: Any, m3: Any) -> GroupSpan:
        assert isinstance(key, tuple)
        layer, group = key
        between_s: Callable[[Any, Any], float] = self._stopwatch.between_s
        return GroupSpan(layer, group, between_s(m0, m1), between_s(m1, m2), between_s(m2, m3))
