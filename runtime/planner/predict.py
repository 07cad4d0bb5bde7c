"""Predicts what each strategy comes to, by running the chunks of one request in thought. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...profiles.models import MachineModel
from .cold import ColdPart, ColdRequest, Company, layer_times, warm_step_s
from .split import LayerTimes, Split, choose_split, end_of
from .strategy import LoadStrategy, Prediction


def predict(model: MachineModel, request: ColdRequest, strategy: LoadStrategy) -> Prediction:
    """First and second token of ``request`` under ``strategy``, and what it costs the others."""
    loaded_s = max(request.ready_s, default=0.0)
    waits_first = strategy in {LoadStrategy.BLOCKING, LoadStrategy.ASYNC_LOAD}
    run = _Run(model, request, strategy, now_s=loaded_s if waits_first else 0.0)
    # Who waits for the load has other company than that of the step which is put together.
    company = request.later_company if waits_first else request.company
    for num_tokens in _chunks(request, strategy):
        run.chunk(num_tokens, company)
        company = request.later_company
    first_token_s = run.now_s
    run.chunk(1, company)
    return Prediction(
        strategy=strategy,
        first_token_s=first_token_s,
        second_token_s=run.now_s,
        stall_s=run.stall_s + (loaded_s if strategy is LoadStrategy.BLOCKING else 0.0),
        split_layer=run.first_split_layer or 0,
    )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with a chunk of a cold request in it."""

    split_layer: int
    end_s: float  # from its start
    warm_s: float  # the same step with all adapters on the device

    @property
    def wait_s(self) -> float:
        """By which all rows of the step are held up."""
        return self.end_s - self.warm_s


def plan_step(
    model: MachineModel, request: ColdRequest, num_tokens: int, company: Company,
    strategy: LoadStrategy,
) -> PlannedStep:  # fmt: skip
    """The step that computes ``num_tokens`` of ``request`` next, beside ``company``."""
    split = _split(layer_times(model, request, num_tokens, company), strategy)
    part = ColdPart(num_tokens, request.adapter, split.layer, request.ready_s)
    warm_s = warm_step_s(model, company.joined_by(part))
    return PlannedStep(split.layer, company.apart_s + split.end_s, warm_s)


@dataclass(slots=True)
class _Run:
    """One request's chunks, one after the other, each in a step with the others' rows."""

    model: MachineModel
    request: ColdRequest
    strategy: LoadStrategy
    now_s: float
    stall_s: float = 0.0
    first_split_layer: int | None = None

    def chunk(self, num_tokens: int, company: Company) -> None:
        """Compute one chunk."""
        ready_s = tuple([max(0.0, ready - self.now_s) for ready in self.request.ready_s])
        request = replace(self.request, ready_s=ready_s)
        step = plan_step(self.model, request, num_tokens, company, self.strategy)
        if self.first_split_layer is None:
            self.first_split_layer = step.split_layer
        self.now_s += step.end_s
        self.stall_s += step.wait_s


def _split(times: LayerTimes, strategy: LoadStrategy) -> Split:
    """Only the assisted strategy gives layers to the workers."""
    if strategy is LoadStrategy.ASSISTED:
        return choose_split(times)
    return Split(0, end_of(times, 0))


def _chunks(request: ColdRequest, strategy: LoadStrategy) -> Iterator[int]:
    limit = request.max_chunk_tokens
    if strategy is LoadStrategy.ASSISTED and request.max_assisted_tokens:
        limit = min(limit, request.max_assisted_tokens)
    left = request.num_tokens
    while left > 0:
        num_tokens = min(left, limit)
        yield num_tokens
        left -= num_tokens
