"""Where an adapter's matrices act: PEFT path -> (layer, input group, physical linear, slice).

Plain data. Kernels, loader and workers speak of target indices and input groups, never of module
names, so fusing q, k, v or gate, up later changes one table.
"""

from collections.abc import Mapping
from dataclasses import dataclass

EXPERTS_REASON = "expert targets are not served yet"
NO_TEXT_REASON = "no text passes there"


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
    """A module that changes no text answer: what an adapter has for it could be left out."""

    path: str  # of the module; those in it are as unused
    reason: str
    num_features: int  # inputs and outputs of all matrices in it: LoRA takes a rank for each
    num_weights: int  # in all


@dataclass(frozen=True, slots=True, eq=False)  # a model has one
class TargetMap:
    """All targets of one model, and why other modules cannot be targets."""

    targets: tuple[Target, ...]
    refused: Mapping[str, str]  # module path -> reason, for modules that PEFT could adapt
    unused: tuple[UnusedModule, ...] = ()
