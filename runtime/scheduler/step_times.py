"""Predicts durations of steps, from the machine's profile or from earlier steps, and compares."""

import math
from collections.abc import Sequence
from typing import Protocol

from ...profiles.curve import Curve
from ...profiles.models import LinkModel, LoraModel, MachineModel
from ...profiles.step_time import RowCosts, forward_s, pass_s, row_costs
from ..plan import StepPlan, SubBatchKind
from ..request import Request

_SMOOTHING = 0.1  # weight of the newest step of a size
_NO_LINK_BYTES_PER_S = 1e15  # copies take no time
_PACE_S = 5.0  # of computing time, after which the weight of a step is 1/e


class StepTimes(Protocol):
    """Predicted seconds of steps on an otherwise idle engine."""

    @property
    def is_measured(self) -> bool:
        """Whether the times come from a profile."""

    def machine_model(self) -> MachineModel:
        """Return a model of the machine. Its times are 0 while nothing is known."""

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        """Return the time of prefilling ``num_tokens`` tokens; 0 while unknown."""

    def decode_step_s(self, num_rows: int) -> float:
        """Return the time of a step of ``num_rows`` decode rows; 0 while unknown."""

    def step_ended(self, num_tokens: int, duration_s: float) -> None: ...


class ProfiledTimes:
    """Predictions of a profile."""

    def __init__(self, model: MachineModel, max_step_tokens: int) -> None:
        self._model = model
        self._max_step_tokens = max_step_tokens

    @property
    def is_measured(self) -> bool:
        return True

    def machine_model(self) -> MachineModel:
        return self._model

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        starts = range(0, num_tokens, self._max_step_tokens)
        chunk_tokens = self._max_step_tokens
        return sum(
            forward_s(self._model, (min(chunk_tokens, num_tokens - start),), (start,), (adapter_bytes,))
            for start in starts
        )

    def decode_step_s(self, num_rows: int) -> float:
        return forward_s(self._model, (1,) * num_rows, (0,) * num_rows, (0,) * num_rows)

    def step_ended(self, num_tokens: int, duration_s: float) -> None:
        """Do nothing: the profile does not change."""


class LearnedTimes:
    """Mean times of steps of similar size, for machines without a profile."""

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        # By octave of tokens: running means of tokens and seconds.
        self._means: dict[int, tuple[float, float]] = {}
        self._curve: Curve | None = None  # through the means; None = outdated

    @property
    def is_measured(self) -> bool:
        return False

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        num_whole, num_left = divmod(num_tokens, self._max_step_tokens)
        whole_s = num_whole * self._at(self._max_step_tokens) if num_whole else 0.0
        return whole_s + (self._at(num_left) if num_left else 0.0)

    def decode_step_s(self, num_rows: int) -> float:
        return self._at(num_rows)

    def step_ended(self, num_tokens: int, duration_s: float) -> None:
        octave = num_tokens.bit_length()
        tokens, seconds = self._means.get(octave, (num_tokens, duration_s))
        self._means[octave] = (
            tokens + _SMOOTHING * (num_tokens - tokens),
            seconds + _SMOOTHING * (duration_s - seconds),
        )
        self._curve = None

    def machine_model(self) -> MachineModel:
        """Return a model in which the time of a step depends on its tokens only.

        The costs of adapters and contexts are included in the times of steps. Copies take no time.
        """
        return MachineModel(
            num_layers=1,
            step_s=self._steps() or Curve((1.0,), (0.0,)),
            groups=(),
            invocation_s=0.0,
            lora=LoraModel(
                decode_s_per_byte=0.0, decode_fixed_s=0.0, prefill_s_per_token_byte=0.0, prefill_fixed_s=0.0
            ),
            link=LinkModel(bytes_per_s=_NO_LINK_BYTES_PER_S, latency_s=0.0),
            num_workers=0,
        )

    def _at(self, num_tokens: int) -> float:
        curve = self._steps()
        return 0.0 if curve is None else curve.at(num_tokens)

    def _steps(self) -> Curve | None:
        """Return the curve of seconds over tokens; None while unknown."""
        if self._curve is None and self._means:
            self._curve = Curve.rising(dict(self._means.values()))
        return self._curve


def costs_of(model: MachineModel, rows: Sequence[tuple[Request, int]]) -> RowCosts:
    """Return the costs of rows with the next tokens of requests, so many of each."""
    return row_costs(
        model,
        [num_tokens for _, num_tokens in rows],
        [request.num_computed_tokens for request, _ in rows],
        [request.adapter_bytes for request, _ in rows],
    )


class StepPace:
    """Measured over predicted time of recent steps, summed, so long steps weigh more."""

    def __init__(self, model: MachineModel) -> None:
        self.model = model
        self._measured_s = 0.0
        self._predicted_s = 0.0

    @property
    def measured_over_predicted(self) -> float:
        """The ratio; 1 before the first measurement."""
        return self._measured_s / self._predicted_s if self._predicted_s > 0.0 else 1.0

    def step_ended(self, plan: StepPlan, rows: Sequence[Sequence[Request]], duration_s: float) -> None:
        """Include a step. ``rows``: requests of its sub-batches. O(rows).

        Steps that wait for workers or loads are ignored.
        """
        if any(batch.kind is SubBatchKind.ASSISTED for batch in plan.sub_batches):
            return
        kept = math.exp(-duration_s / _PACE_S)
        self._measured_s = kept * self._measured_s + duration_s
        self._predicted_s = kept * self._predicted_s + self._predict_s(plan, rows)

    def _predict_s(self, plan: StepPlan, rows: Sequence[Sequence[Request]]) -> float:
        model, num_rows = self.model, sum(map(len, rows))
        step_s = model.host_step_s + model.turn_s + model.turn_row_s * num_rows
        for batch, requests in zip(plan.sub_batches, rows, strict=True):
            adapter_bytes = [request.adapter_bytes for request in requests]
            step_s += pass_s(model, row_costs(model, batch.num_tokens, batch.start_positions, adapter_bytes))
        return step_s
