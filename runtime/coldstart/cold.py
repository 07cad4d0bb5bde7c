"""What the planner knows of a cold request, and how long a step with a chunk of it takes. Pure.

All rows of a step share a forward pass, so a chunk costs what it adds to it: the base products
are of all tokens together, and so are the products that hide the workers' deltas.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...profiles.models import MachineModel
from ...profiles.step_time import NO_ROWS, RowCosts, pass_s, row_costs
from .split import LayerTimes


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """An adapter as the latency models see it."""

    num_bytes: int  # on the device
    rank_sums: tuple[tuple[int, ...], ...]  # [layer][input group]: ranks of the group's targets


@dataclass(frozen=True, slots=True)
class ColdPart:
    """A cold row that is in the step already."""

    num_tokens: int
    adapter: AdapterShape
    split_layer: int
    ready_s: tuple[float, ...]  # by layer, as in ``ColdRequest``
    start_position: int = 0  # of its first token


@dataclass(frozen=True, slots=True)
class CoScheduledRows:
    """What a chunk shares its step with."""

    warm: RowCosts = NO_ROWS  # rows in the same forward
    separate_decode_s: float = 0.0  # rows that decode in a forward of their own, before
    cold: tuple[ColdPart, ...] = ()

    @property
    def num_forward_tokens(self) -> int:
        """Tokens of that forward."""
        num_warm_tokens = self.warm.num_prefill_tokens + self.warm.num_decodes
        return num_warm_tokens + sum(part.num_tokens for part in self.cold)

    def with_row(self, part: ColdPart) -> "CoScheduledRows":
        """With one more cold row."""
        return replace(self, cold=(*self.cold, part))


EMPTY = CoScheduledRows()


@dataclass(frozen=True, slots=True)
class ColdRequest:
    """A request with an adapter that is not, or not wholly, on the device."""

    num_tokens: int  # known and not yet computed
    adapter: AdapterShape
    ready_s: tuple[float, ...]  # by layer: when its layer group is there, from now; 0 = is
    max_chunk_tokens: int  # of it that one step may compute
    start_position: int = 0  # of the first of these tokens
    max_assisted_tokens: int = 0  # that the workers hold of one step; 0 = there are none
    num_workers: int = 0  # alive
    num_running: int = 0  # other requests, which wait while it holds a step
    co_scheduled: CoScheduledRows = EMPTY  # of its first step
    later_co_scheduled: CoScheduledRows = EMPTY  # of the steps after that
    # By layer, if its files are being read: when it will be on the host; 0 = it is.
    read_s: tuple[float, ...] | None = None

    @property
    def num_layers_on_host(self) -> int:
        """Layers, from the first on, that workers can compute."""
        times_s = self.read_s or ()
        unread = (layer for layer, time_s in enumerate(times_s) if time_s > 0.0)
        return next(unread, len(self.ready_s))

    def after(self, time_s: float) -> "ColdRequest":
        """The same request after so much time."""
        if not time_s:
            return self
        read_s = None if self.read_s is None else _from(time_s, self.read_s)
        return replace(self, ready_s=_from(time_s, self.ready_s), read_s=read_s)


def layer_times(
    model: MachineModel, request: ColdRequest, num_tokens: int, co_scheduled: CoScheduledRows
) -> LayerTimes:
    """How long each layer of a step with one chunk takes with either way of computing its deltas.

    ``request.ready_s`` counts from the start of the step, the times from the end of its separate
    decode pass.
    Without workers the assisted times are infinite.
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
            with_workers = [
                index for index, part in enumerate(co_scheduled.cold) if part.split_layer > layer
            ]
            others = [
                _costs(model, part, is_assisted=index in with_workers)
                for index, part in enumerate(co_scheduled.cold)
            ]
            helped = [
                (
                    co_scheduled.cold[index].num_tokens,
                    co_scheduled.cold[index].adapter.rank_sums[layer],
                )
                for index in with_workers
            ]
            own_helped = (num_tokens, layer_sums)
            assisted_s = _layer_s(model, co_scheduled.warm.plus(*others, own_assisted))
            assisted_s += _exposed_s(model, [*helped, own_helped], all_tokens, request.num_workers)
            device_s = _layer_s(model, co_scheduled.warm.plus(*others, own_on_device))
            device_s += _exposed_s(model, helped, all_tokens, request.num_workers)
        assisted.append(assisted_s)
        device.append(device_s)
    held_s = [0.0] * model.num_layers
    for part in co_scheduled.cold:
        ready_s = part.ready_s[part.split_layer :]
        held_s[part.split_layer :] = map(max, held_s[part.split_layer :], ready_s)
    return LayerTimes(
        tuple(assisted),
        tuple(device),
        _from(co_scheduled.separate_decode_s, request.ready_s),
        _from(co_scheduled.separate_decode_s, held_s),
    )


def warm_step_s(model: MachineModel, co_scheduled: CoScheduledRows) -> float:
    """A step of ``co_scheduled`` alone, with all adapters on the device."""
    rows = co_scheduled.warm.plus(*[_costs(model, part) for part in co_scheduled.cold])
    return model.host_step_s + co_scheduled.separate_decode_s + pass_s(model, rows)


def _layer_s(model: MachineModel, rows: RowCosts) -> float:
    """A layer's share of a step with these rows, of which one is cold."""
    return (model.host_step_s + pass_s(model, rows, may_capture=False)) / model.num_layers


def _costs(model: MachineModel, part: ColdPart, *, is_assisted: bool = False) -> RowCosts:
    """What a cold row brings to the device, which computes its deltas unless the workers do."""
    num_bytes = 0 if is_assisted else part.adapter.num_bytes
    return row_costs(model, (part.num_tokens,), (part.start_position,), (num_bytes,))


def _from(start_s: float, times_s: Iterable[float]) -> tuple[float, ...]:
    return tuple([max(0.0, time_s - start_s) for time_s in times_s])


def _exposed_s(
    model: MachineModel,
    rows: Sequence[tuple[int, Sequence[int]]],
    all_tokens: int,
    num_workers: int,
) -> float:
    """By how much workers make one layer longer than the device's own products.

    It waits for what takes longer than these, and both are slower while both compute.

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
        num_cores, slice_tokens = _slices(
            sum(number for number, _ in helped), model.tokens_per_worker, num_workers
        )
        delta_s = 0.0
        for number, rank_sum in helped:
            num_pieces = -(-number // slice_tokens)
            delta_s += num_pieces * group.delta_s.at(rank_sum, -(-number // num_pieces))
            total_s += model.invoke_s(number)
        base_s, delta_s = group.base_s.at(all_tokens), delta_s / num_cores
        total_s += max(0.0, delta_s - base_s) + model.contention * min(delta_s, base_s)
    return total_s + model.assisted_pass_s / model.num_layers


def _slices(num_tokens: int, tokens_per_worker: int, num_workers: int) -> tuple[int, int]:
    """Cores that compute a pass, and the tokens of one slice.

    ceil(L / c) slices serve L tokens; more slices than workers queue, equally many at each.
    """
    num_slices = -(-num_tokens // tokens_per_worker)
    num_cores = min(num_slices, num_workers)
    num_slices = num_cores * -(-num_slices // num_cores)
    return num_cores, -(-num_tokens // num_slices)
