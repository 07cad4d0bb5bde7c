"""What the planner knows of a cold request, and how long its chunks take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...profiles.models import MachineModel
from .split import LayerTimes


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """An adapter as the latency models see it."""

    num_bytes: int  # on the device
    rank_sums: tuple[tuple[int, ...], ...]  # [layer][input group]: ranks of the group's targets


@dataclass(frozen=True, slots=True)
class ColdRequest:
    """A request whose adapter is not, or not wholly, on the device."""

    num_tokens: int  # known and not yet computed
    adapter: AdapterShape
    ready_s: tuple[float, ...]  # by layer: when its layer group is there, from now; 0 = is
    max_chunk_tokens: int  # that one step may compute of it
    num_running: int = 0  # other requests, which wait while it holds a step
    running_step_s: float = 0.0  # one step of theirs
    num_workers: int = 0  # alive and free of other work


def layer_times(
    model: MachineModel,
    adapter: AdapterShape,
    num_tokens: int,
    ready_s: Sequence[float],
    num_workers: int,
) -> LayerTimes:
    """How long each layer of one chunk takes with either way of computing the deltas.

    Without workers the assisted times are infinite.
    """
    layer_s = model.layer_s(num_tokens)
    lora_s = model.lora.prefill_s(num_tokens, adapter.num_bytes) / model.num_layers
    # Layers are alike but for a few, and a decision asks several times.
    exposed_s = {
        rank_sums: _exposed_s(model, rank_sums, num_tokens, num_workers)
        for rank_sums in set(adapter.rank_sums)
    }
    assisted = tuple(layer_s + exposed_s[rank_sums] for rank_sums in adapter.rank_sums)
    return LayerTimes(assisted, (layer_s + lora_s,) * model.num_layers, tuple(ready_s))


def warm_s(model: MachineModel, adapter: AdapterShape, num_tokens: int) -> float:
    """The same chunk with the whole adapter on the device."""
    return model.step_s.at(num_tokens) + model.lora.prefill_s(num_tokens, adapter.num_bytes)


def _exposed_s(
    model: MachineModel, rank_sums: Sequence[int], num_tokens: int, num_workers: int
) -> float:
    """What the device waits for the workers in one layer, beyond its own products."""
    if not any(rank_sums):
        return 0.0
    if num_workers < 1:
        return float("inf")
    rounds, slice_tokens = _slices(num_tokens, model.tokens_per_worker, num_workers)
    total_s = 0.0
    for group, rank_sum in zip(model.groups, rank_sums, strict=True):
        if rank_sum:
            delta_s = rounds * group.delta_s.at(rank_sum, slice_tokens)
            total_s += model.invoke_s(num_tokens) + max(0.0, delta_s - group.base_s.at(num_tokens))
    return total_s


def _slices(num_tokens: int, tokens_per_worker: int, num_workers: int) -> tuple[int, int]:
    """Slices that one worker computes in a row, and the tokens of the longest one.

    ceil(L / c) slices serve L tokens; more slices than workers queue.
    """
    num_slices = -(-num_tokens // tokens_per_worker)
    return -(-num_slices // num_workers), -(-num_tokens // num_slices)
