"""Which layers of a cold chunk the workers compute: one pure function for all callers.

The planner predicts with it, the executor gets its result in the plan, and the simulator runs it:
because the host runs ahead of the device, the split cannot be found out while the step runs.

Source: Toppings, section 4.1 (the switch from CPU to GPU in mid-prefill), with the switching layer
planned instead of polled.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one chunk, by layer."""

    assisted_s: tuple[float, ...]  # with the delta from the workers, exposed waiting included
    device_s: tuple[float, ...]  # with the delta from the device, once the layer group is there
    ready_s: tuple[float, ...]  # when the layer's group is there, from the chunk's start; 0 = is
    # Until when other rows of the step hold the layer, wherever this row's deltas are computed.
    held_s: tuple[float, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.device_s)


@dataclass(frozen=True, slots=True)
class Split:
    """Layers below ``layer`` are the workers', the others the device's."""

    layer: int
    end_s: float  # when the chunk's last layer is done


def choose_split(times: LayerTimes, max_layer: int | None = None) -> Split:
    """The split that ends first; among equals the one with the fewest layers for the workers.

    ``max_layer``: the highest split, if the workers have no matrices from there on.

    O(layers). A chunk that starts at 0 and splits at S computes layers below S one after the
    other, and each layer from S on no sooner than its group is there; no layer before its time.
    """
    ends_s = _ends_s(times)
    highest = times.num_layers if max_layer is None else min(max_layer, times.num_layers)
    layer = min(range(highest + 1), key=ends_s.__getitem__)
    return Split(layer, ends_s[layer])


def end_of(times: LayerTimes, split_layer: int) -> float:
    """When a chunk that splits at ``split_layer`` is done, in seconds from its start."""
    return _ends_s(times)[split_layer]


def _ends_s(times: LayerTimes) -> list[float]:
    """By the layer of the split."""
    num_layers = times.num_layers
    before_s = 0.0
    assisted_before = [before_s]
    for seconds, held_s in zip(times.assisted_s, times.held_s, strict=True):
        before_s = max(before_s, held_s) + seconds
        assisted_before.append(before_s)
    ends_s = [before_s] * (num_layers + 1)
    behind_s = 0.0  # device time of layers from S on
    held_until_s = 0.0  # what their groups' arrival leaves possible at best
    for layer in range(num_layers - 1, -1, -1):
        behind_s += times.device_s[layer]
        ready_s = max(times.ready_s[layer], times.held_s[layer])
        held_until_s = max(held_until_s, ready_s + behind_s)
        ends_s[layer] = max(assisted_before[layer] + behind_s, held_until_s)
    return ends_s
