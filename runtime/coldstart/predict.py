"""Predicts the times of each strategy by simulating the chunks of one request. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...profiles.models import MachineModel
from .cold import ColdPart, ColdRequest, CoScheduledRows, layer_times, warm_step_s
from .split import Split, choose_split, end_of
from .strategy import LoadStrategy, Prediction

_SAME_SHARE = 0.01  # ends with a smaller difference count as equal


def predict(model: MachineModel, request: ColdRequest, strategy: LoadStrategy) -> Prediction:
    """Predict first and second token of ``request`` under ``strategy``, and stalls of others."""
    loaded_s = max(request.ready_s, default=0.0)
    waits_first = strategy in {LoadStrategy.BLOCKING, LoadStrategy.ASYNC_LOAD}
    run = _Run(model, request, strategy, now_s=loaded_s if waits_first else 0.0)
    # A request that waits for the load runs in a later step, with other rows than this one.
    co_scheduled = request.later_co_scheduled if waits_first else request.co_scheduled
    for num_tokens in _chunks(request, strategy):
        run.chunk(num_tokens, co_scheduled)
        co_scheduled = request.later_co_scheduled
    first_token_s = run.now_s
    run.chunk(1, co_scheduled)
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
        """Delay of all rows of the step."""
        return self.end_s - self.warm_s


def plan_step(
    model: MachineModel, request: ColdRequest, num_tokens: int, co_scheduled: CoScheduledRows,
    strategy: LoadStrategy,
) -> PlannedStep:  # fmt: skip
    """Predict a step with ``num_tokens`` tokens of ``request`` beside ``co_scheduled``."""
    times = layer_times(model, request, num_tokens, co_scheduled)
    if strategy is LoadStrategy.ASSISTED:
        split = choose_split(times, request.num_layers_on_host)
    else:
        split = Split(0, end_of(times, 0))
    part = ColdPart(
        num_tokens, request.adapter, split.layer, request.ready_s, request.start_position
    )
    warm_s = warm_step_s(model, co_scheduled.with_row(part))
    return PlannedStep(split.layer, co_scheduled.separate_decode_s + split.end_s, warm_s)


def gains_by_waiting(
    model: MachineModel, request: ColdRequest, num_tokens: int, co_scheduled: CoScheduledRows,
    strategy: LoadStrategy,
) -> bool:  # fmt: skip
    """Whether a step that waits for files ends as early if it begins when the next layers arrive.

    A step that begins sooner only delays requests that arrive meanwhile, and its predictions know
    less about the rate of reading.
    """
    times_s = [time_s for time_s in (*request.ready_s, *(request.read_s or ())) if time_s > 0.0]
    if request.read_s is None or not times_s:
        return False
    next_s = min(times_s)
    now = plan_step(model, request, num_tokens, co_scheduled, strategy)
    later = plan_step(model, request.after(next_s), num_tokens, co_scheduled, strategy)
    return next_s + later.end_s <= now.end_s * (1.0 + _SAME_SHARE)


@dataclass(slots=True)
class _Run:
    """Simulates the chunks of one request, each in a step with other rows."""

    model: MachineModel
    request: ColdRequest
    strategy: LoadStrategy
    now_s: float
    stall_s: float = 0.0
    first_split_layer: int | None = None

    def chunk(self, num_tokens: int, co_scheduled: CoScheduledRows) -> None:
        """Simulate a step with one chunk."""
        if self.request.read_s is not None:
            self.now_s += self._delay_s(num_tokens, co_scheduled)
        request = self.request.after(self.now_s)
        step = plan_step(self.model, request, num_tokens, co_scheduled, self.strategy)
        if self.first_split_layer is None:
            self.first_split_layer = step.split_layer
        self.now_s += step.end_s
        self.stall_s += step.wait_s
        start_position = self.request.start_position + num_tokens
        self.request = replace(self.request, start_position=start_position)

    def _delay_s(self, num_tokens: int, co_scheduled: CoScheduledRows) -> float:
        """Return how much later a chunk begins that waits for files; see ``gains_by_waiting``.

        With workers it begins when all layers are on the host, if that is faster. Without workers
        it begins so late that it ends at the same time and delays no request.
        """
        request = self.request.after(self.now_s)
        step = plan_step(self.model, request, num_tokens, co_scheduled, self.strategy)
        if self.strategy is not LoadStrategy.ASSISTED:
            return max(0.0, step.wait_s)
        read_s = max(request.read_s or (0.0,))
        later = plan_step(
            self.model, request.after(read_s), num_tokens, co_scheduled, self.strategy
        )
        return read_s if read_s + later.end_s < step.end_s else 0.0


def _chunks(request: ColdRequest, strategy: LoadStrategy) -> Iterator[int]:
    limit = request.max_chunk_tokens
    if strategy is LoadStrategy.ASSISTED and request.max_assisted_tokens:
        limit = min(limit, request.max_assisted_tokens)
    left = request.num_tokens
    while left > 0:
        num_tokens = min(left, limit)
        yield num_tokens
        left -= num_tokens
