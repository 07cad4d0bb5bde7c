"""How long one forward pass of a simulated step takes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...profiles.models import MachineModel
from ...profiles.step_time import pass_s, row_costs
from ..adapter import AdapterFacts
from ..coldstart.cold import (
    AdapterShape,
    ColdPart,
    ColdRequest,
    Company,
    layer_times,
    warm_step_s,
)
from ..coldstart.link import by_layer
from ..coldstart.split import end_of
from ..plan import SubBatch


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row whose deltas partly come from workers, or whose adapter is on its way."""

    row: int  # in its sub-batch
    split_layer: int  # workers compute the layers below
    facts: AdapterFacts
    arrival_s: tuple[float, ...] | None  # on the clock, by layer group; None = all are there
    start_s: float  # of the pass, on that clock

    def part(self, num_tokens: int) -> ColdPart:
        """As the planner sees it."""
        layers = self.facts.layers
        assert layers is not None
        shape = AdapterShape(self.facts.num_bytes, layers.rank_sums)
        if self.arrival_s is None:
            ready_s = (0.0,) * len(layers.group_of_layer)
        else:
            by_group = [max(0.0, time_s - self.start_s) for time_s in self.arrival_s]
            ready_s = by_layer(layers.group_of_layer, by_group)
        return ColdPart(num_tokens, shape, self.split_layer, ready_s)


def batch_s(
    model: MachineModel, batch: SubBatch, adapter_bytes: Sequence[int], cold: Sequence[WaitingRow]
) -> float:
    """One forward pass over the rows of ``batch``.

    With cold rows it is what the planner says of a step with such rows: its layers one after the
    other, each as long as its products, the workers' deltas and the layer groups that it waits for
    let it be.
    """
    costs = row_costs(model, batch.num_tokens, batch.start_positions, adapter_bytes)
    warm_pass_s = pass_s(model, costs)
    if not cold:
        return warm_pass_s
    first, *others = (one.part(batch.num_tokens[one.row]) for one in cold)
    num_cold_tokens = sum(part.num_tokens for part in (first, *others))
    # All rows but these, and whatever the planner's sum of products leaves out.
    company = Company(num_tokens=sum(batch.num_tokens) - num_cold_tokens, cold=tuple(others))
    rest_s = warm_pass_s - warm_step_s(model, company.joined_by(first))
    request = ColdRequest(
        num_tokens=first.num_tokens,
        adapter=first.adapter,
        ready_s=first.ready_s,
        max_chunk_tokens=first.num_tokens,
        num_workers=model.num_workers,
    )
    company = Company(company.num_tokens, warm_s=rest_s, cold=company.cold)
    times = layer_times(model, request, first.num_tokens, company)
    return end_of(times, first.split_layer)
