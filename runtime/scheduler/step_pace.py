"""Compares the duration of recent steps with the model of the machine. Pure."""

import math
from collections.abc import Sequence

from ...profiles.models import MachineModel
from ...profiles.step_time import pass_s, row_costs
from ..plan import StepPlan, SubBatchKind
from ..request import Request

_MEMORY_S = 5.0  # of computing time, after which the weight of a step is 1/e


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

    def step_ended(
        self, plan: StepPlan, rows: Sequence[Sequence[Request]], duration_s: float
    ) -> None:
        """Include a step. ``rows``: requests of its sub-batches. O(rows).

        Steps that wait for workers or loads are ignored.
        """
        if any(batch.kind is SubBatchKind.ASSISTED for batch in plan.sub_batches):
            return
        kept = math.exp(-duration_s / _MEMORY_S)
        self._measured_s = kept * self._measured_s + duration_s
        self._predicted_s = kept * self._predicted_s + self._predict_s(plan, rows)

    def _predict_s(self, plan: StepPlan, rows: Sequence[Sequence[Request]]) -> float:
        model, num_rows = self.model, sum(map(len, rows))
        step_s = model.host_step_s + model.turn_s + model.turn_row_s * num_rows
        for batch, requests in zip(plan.sub_batches, rows, strict=True):
            adapter_bytes = [request.adapter_bytes for request in requests]
            step_s += pass_s(
                model, row_costs(model, batch.num_tokens, batch.start_positions, adapter_bytes)
            )
        return step_s
