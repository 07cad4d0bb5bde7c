"""Predicts the times of each strategy by simulating the chunks of one request. Pure.

The split of a chunk is chosen here: the layers for which workers compute the deltas. The planner
predicts with it, the plan contains it, and the simulator runs it. The host runs ahead of the
device, so the split cannot be decided while the step runs.

Source: Toppings, section 4.1 (the switch from CPU to GPU in mid-prefill), with the switching layer
planned instead of polled.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

from ...profiles.models import MachineModel
from .cold import ColdPart, ColdRequest, CoScheduledRows, LayerTimes, layer_times, loaded_step_s, warm_step_s
from .strategy import LoadStrategy, Prediction

_SAME_SHARE = 0.01  # ends with a smaller difference count as equal


@dataclass(frozen=True, slots=True)
class Split:
    """Workers compute layers below ``layer``, the device the others."""

    layer: int
    end_s: float  # from the chunk's start until its last layer is done


def choose_split(times: LayerTimes) -> Split:
    """Return the split that ends first; among equals the one with fewest layers for workers.

    O(layers). A chunk with a split at S computes its layers in order: each layer below S not before
    the host has it, and from S on not before its group is there. No layer starts before other rows
    release it.
    """
    ends_s = _ends_s(times)
    layer = min(range(times.num_layers + 1), key=ends_s.__getitem__)
    return Split(layer, ends_s[layer])


def end_of(times: LayerTimes, split_layer: int) -> float:
    """Return the duration in seconds of a chunk with a split at ``split_layer``."""
    return _ends_s(times)[split_layer]


def _ends_s(times: LayerTimes) -> list[float]:
    """Return the end of the chunk for each split."""
    num_layers = times.num_layers
    before_s = 0.0
    assisted_before = [before_s]
    for seconds, held_s, read_s in zip(times.assisted_s, times.held_s, times.read_s, strict=True):
        before_s = max(before_s, held_s, read_s) + seconds
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


def predict(
    model: MachineModel, request: ColdRequest, strategy: LoadStrategy, choose: "ChooseStart | None" = None
) -> Prediction:
    """Predict the first token of ``request`` under ``strategy``, and stalls of others.

    ``choose``: ``choose_start`` with this model, if the caller keeps its results.
    """
    loaded_s = max(request.ready_s, default=0.0)
    waits_first = strategy in {LoadStrategy.BLOCKING, LoadStrategy.ASYNC_LOAD}
    choose = choose or partial(choose_start, model)
    run = _Run(choose, request, strategy, now_s=loaded_s if waits_first else 0.0)
    if strategy is LoadStrategy.ASYNC_LOAD:
        run.now_s = max(loaded_s, _others_s(model, request, request.co_scheduled))
    # A request that waits for the load runs in a later step, with other rows than this one.
    co_scheduled = request.later_co_scheduled if waits_first else request.co_scheduled
    for num_tokens in _chunks(request, strategy):
        run.chunk(num_tokens, co_scheduled)
        co_scheduled = request.later_co_scheduled
    first_token_s = run.now_s
    if request.num_running:  # the step of the second token may still stall them
        run.chunk(1, co_scheduled)
    return Prediction(
        strategy=strategy,
        first_token_s=first_token_s,
        stall_s=run.stall_s + (loaded_s if strategy is LoadStrategy.BLOCKING else 0.0),
        split_layer=run.first_split_layer or 0,
    )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with a chunk of a cold request in it."""

    split_layer: int
    end_s: float  # from its start
    warm_s: float  # the same step with all adapters on the device
    loaded_s: float  # the same rows if all adapters had been loaded before: in one pass

    @property
    def wait_s(self) -> float:
        """Time that the step waits for loads and workers."""
        return self.end_s - self.warm_s

    @property
    def stall_s(self) -> float:
        """Delay of all rows of the step because its adapters were not loaded before."""
        return self.end_s - self.loaded_s


@dataclass(frozen=True, slots=True)
class Start:
    """A step with a chunk, and when it begins."""

    begin_s: float  # from now; 0 = now
    step: PlannedStep


ChooseStart: TypeAlias = Callable[[ColdRequest, int, CoScheduledRows, LoadStrategy], Start]


def choose_start(
    model: MachineModel,
    request: ColdRequest,
    num_tokens: int,
    co_scheduled: CoScheduledRows,
    strategy: LoadStrategy,
    *,
    excess_share: float = 0.0,
) -> Start:
    """Return the start of a chunk that costs least: now, or in a later step.

    A later step waits less for the load, so the other rows wait less. It begins after a step of
    the other rows. A lone request that reads files waits for the next layers if its chunk then ends
    as early: a step that begins sooner would only delay requests that arrive meanwhile, and its
    predictions know less about the rate of reading.

    ``excess_share``: measured wait of such steps beyond the prediction, as a share of the step.
    """
    forecast = StepForecast(model, request, num_tokens, co_scheduled, strategy)
    now = Start(0.0, forecast.at(0.0))
    times_s = [time_s for time_s in (*request.ready_s, *(request.read_s or ())) if time_s > 0.0]
    if not times_s or not (request.num_running or request.read_s):
        return now

    def cost_s(start: Start) -> float:
        is_loaded = start.begin_s >= max(times_s)
        excess_s = 0.0 if is_loaded else excess_share * start.step.warm_s
        stall_s = max(0.0, start.step.stall_s + excess_s)
        return request.cost_s(start.begin_s + start.step.end_s, stall_s)

    # The scheduler asks again after a step, and without other rows when the next layers arrive.
    next_s = _others_s(model, request, co_scheduled) if request.num_running else min(times_s)
    begins_s = (0.0, now.step.wait_s, max(request.read_s or (0.0,)), max(times_s))
    later_s = sorted({max(next_s, begin_s) for begin_s in begins_s})
    best = min((Start(begin_s, forecast.at(begin_s)) for begin_s in later_s), key=cost_s)
    same = 1.0 + (_SAME_SHARE if request.read_s else 0.0)
    return best if best.begin_s and cost_s(best) < same * cost_s(now) else now


def _others_s(model: MachineModel, request: ColdRequest, co_scheduled: CoScheduledRows) -> float:
    """Return the time of a step of the other rows alone, after which another step begins."""
    return warm_step_s(model, co_scheduled) if request.num_running else 0.0


class StepForecast:
    """Predicts a step with a chunk of a cold request beside other rows, whenever it begins."""

    def __init__(
        self,
        model: MachineModel,
        request: ColdRequest,
        num_tokens: int,
        co_scheduled: CoScheduledRows,
        strategy: LoadStrategy,
    ) -> None:
        """See ``choose_start``."""
        self._request = request
        self._is_assisted = strategy is LoadStrategy.ASSISTED
        self._separate_s = co_scheduled.separate_s
        self._has_cold = bool(co_scheduled.cold)
        self._predict_times = partial(
            layer_times, model, request, num_tokens, co_scheduled, is_assisted=self._is_assisted
        )
        part = ColdPart(num_tokens, request.adapter, 0, request.ready_s, request.start_position)
        rows = co_scheduled.with_row(part)
        self._warm_s = warm_step_s(model, rows)
        self._loaded_s = loaded_step_s(model, rows, self._warm_s)

    @cached_property
    def _times(self) -> LayerTimes:
        """Not needed for a step that begins once all is loaded."""
        return self._predict_times()

    def at(self, begin_s: float) -> PlannedStep:
        """Predict the step if it begins ``begin_s`` from now."""
        if begin_s >= max(self._request.ready_s, default=0.0) and not self._has_cold:
            return PlannedStep(0, self._loaded_s, self._loaded_s, self._loaded_s)
        times = self._times.after(begin_s)
        split = choose_split(times) if self._is_assisted else Split(0, end_of(times, 0))
        return PlannedStep(split.layer, self._separate_s + split.end_s, self._warm_s, self._loaded_s)


@dataclass(slots=True)
class _Run:
    """Simulates the chunks of one request, each in a step with other rows."""

    choose: ChooseStart
    request: ColdRequest
    strategy: LoadStrategy
    now_s: float
    stall_s: float = 0.0
    first_split_layer: int | None = None

    def chunk(self, num_tokens: int, co_scheduled: CoScheduledRows) -> None:
        """Simulate a step with one chunk."""
        request = self.request.after(self.now_s)
        start = self.choose(request, num_tokens, co_scheduled, self.strategy)
        step = start.step
        if self.first_split_layer is None:
            self.first_split_layer = step.split_layer
        self.now_s += start.begin_s + step.end_s
        self.stall_s += step.stall_s
        start_position = self.request.start_position + num_tokens
        self.request = replace(self.request, start_position=start_position)


def _chunks(request: ColdRequest, strategy: LoadStrategy) -> Iterator[int]:
    limit = request.max_chunk_tokens
    if strategy is LoadStrategy.ASSISTED and request.max_assisted_tokens:
        limit = min(limit, request.max_assisted_tokens)
    left = request.num_tokens
    while left > 0:
        num_tokens = min(left, limit)
        yield num_tokens
        left -= num_tokens
