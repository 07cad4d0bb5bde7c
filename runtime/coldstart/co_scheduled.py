"""What a chunk of a cold request shares its step with, as the planner sees it. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from ...profiles.models import MachineModel
from ...profiles.step_time import pass_s, row_costs
from ..scheduler.cold import StepRows
from .cold import EMPTY, ColdPart, CoScheduledRows


def co_scheduled_rows(
    model: MachineModel, rows: StepRows, cold: Sequence[ColdPart]
) -> CoScheduledRows:
    """All rows that ``rows`` has so far; ``cold``: those of its cold chunks."""
    co_scheduled = co_scheduled_decodes(model, rows)
    chunks = row_costs(
        model,
        [number for _, number in rows.chunks],
        [request.num_computed_tokens for request, _ in rows.chunks],
        [request.adapter_bytes for request, _ in rows.chunks],
    )
    return replace(co_scheduled, warm=co_scheduled.warm.plus(chunks), cold=tuple(cold))


def co_scheduled_decodes(model: MachineModel, rows: StepRows) -> CoScheduledRows:
    """Only the rows that decode: these will be in later steps, too."""
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
