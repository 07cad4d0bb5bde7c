"""How long a simulated step takes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...profiles.models import MachineModel
from ...profiles.step_time import RowCosts, pass_s, row_costs
from ..adapter import AdapterFacts
from ..coldstart.cold import AdapterShape, ColdPart, ColdRequest, CoScheduledRows, layer_times
from ..coldstart.link import by_layer
from ..coldstart.predict import end_of
from ..plan import SubBatch


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row with deltas partly from workers, or with an adapter that is still loading."""

    row: int  # in its sub-batch
    facts: AdapterFacts
    arrival_s: Sequence[float]  # of each layer group, from the step's start


@dataclass(frozen=True, slots=True)
class Pass:
    """A sub-batch of a step: one forward pass."""

    batch: SubBatch
    adapter_bytes: Sequence[int]  # by row; 0 = the base model
    waiting: Sequence[WaitingRow] = ()


def step_s(model: MachineModel, passes: Sequence[Pass]) -> float:
    """Duration of a step of these passes, one after the other; at most one has waiting rows.

    That pass takes as long as the planner predicts: its layers run one after the other, each
    bounded by its products, the workers' deltas and the arrival of its layer group.
    """
    separate_s = sum(pass_s(model, _costs(model, one)) for one in passes if not one.waiting)
    with_waiting = [one for one in passes if one.waiting]
    if not with_waiting:
        return model.host_step_s + separate_s
    # There would be more if rows were computed apart after a failure; here nothing fails.
    (held,) = with_waiting
    first, *more = (_part(held.batch, row) for row in held.waiting)
    request = ColdRequest(
        num_tokens=first.num_tokens,
        adapter=first.adapter,
        ready_s=first.ready_s,
        max_chunk_tokens=first.num_tokens,
        start_position=first.start_position,
        num_workers=model.num_workers,
    )
    co_scheduled = CoScheduledRows(_costs(model, held), separate_s, tuple(more))
    times = layer_times(model, request, first.num_tokens, co_scheduled)
    return separate_s + end_of(times, first.split_layer)


def _costs(model: MachineModel, one: Pass) -> RowCosts:
    """Costs of the rows that do not wait."""
    batch = one.batch
    if not one.waiting:
        return row_costs(model, batch.num_tokens, batch.start_positions, one.adapter_bytes)
    waiting = {row.row for row in one.waiting}
    rows = [row for row in range(len(batch.num_tokens)) if row not in waiting]
    return row_costs(
        model,
        [batch.num_tokens[row] for row in rows],
        [batch.start_positions[row] for row in rows],
        [one.adapter_bytes[row] for row in rows],
    )


def _part(batch: SubBatch, waiting: WaitingRow) -> ColdPart:
    """A waiting row in the planner's form."""
    row, layers = waiting.row, waiting.facts.layers
    assert layers is not None
    by_group = [max(0.0, time_s) for time_s in waiting.arrival_s]
    return ColdPart(
        batch.num_tokens[row],
        AdapterShape(waiting.facts.num_bytes, layers.rank_sums),
        batch.split_layers[row],
        by_layer(layers.group_of_layer, by_group),
        batch.start_positions[row],
    )
