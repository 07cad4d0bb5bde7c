"""Measures whole steps, as an engine's executor runs them."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np

from ...gpu.execution.assemble import LoadedModel, make_executor
from ...gpu.execution.executor import AdapterFetch, DeviceExecutor
from ...gpu.execution.runner import ModelRunner
from ...gpu.execution.sampler import Sampler
from ...runtime.plan import (
    BASE_ADAPTER,
    AdapterTransfer,
    BlockId,
    BlockUpdate,
    NewRequest,
    Outcome,
    RequestId,
    StepId,
    StepPlan,
    StepResult,
    SubBatch,
    SubBatchKind,
)
from ...runtime.sampling import SamplingParams
from ..busy import relative_spread
from ..curve import Curve, median
from ..fit import fit_with_held_out
from ..profile import FitRecord, ProfileError
from ..rounds import Case, Progress, Repeats, measure_rounds
from .step_shapes import StepShape, first_of_size, num_needed, step_point

_SAMPLING = SamplingParams(max_tokens=1, seed=0)  # other fields have the defaults of a request


@dataclass(frozen=True, slots=True)
class WholeStepTimes:
    """Points with the plane fitted to them, and the fastest forwards, as in ``step_point``."""

    record: FitRecord
    prefill_s: Curve
    decode_s: Curve
    typical_over_fastest: float  # median over all repeats of all steps
    spreads: tuple[float, ...]
    left_out: tuple[str, ...]


def make_step_executor(loaded: LoadedModel, runner: ModelRunner, max_model_len: int) -> DeviceExecutor:
    """An executor for steps without adapters; it closes ``runner``."""
    fetch = AdapterFetch(_fetch_nothing, lambda _: None)
    return make_executor(loaded, runner, fetch, Sampler(()), max_model_len=max_model_len)


def _fetch_nothing(transfer: AdapterTransfer) -> NoReturn:
    raise AssertionError(f"adapter {transfer.adapter_id} is loaded, but no step has one")


class StepBench:
    """Requests of the base model that repeat one step each."""

    def __init__(
        self,
        executor: DeviceExecutor,
        forward_s: Callable[[StepShape], float],
        block_size: int,
        vocab_size: int,
    ) -> None:
        """``forward_s``: seconds of the forward in ``step_point`` of a step."""
        self._executor = executor
        self._forward_s = forward_s
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._request_ids = itertools.count()

    @staticmethod
    def num_blocks(shapes: Sequence[StepShape], block_size: int) -> int:
        """Blocks of KV that these steps need."""
        return max(sum(_blocks(shape, block_size)) for shape in shapes)

    def measure(
        self, shapes: Sequence[StepShape], prefill_s: Curve, repeats: Repeats, on_progress: Progress
    ) -> WholeStepTimes:
        """Measure the fastest of each; ``prefill_s``: see ``step_point``, measured before.

        The model is fitted to the fastest repeat of each step. Other programs make a step longer,
        never shorter, and the shares of rows are small against that, so medians of few repeats
        would show the other programs. The typical slowdown over the fastest repeat is taken from
        all repeats together. The forwards that steps are fitted to run beside them, as a machine
        drifts within seconds by more than a step adds to its forward.
        """
        first = first_of_size(shapes)
        measured = measure_rounds(
            [Case(s.name, partial(self._sample, s, self._announce(s), s in first)) for s in shapes],
            repeats,
            num_needed=num_needed(shapes),
            clock=time.perf_counter,
            on_progress=on_progress,
        )
        kept = [shape for shape in shapes if shape.name in measured.values]
        steps = [[one.step_s for one in measured.values[shape.name]] for shape in kept]
        forwards: dict[bool, dict[float, float]] = {True: {}, False: {}}  # by is_decode
        for shape in first.intersection(kept):
            forwards[shape.is_decode][shape.total_tokens] = min(
                one.forward_s for one in measured.values[shape.name]
            )
        curves = _at_level_of(prefill_s, forwards[False]), Curve.rising(forwards[True])
        points = tuple(step_point(shape, *curves) for shape in kept)
        y = tuple(min(values) for values in steps)
        return WholeStepTimes(
            FitRecord(fit_with_held_out(points, y, num_known=1), points, y),
            *curves,
            median([value / min(values) for values in steps for value in values]),
            tuple(relative_spread(values) for values in steps),
            measured.left_out,
        )

    def _announce(self, shape: StepShape) -> StepPlan:
        """Announce a request for each row to the executor; return the step."""
        request_ids = tuple(RequestId(next(self._request_ids)) for _ in shape.num_tokens)
        ends = [s + n for s, n in zip(shape.start_positions, shape.num_tokens, strict=True)]
        rng = np.random.default_rng(0)
        tokens = tuple(rng.integers(0, self._vocab_size, max(ends)).tolist())
        places = itertools.count()  # in the pool, which all steps share: contents do not matter
        blocks = [
            tuple(BlockId(next(places)) for _ in range(number)) for number in _blocks(shape, self._block_size)
        ]
        announced = StepPlan(
            StepId(0),
            (),
            tuple(
                NewRequest(request_id, tokens[:end], _SAMPLING, BASE_ADAPTER)
                for request_id, end in zip(request_ids, ends, strict=True)
            ),
            tuple(
                BlockUpdate(request_id, 0, own) for request_id, own in zip(request_ids, blocks, strict=True)
            ),
        )
        self._executor.submit(announced)
        self._executor.poll()
        is_decode = shape.num_decodes == len(request_ids)
        batch = SubBatch(
            SubBatchKind.DECODE if is_decode else SubBatchKind.MIXED,
            request_ids,
            shape.start_positions,
            shape.num_tokens,
            (True,) * len(request_ids),
        )
        return StepPlan(StepId(0), (batch,))

    def _sample(self, shape: StepShape, plan: StepPlan, has_forward: bool) -> "_Sample":
        forward_s = self._forward_s(shape) if has_forward else math.nan
        return _Sample(self._step_s(plan), forward_s)

    def _step_s(self, plan: StepPlan) -> float:
        """Seconds from plan to tokens. Raises ``ProfileError`` if the step fails."""
        start_s = time.perf_counter()
        self._executor.submit(plan)
        results = self._executor.poll()
        step_s = time.perf_counter() - start_s
        rows = [row for result in results if isinstance(result, StepResult) for row in result.rows]
        failed = [row.error for row in rows if row.outcome is not Outcome.TOKENS]
        if failed or len(rows) != len(plan.sub_batches[0].request_ids):
            raise ProfileError(f"a step cannot be measured: {failed[0] if failed else 'no result'}")
        return step_s


@dataclass(frozen=True, slots=True)
class _Sample:
    step_s: float
    forward_s: float  # run beside the step; NaN = not measured


def _at_level_of(curve: Curve, points: Mapping[float, float]) -> Curve:
    """``curve`` rescaled to pass through ``points``, with its shape between and beyond them."""
    level = median([y / curve.at(x) for x, y in points.items()])
    return Curve.rising({x: level * y for x, y in zip(curve.x, curve.y, strict=True)} | {**points})


def _blocks(shape: StepShape, block_size: int) -> list[int]:
    """By row."""
    ends = [s + n for s, n in zip(shape.start_positions, shape.num_tokens, strict=True)]
    return [-(-end // block_size) for end in ends]
