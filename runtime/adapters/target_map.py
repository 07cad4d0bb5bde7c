"""Where an adapter's matrices act: PEFT path -> (layer, input group, physical linear, slice).

Plain data. Kernels, loader and workers speak of target indices and input groups, never of module
names, so fusing q, k, v or gate, up later changes one table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

EXPERTS_REASON = "expert targets are not served yet"


@dataclass(frozen=True, slots=True)
class Target:
    """One linear of the base model that adapters may change."""

    index: int  # position in ``TargetMap.targets`` and in the kernels' tables
    path: str  # module path in the base model, e.g. "model.layers.0.self_attn.q_proj"
    layer: int  # decoder layer
    input_group: int  # within the layer; members read the same x
    in_features: int
    out_features: int
    physical_path: str  # the module that computes it; a fused one computes several targets


@dataclass(frozen=True, slots=True)
class UnusedModule:
    """A module that changes no text answer: what an adapter has for it is left out."""

    path: str  # of the module; those in it are as unused
    reason: str
    num_features: int  # inputs and outputs of all matrices in it: LoRA takes a rank for each
    num_weights: int  # in all


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """An embedding or the output head, of which trainers save a copy beside LoRA."""

    path: str  # of the module
    shapes: Mapping[str, tuple[int, ...]]  # of its tensors, by name, e.g. "weight"
    shared_with: str | None = None  # path of the module whose weight it has, if it is tied

    def tensor_name(self, name: str) -> str:
        """The name of the base's tensor that ``name`` of this module stands for."""
        return f"{(name == 'weight' and self.shared_with) or self.path}.{name}"


@dataclass(frozen=True, slots=True, eq=False)  # a model has one
class TargetMap:
    """All targets of one model, and why other modules cannot be targets."""

    targets: tuple[Target, ...]
    refused: Mapping[str, str]  # module path -> reason, for modules that PEFT could adapt
    unused: tuple[UnusedModule, ...] = ()
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)  # by path; also refused
