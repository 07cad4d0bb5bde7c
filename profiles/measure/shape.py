"""The input groups of a model, on which its speed depends."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from ...gpu.execution.assemble import LoadedModel
from ...runtime.adapters.target_map import Target
from ..profile import ModelShape
from .delta_bench import GroupShape


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """Shapes by the number of the input group in a layer; of several the most common one.

    Layers of most models are alike. Where they are not, predictions are of the usual layer.
    """

    num_layers: int
    shapes: tuple[GroupShape, ...]
    keys: tuple[tuple[int, int], ...]  # (layer, input group) of those with these shapes


def model_groups(loaded: LoadedModel) -> ModelGroups:
    """Count the shapes of all layers."""
    members: dict[tuple[int, int], list[Target]] = defaultdict(list)
    for target in loaded.target_map.inside:
        members[target.layer, target.input_group].append(target)
    shape_of = {key: _shape(targets) for key, targets in members.items()}
    counts: dict[int, Counter[GroupShape]] = defaultdict(Counter)
    for (_, group), shape in shape_of.items():
        counts[group][shape] += 1
    shapes = tuple(counts[group].most_common(1)[0][0] for group in sorted(counts))
    return ModelGroups(
        num_layers=1 + max(layer for layer, _ in members),
        shapes=shapes,
        keys=tuple(key for key in sorted(shape_of) if shape_of[key] == shapes[key[1]]),
    )


def model_shape(loaded: LoadedModel) -> ModelShape:
    """The properties that must be equal for a profile to apply."""
    groups = model_groups(loaded)
    return ModelShape(
        groups.num_layers,
        str(loaded.dtype).removeprefix("torch."),
        tuple((shape.name, shape.in_features, sum(shape.columns)) for shape in groups.shapes),
        loaded.layout.token_bytes,
    )


def _shape(targets: list[Target]) -> GroupShape:
    return GroupShape(
        name=targets[0].path.rpartition(".")[2],
        in_features=targets[0].in_features,
        columns=tuple(target.out_features for target in targets),
    )
