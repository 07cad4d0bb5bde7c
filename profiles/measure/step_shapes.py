"""Shapes of the measured whole steps, and the terms of their times. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..curve import Curve
from ..fit import Plane
from ..models import MachineModel
from ..step_time import num_keys

DECODE_CONTEXT_TOKENS = 32  # before each row of the curve over decode rows
_NUM_MIXED_DECODES = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """The rows of one forward pass."""

    num_tokens: tuple[int, ...]
    start_positions: tuple[int, ...]

    @property
    def name(self) -> str:
        """The step as readers see it."""
        ends = [s + n for s, n in zip(self.start_positions, self.num_tokens, strict=True)]
        return (
            f"a step of {len(self.num_tokens)} rows with {self.total_tokens} tokens, "
            f"{sum(ends)} with those before them"
        )

    @property
    def total_tokens(self) -> int:
        """Tokens to compute."""
        return sum(self.num_tokens)

    @property
    def num_decodes(self) -> int:
        """Rows of one token."""
        return self.num_tokens.count(1)

    @property
    def is_decode(self) -> bool:
        """Whether all rows decode."""
        return self.num_decodes == len(self.num_tokens)

    @property
    def decode_keys(self) -> int:
        """Keys that decode rows attend to."""
        return sum(start + 1 for n, start in self._rows() if n == 1)

    @property
    def prefill_keys(self) -> int:
        """Pairs of a prefill token and a key that it attends to."""
        return sum(num_keys(n, start) for n, start in self._rows() if n > 1)

    def _rows(self) -> Iterator[tuple[int, int]]:
        return zip(self.num_tokens, self.start_positions, strict=True)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes that are combined to steps; see ``step_shapes``."""

    decode_rows: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    max_kv_tokens: int  # of all rows of a step together


def step_shapes(sizes: StepSizes) -> list[StepShape]:
    """Decode rows, prefill chunks at any position of a row, and both; small steps first."""
    longest = sizes.context_tokens[-1]
    shapes = {
        StepShape((1,) * rows, (context - 1,) * rows)
        for rows in sizes.decode_rows
        for context in sizes.context_tokens
    }
    for tokens in sizes.chunk_tokens:
        ends = [end for end in (tokens, *sizes.context_tokens) if tokens <= end <= longest]
        shapes |= {StepShape((tokens,), (end - tokens,)) for end in ends}
        half = tokens // 2
        shapes.add(StepShape((half, half), (0, 0)))
        if tokens > 2 * _NUM_MIXED_DECODES:
            decodes = (1,) * _NUM_MIXED_DECODES
            before = (longest // _NUM_MIXED_DECODES,) * _NUM_MIXED_DECODES
            shapes.add(StepShape((*decodes, tokens - _NUM_MIXED_DECODES), (*before, 0)))
    fitting = [shape for shape in shapes if _kv_tokens(shape) <= max(longest, sizes.max_kv_tokens)]
    return sorted(fitting, key=lambda s: (s.total_tokens, s.prefill_keys + s.decode_keys, s.name))


def num_needed(shapes: Sequence[StepShape]) -> int:
    """The number of ``step_shapes`` up to the smallest with prefill: they show every term."""
    least = min(s.total_tokens for s in shapes if not s.is_decode)
    return sum(shape.total_tokens <= least for shape in shapes)


def first_of_size(shapes: Sequence[StepShape]) -> set[StepShape]:
    """One for each number of decode rows, and one for each other number of tokens."""
    return set({(s.is_decode, s.total_tokens): s for s in reversed(shapes)}.values())


def step_point(shape: StepShape, prefill_s: Curve, decode_s: Curve) -> tuple[float, ...]:
    """The terms that a step's time is fitted to.

    Args:
        shape: The step.
        prefill_s: Over tokens: one forward of one row without context.
        decode_s: Over rows: one forward with rows of one token, each with
            ``DECODE_CONTEXT_TOKENS`` before it.

    Returns:
        Seconds of the forward with as many tokens on these curves; rows; prefill tokens times keys,
        and keys of decode rows, both beyond those of that forward.
    """
    num_tokens, num_rows = shape.total_tokens, len(shape.num_tokens)
    if shape.is_decode:
        curve_s, curve_keys = decode_s.at(num_rows), _decode_curve_keys(num_rows)
        return curve_s, float(num_rows), 0.0, float(shape.decode_keys - curve_keys)
    beyond = shape.prefill_keys - num_keys(num_tokens, 0)
    return prefill_s.at(num_tokens), float(num_rows), float(beyond), float(shape.decode_keys)


def with_steps(
    model: MachineModel, plane: Plane, prefill_s: Curve, decode_s: Curve, typical: float
) -> MachineModel:
    """``model`` with the results of whole steps.

    Args:
        model: The model of the machine.
        plane: Fitted to ``step_point`` of the curves.
        prefill_s: See ``step_point``; the fastest times, as for ``decode_s``.
        decode_s: See ``step_point``.
        typical: Duration of a typical step, relative to the fastest like it. Predictions are
            multiplied by it.
    """
    intercept_s, row_s, prefill_key_s, decode_key_s = (
        typical * value for value in (plane.intercept, *plane.slopes[1:])
    )
    prefill_keys = [num_keys(int(num_tokens), 0) for num_tokens in prefill_s.x]
    decode_keys = [_decode_curve_keys(int(num_rows)) for num_rows in decode_s.x]
    return replace(
        model,
        step_s=_without_keys(prefill_s, typical, prefill_keys, prefill_key_s),
        decode_step_s=_without_keys(decode_s, typical, decode_keys, decode_key_s),
        host_step_s=intercept_s,
        host_row_s=row_s,
        prefill_s_per_token_key=prefill_key_s,
        decode_s_per_key=decode_key_s,
    )


def _decode_curve_keys(num_rows: int) -> int:
    """Keys of the rows with which the curve over decode rows was measured."""
    return num_rows * (DECODE_CONTEXT_TOKENS + 1)


def _without_keys(curve: Curve, typical: float, keys: Sequence[int], s_per_key: float) -> Curve:
    rest = [max(0.0, typical * y - s_per_key * number) for y, number in zip(curve.y, keys, strict=True)]
    return Curve.rising(dict(zip(curve.x, rest, strict=True)))


def _kv_tokens(shape: StepShape) -> int:
    return shape.total_tokens + sum(shape.start_positions)
