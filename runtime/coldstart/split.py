"""Chooses the split of a cold chunk: the layers for which workers compute the deltas. Pure.

The planner predicts with it, the plan contains its result, and the simulator runs it. The host runs
ahead of the device, so the split cannot be decided while the step runs.

Source: Toppings, section 4.1 (the switch from CPU to GPU in mid-prefill), with the switching layer
planned instead of polled.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one chunk, by layer."""

    assisted_s: tuple[float, ...]  # with deltas from workers, including exposed waits
    device_s: tuple[float, ...]  # with deltas from the device, once the layer group is there
    ready_s: tuple[float, ...]  # from the chunk's start until the layer group is there; 0 = is
    # From the chunk's start until other rows of the step no longer hold the layer.
    held_s: tuple[float, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.device_s)


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
