"""Cold requests as the planner sees them, and predicted times of steps with their chunks. Pure.

All rows of a step share a forward pass, so a chunk costs what it adds to the pass. The base
products of all tokens hide the workers' deltas.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...profiles.models import MachineModel
from ...profiles.step_time import NO_ROWS, RowCosts, pass_s, row_costs
from ..scheduler.cold import StepRows
from ..scheduler.step_times import costs_of

# Above 0, so that of starts that delay no other request the earliest one costs least, and a lone
# request has a cost. Low, so that others wait a millionth of the time that it gains at most.
_LEAST_PRIORITY = 1e-6


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one chunk, by layer."""

    assisted_s: tuple[float, ...]  # with deltas from workers, including exposed waits
    device_s: tuple[float, ...]  # with deltas from the device, once the layer group is there
    ready_s: tuple[float, ...]  # from the chunk's start until its group is there; 0 = is there
    # From the chunk's start until other rows of the step no longer hold the layer.
    held_s: tuple[float, ...]
    read_s: tuple[float, ...]  # from the chunk's start until workers can read it on the host

    @property
    def num_layers(self) -> int:
        return len(self.device_s)

    def after(self, time_s: float) -> "LayerTimes":
        """Return the times of a step that begins ``time_s`` later."""
        if not time_s:
            return self
        return replace(
            self,
            ready_s=_from(time_s, self.ready_s),
            held_s=_from(time_s, self.held_s),
            read_s=_from(time_s, self.read_s),
        )


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """An adapter as the latency models see it."""

    num_bytes: int  # on the device
    rank_sums: tuple[tuple[int, ...], ...]  # as ``AdapterLayers.rank_sums``


@dataclass(frozen=True, slots=True)
class ColdPart:
    """A cold row in a step."""

    num_tokens: int
    adapter: AdapterShape
    split_layer: int
    # By layer: seconds until it is on the host, for workers, or from the split on the device.
    ready_s: tuple[float, ...]
    start_position: int = 0  # of its first token


@dataclass(frozen=True, slots=True)
class CoScheduledRows:
    """The rows that share a step with a chunk."""

    warm: RowCosts = NO_ROWS  # warm rows of the same forward pass
    separate_s: float = 0.0  # time of a pass of other warm rows, which comes first
    cold: tuple[ColdPart, ...] = ()
    # The rows of that other pass, if they would share a pass with cold rows that are loaded.
    separate: RowCosts = NO_ROWS

    @property
    def num_forward_tokens(self) -> int:
        """Tokens of the shared forward pass."""
        num_warm_tokens = self.warm.num_prefill_tokens + self.warm.num_decodes
        return num_warm_tokens + sum(part.num_tokens for part in self.cold)

    def with_row(self, part: ColdPart) -> "CoScheduledRows":
        return replace(self, cold=(*self.cold, part))


EMPTY = CoScheduledRows()


@dataclass(frozen=True, slots=True)
class ColdRequest:
    """A request with an adapter that is not wholly on the device."""

    num_tokens: int  # known and not yet computed
    adapter: AdapterShape
    ready_s: tuple[float, ...]  # by layer: seconds until its layer group is there; 0 = is there
    max_chunk_tokens: int  # limit of one step
    start_position: int = 0  # of the first of these tokens
    max_assisted_tokens: int = 0  # limit of workers for one step; 0 = no workers
    num_workers: int = 0  # ready workers
    not_by_workers: str = ""  # a part of its adapter that they do not compute
    num_running: int = 0  # other running requests, which wait if it delays a step
    priority: float = 1.0  # weight of its seconds, if seconds of other requests weigh 1
    co_scheduled: CoScheduledRows = EMPTY  # of its first step
    later_co_scheduled: CoScheduledRows = EMPTY  # of the steps after that
    # By layer, if its files are being read: seconds until it is on the host; 0 = is there.
    read_s: tuple[float, ...] | None = None

    def cost_s(self, first_token_s: float, stall_s: float) -> float:
        """Return the weighted sum of its first token's time and the delays of all others."""
        return max(self.priority, _LEAST_PRIORITY) * first_token_s + self.num_running * stall_s

    def after(self, time_s: float) -> "ColdRequest":
        if not time_s:
            return self
        read_s = None if self.read_s is None else _from(time_s, self.read_s)
        return replace(self, ready_s=_from(time_s, self.ready_s), read_s=read_s)


def layer_times(
    model: MachineModel,
    request: ColdRequest,
    num_tokens: int,
    co_scheduled: CoScheduledRows,
    *,
    is_assisted: bool = True,
) -> LayerTimes:
    """Return the time of each layer of a step with one chunk, with and without workers.

    The request's times count from the start of the step, those returned from the end of its
    separate pass. Without workers, or unless ``is_assisted``, the assisted times are infinite.
    """
    all_tokens = num_tokens + co_scheduled.num_forward_tokens
    own = ColdPart(num_tokens, request.adapter, 0, (), request.start_position)
    own_on_device, own_assisted = _costs(model, own), _costs(model, own, is_assisted=True)
    # Layers take as long as the one before, except at a split or where targets differ.
    splits = {part.split_layer for part in co_scheduled.cold}
    rank_sums: tuple[int, ...] | None = None
    assisted_s = device_s = 0.0
    assisted, device = [], []
    for layer, layer_sums in enumerate(request.adapter.rank_sums[: model.num_layers]):
        if layer in splits or layer_sums != rank_sums:
            rank_sums = layer_sums
            with_workers = [index for index, part in enumerate(co_scheduled.cold) if part.split_layer > layer]
            others = [
                _costs(model, part, is_assisted=index in with_workers)
                for index, part in enumerate(co_scheduled.cold)
            ]
            helped = [
                (co_scheduled.cold[index].num_tokens, co_scheduled.cold[index].adapter.rank_sums[layer])
                for index in with_workers
            ]
            assisted_s = float("inf")
            if is_assisted:
                own_helped = (num_tokens, layer_sums)
                assisted_s = _layer_s(model, co_scheduled.warm.plus(*others, own_assisted))
                assisted_s += _exposed_s(model, [*helped, own_helped], all_tokens, request.num_workers)
            device_s = _layer_s(model, co_scheduled.warm.plus(*others, own_on_device))
            device_s += _exposed_s(model, helped, all_tokens, request.num_workers)
        assisted.append(assisted_s)
        device.append(device_s)
    held_s = [0.0] * model.num_layers
    for part in co_scheduled.cold:
        held_s = list(map(max, held_s, part.ready_s))
    return LayerTimes(
        tuple(assisted),
        tuple(device),
        _from(co_scheduled.separate_s, request.ready_s),
        _from(co_scheduled.separate_s, held_s),
        _from(co_scheduled.separate_s, request.read_s or (0.0,) * model.num_layers),
    )


def warm_step_s(model: MachineModel, co_scheduled: CoScheduledRows) -> float:
    """Return the time of a step of ``co_scheduled`` with all adapters on the device."""
    rows = co_scheduled.warm.plus(*[_costs(model, part) for part in co_scheduled.cold])
    return model.host_step_s + co_scheduled.separate_s + pass_s(model, rows)


def loaded_step_s(model: MachineModel, co_scheduled: CoScheduledRows, warm_s: float) -> float:
    """Return the same if all adapters were loaded before the step, which then has one pass.

    ``warm_s``: its ``warm_step_s``.
    """
    if co_scheduled.separate == NO_ROWS:
        return warm_s
    rows = replace(co_scheduled, warm=co_scheduled.warm.plus(co_scheduled.separate), separate_s=0.0)
    return warm_step_s(model, rows)


def _layer_s(model: MachineModel, rows: RowCosts) -> float:
    """Return the time of one layer in a step with these rows, one of which is cold."""
    return (model.host_step_s + pass_s(model, rows, may_capture=False)) / model.num_layers


def _costs(model: MachineModel, part: ColdPart, *, is_assisted: bool = False) -> RowCosts:
    """Return the costs of a cold row on the device, without deltas if workers compute them."""
    num_bytes = 0 if is_assisted else part.adapter.num_bytes
    return row_costs(model, (part.num_tokens,), (part.start_position,), (num_bytes,))


def _from(start_s: float, times_s: Iterable[float]) -> tuple[float, ...]:
    return tuple([max(0.0, time_s - start_s) for time_s in times_s])


def _exposed_s(
    model: MachineModel, rows: Sequence[tuple[int, Sequence[int]]], all_tokens: int, num_workers: int
) -> float:
    """Return the additional time of one layer because of workers.

    The layer waits if deltas take longer than the base products, and both are slower while both
    compute.

    ``rows``: tokens of each assisted row, and its ranks by input group.
    """
    if not rows:
        return 0.0
    total_s = 0.0
    for index, group in enumerate(model.groups):
        helped = [(number, rank_sums[index]) for number, rank_sums in rows if rank_sums[index]]
        if not helped:
            continue
        if num_workers < 1:
            return float("inf")
        longest_s = busy_s = 0.0
        for number, rank_sum in helped:
            team = model.job.team(rank_sum, group.width, number, num_workers)
            longest_s = max(longest_s, team.seconds)
            busy_s += team.seconds * team.num_members
            total_s += model.invoke_s(number)
        base_s, delta_s = group.base_s.at(all_tokens), max(longest_s, busy_s / num_workers)
        total_s += max(0.0, delta_s - base_s) + model.contention * min(delta_s, base_s)
    return total_s + model.assisted_pass_s / model.num_layers


def co_scheduled_rows(model: MachineModel, rows: StepRows, cold: Sequence[ColdPart]) -> CoScheduledRows:
    """Return all rows of ``rows``. ``cold``: its cold chunks."""
    chunks = costs_of(model, rows.chunks)
    if rows.is_cold_separate:
        warm = costs_of(model, [(request, 1) for request in rows.decodes]).plus(chunks)
        has_warm = bool(rows.decodes or rows.chunks)
        return CoScheduledRows(
            separate_s=pass_s(model, warm) if has_warm else 0.0,
            separate=NO_ROWS if rows.is_decode_separate else warm,
            cold=tuple(cold),
        )
    co_scheduled = co_scheduled_decodes(model, rows)
    return replace(co_scheduled, warm=co_scheduled.warm.plus(chunks), cold=tuple(cold))


def co_scheduled_decodes(model: MachineModel, rows: StepRows) -> CoScheduledRows:
    """Return only the decode rows, which later steps have, too."""
    if not rows.decodes:
        return EMPTY
    costs = costs_of(model, [(request, 1) for request in rows.decodes])
    if rows.is_decode_separate:
        return CoScheduledRows(separate_s=pass_s(model, costs))
    if rows.is_cold_separate:
        return CoScheduledRows(separate_s=pass_s(model, costs), separate=costs)
    return CoScheduledRows(costs)
