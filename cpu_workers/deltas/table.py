"""Measured times of back ends for deltas: predicts the fastest one and its time. Pure lookup."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The shape of a job, which determines its time.

    ``rank_sum``: ranks of all targets. ``num_values``: values of all their matrices A and B, so
    ``num_values / rank_sum`` is the width that is read and written per rank.
    """

    num_tokens: int
    rank_sum: int
    num_values: int

    @property
    def width(self) -> float:
        """Values of A and B per rank."""
        return self.num_values / self.rank_sum if self.rank_sum else 0.0


@dataclass(frozen=True, slots=True)
class DeltaTime:
    """Time of one job of one back end, in microseconds."""

    backend: str
    shape: DeltaShape
    time_us: float


@dataclass(frozen=True, slots=True)
class DeltaTable:
    """Measured times. Every back end in it has the same shapes.

    A time is predicted in two steps. First the nearest measured (rank sum, width), by ratio, is
    taken; of equally near ones the first measured. Between its numbers of tokens the time is
    interpolated, beyond the last it is extrapolated with the last slope. Then the time without the
    fixed cost of a call is scaled by the values of A and B, to which arithmetic and memory traffic
    are proportional.
    """

    points: tuple[DeltaTime, ...]

    def __post_init__(self) -> None:
        assert self.points, "a table needs a measured point"
        names = self.backends
        for shape in {point.shape for point in self.points}:
            measured = [point.backend for point in self.points if point.shape == shape]
            assert sorted(measured) == sorted(names), (shape, measured)

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the measured back ends, in the order of the points."""
        return tuple(dict.fromkeys(point.backend for point in self.points))

    def best(self, shape: DeltaShape) -> str:
        """The back end with the shortest predicted time; the first measured one wins a tie."""
        return min(self.backends, key=lambda name: self.predicted_us(name, shape))

    def predicted_us(self, backend: str, shape: DeltaShape) -> float:
        """Microseconds of a job. Raises ``KeyError`` for a back end that was not measured."""
        points = [point for point in self.points if point.backend == backend]
        if not points:
            raise KeyError(backend)
        # The smallest job consists almost only of the call.
        overhead_us = min(point.time_us for point in points)
        if shape.num_values == 0:
            return overhead_us
        nearest = min(points, key=lambda point: _distance(shape, point.shape)).shape
        curve = sorted(
            (point.shape.num_tokens, point.time_us)
            for point in points
            if point.shape.rank_sum == nearest.rank_sum and point.shape.num_values == nearest.num_values
        )
        at_point_us = _interpolated(shape.num_tokens, curve)
        scale = shape.num_values / nearest.num_values
        return overhead_us + max(0.0, at_point_us - overhead_us) * scale

    def without_losers(self, keep: str, margin: float) -> "DeltaTable":
        """Only ``keep`` and back ends somewhere faster by more than ``margin`` (0.1 = 10 %).

        Other back ends would only cost memory.
        """
        reference = {p.shape: p.time_us for p in self.points if p.backend == keep}
        winners = {p.backend for p in self.points if p.time_us * (1 + margin) < reference[p.shape]} | {keep}
        return DeltaTable(tuple(p for p in self.points if p.backend in winners))

    def to_json(self) -> dict[str, Any]:
        """The table as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "DeltaTable":
        points: Iterable[dict[str, Any]] = values["points"]
        return cls(
            tuple(
                DeltaTime(point["backend"], DeltaShape(**point["shape"]), point["time_us"])
                for point in points
            )
        )


def _distance(a: DeltaShape, b: DeltaShape) -> float:
    return abs(math.log(a.rank_sum / b.rank_sum)) + abs(math.log(a.width / b.width))


def _interpolated(x: int, curve: list[tuple[int, float]]) -> float:
    """Piecewise linear through the points of ``curve``; constant before them."""
    if x <= curve[0][0] or len(curve) == 1:
        return curve[0][1] * max(1.0, x / curve[0][0])
    segment = next((i for i in range(1, len(curve) - 1) if x <= curve[i][0]), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[segment - 1], curve[segment]
    # Noise must not make a longer job look shorter than the longest measured.
    slope = (y1 - y0) / (x1 - x0)
    return y1 + max(0.0, slope) * (x - x1) if x > x1 else y0 + slope * (x - x0)
