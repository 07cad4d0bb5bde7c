"""Predicts the times of each strategy by simulating the chunks of one request. Pure.

The split of a chunk is chosen here: the layers for which workers compute the deltas. The planner
predicts with it, the plan contains it, and the simulator runs it. The host runs ahead of the
device, so the split cannot be decided while the step runs.

Source: Toppings, section 4.1 (the switch from CPU to GPU in mid-prefill), with the switching layer
planned instead of polled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...profiles.models import MachineModel
from .cold import ColdPart, ColdRequest, CoScheduledRows, LayerTimes, layer_times, warm_step_s
from .strategy import LoadStrategy, Prediction


@dataclass(frozen=True, slots=True)
class Split:
    """Workers compute layers below ``layer``, the device the others."""

    layer: int
    end_s: float  # when the chunk's last layer is done


def choose_split(times: LayerTimes, max_layer: int | None = None) -> Split:
    """Return the split that ends first; among equals the one with fewest layers for workers.

    ``max_layer``: the highest possible split, if the host has no matrices from that layer on.

    O(layers). A chunk with a split at S computes its layers in order, and each layer from S on not
    before its group is there. No layer starts before other rows release it.
    """
    ends_s = _ends_s(times)
    highest = times.num_layers if max_layer is None else min(max_layer, times.num_layers)
    layer = min(range(highest + 1), key=ends_s.__getitem__)
    return Split(layer, ends_s[layer])


def end_of(times: LayerTimes, split_layer: int) -> float:
    """Return the duration in seconds of a chunk with a split at ``split_layer``."""
    return _ends_s(times)[split_layer]


def _ends_s(times: LayerTimes) -> list[float]:
    """Return the end of the chunk for each split."""
    num_layers = times.num_layers
    before_s = 0.0
    assisted_before = [before_s]
    for seconds, held_s in zip(times.assisted_s, times.held_s, strict=True):
        before_s = max(before_s, held_s) + seconds
        assisted_before.append(before_s)
    ends_s = [before_s] * (num_layers + 1)
    behind_s = 0.0  # device time of layers from S on
    held_until_s = 0.0  # earliest end, by arrival of their groups
    for layer in range(num_layers - 1, -1, -1):
        behind_s += times.device_s[layer]
        ready_s = max(times.ready_s[layer], times.held_s[layer])
        held_until_s = max(held_until_s, ready_s + behind_s)
        ends_s[layer] = max(assisted_before[layer] + behind_s, held_until_s)
    return ends_s


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
    model: MachineModel,
    request: ColdRequest,
    num_tokens: int,
    co_scheduled: CoScheduledRows,
    strategy: LoadStrategy,
) -> PlannedStep:
    """Predict a step with ``num_tokens`` tokens of ``request`` beside ``co_scheduled``."""
    times = layer_times(model, request, num_tokens, co_scheduled)
    if strategy is LoadStrategy.ASSISTED:
        split = choose_split(times, request.num_layers_on_host)
    else:
        split = Split(0, end_of(times, 0))
    part = ColdPart(num_tokens, request.adapter, split.layer, request.ready_s, request.start_position)
    warm_s = warm_step_s(model, co_scheduled.with_row(part))
    return PlannedStep(split.layer, co_scheduled.separate_s + split.end_s, warm_s)


def gains_by_waiting(
    model: MachineModel,
    request: ColdRequest,
    num_tokens: int,
    co_scheduled: CoScheduledRows,
    strategy: LoadStrategy,
) -> bool:
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
        later = plan_step(self.model, request.after(read_s), num_tokens, co_scheduled, self.strategy)
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
