"""Maps the targets of adapters: PEFT path -> (layer, input group, physical linear, slice).

Plain data. Kernels, loader and workers use target indices and input groups, never module names, so
that fusing q, k, v or gate, up changes only this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

EXPERTS_REASON = "expert targets are not served yet"


@dataclass(frozen=True, slots=True)
class Target:
    """One linear of the base model that adapters can target."""

    index: int  # position in ``TargetMap.targets`` and in the kernels' tables
    path: str  # module path in the base model, e.g. "model.layers.0.self_attn.q_proj"
    layer: int  # decoder layer; one outside counts to the layer next to it
    # Within the layer, in the order of calls; members read the same x. Outside of the layers it is
    # below 0 before the first one, and above the numbers in all layers behind the last one.
    input_group: int
    in_features: int
    out_features: int
    physical_path: str  # the module that computes it; a fused module computes several targets
    is_inside: bool = True  # of a decoder layer
    is_head: bool = False  # the output head, which reads only the tokens that need logits
    is_embedding: bool = False  # of tokens; ``in_features`` is the number of their ids

    @property
    def num_tokens(self) -> int:
        """Of an embedding or the head: the base's number of tokens."""
        return self.in_features if self.is_embedding else self.out_features

    @property
    def row_features(self) -> int:
        """Of an embedding or the head: the features of a token."""
        return self.out_features if self.is_embedding else self.in_features

    @property
    def is_vocabulary(self) -> bool:
        """Whether its inputs or its outputs are the tokens of the vocabulary."""
        return self.is_head or self.is_embedding


@dataclass(frozen=True, slots=True)
class UnusedModule:
    """A module without effect on text: an adapter's tensors for it are left out."""

    path: str  # of the module; modules in it are unused too
    reason: str
    num_features: int  # inputs and outputs of all its matrices: LoRA needs a rank for each
    num_weights: int  # in all


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """An embedding or the output head, which trainers may save beside LoRA."""

    path: str  # of the module
    shapes: Mapping[str, tuple[int, ...]]  # of its tensors, by name, e.g. "weight"
    shared_with: str | None = None  # path of the module that it is tied to

    def tensor_name(self, name: str) -> str:
        """Return the name of the base's tensor for ``name`` of this module."""
        return f"{(name == 'weight' and self.shared_with) or self.path}.{name}"


@dataclass(frozen=True, slots=True, eq=False)  # a model has one
class TargetMap:
    """All targets of one model, and why other modules cannot be targets."""

    targets: tuple[Target, ...]
    refused: Mapping[str, str]  # module path -> reason, for modules that PEFT could adapt
    unused: tuple[UnusedModule, ...] = ()
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)  # by path

    @property
    def inside(self) -> tuple[Target, ...]:
        """The targets in decoder layers: those that most adapters have."""
        return tuple(target for target in self.targets if target.is_inside)
