"""What a chunk of a cold request shares its step with, as the planner sees it. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from ...profiles.models import MachineModel
from ...profiles.step_time import pass_s, row_costs
from ..scheduler.cold import StepRows
from .cold import NOBODY, ColdPart, Company


def company_of_step(model: MachineModel, rows: StepRows, cold: Sequence[ColdPart]) -> Company:
    """All rows that ``rows`` has so far; ``cold``: those of its cold chunks."""
    company = company_of_decodes(model, rows)
    chunks = row_costs(
        model,
        [number for _, number in rows.chunks],
        [request.num_computed_tokens for request, _ in rows.chunks],
        [request.adapter_bytes for request, _ in rows.chunks],
    )
    return replace(company, warm=company.warm.plus(chunks), cold=tuple(cold))


def company_of_decodes(model: MachineModel, rows: StepRows) -> Company:
    """Only the rows that decode: these will be in later steps, too."""
    if not rows.decodes:
        return NOBODY
    costs = row_costs(
        model,
        [1] * len(rows.decodes),
        [request.num_computed_tokens for request in rows.decodes],
        [request.adapter_bytes for request in rows.decodes],
    )
    return Company(apart_s=pass_s(model, costs)) if rows.is_decode_apart else Company(costs)
