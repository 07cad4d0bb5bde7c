"""The rows that share a step with a chunk of a cold request, as the planner sees them. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from ...profiles.models import MachineModel
from ...profiles.step_time import pass_s, row_costs
from ..scheduler.cold import StepRows
from .cold import EMPTY, ColdPart, CoScheduledRows


def co_scheduled_rows(
    model: MachineModel, rows: StepRows, cold: Sequence[ColdPart]
) -> CoScheduledRows:
    """Return all rows of ``rows``. ``cold``: its cold chunks."""
    co_scheduled = co_scheduled_decodes(model, rows)
    chunks = row_costs(
        model,
        [number for _, number in rows.chunks],
        [request.num_computed_tokens for request, _ in rows.chunks],
        [request.adapter_bytes for request, _ in rows.chunks],
    )
    return replace(co_scheduled, warm=co_scheduled.warm.plus(chunks), cold=tuple(cold))


def co_scheduled_decodes(model: MachineModel, rows: StepRows) -> CoScheduledRows:
    """Return only the decode rows, which later steps have, too."""
    if not rows.decodes:
        return EMPTY
    costs = row_costs(
        model,
        [1] * len(rows.decodes),
        [request.num_computed_tokens for request in rows.decodes],
        [request.adapter_bytes for request in rows.decodes],
    )
    return (
        CoScheduledRows(separate_decode_s=pass_s(model, costs))
        if rows.is_decode_separate
        else CoScheduledRows(costs)
    )
