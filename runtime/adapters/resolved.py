"""An adapter that fits the model: which tensors of its file are the matrices of which target.

Plain data between the reader, which knows files, and the device half, which knows arithmetic.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from .digest import ContentDigest
from .target_map import Target

FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the served types, as safetensors calls them


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as it lies in the file: row-major, little-endian."""

    name: str
    dtype: str  # of safetensors: F32, F16, BF16, …
    shape: tuple[int, ...]
    start: int  # of its bytes, behind the file's header
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TargetLora:
    """The matrices of one target. The delta of its output is scaling * (x A^T) B^T."""

    target: Target
    a: RawTensor  # [rank, in_features]
    b: RawTensor  # [out_features, rank]
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A tensor of the file that must have the values of one of the base model."""

    tensor: RawTensor
    base_name: str  # of the base's tensor, e.g. "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """An adapter that fits the model: at least one target, by ascending index."""

    targets: tuple[TargetLora, ...]
    copies: tuple[BaseCopy, ...] = ()
    left_out: tuple[str, ...] = ()  # what of the file changes no text answer, and why: phrases

    @property
    def max_rank(self) -> int:
        """The largest rank of any target."""
        return max(lora.rank for lora in self.targets)

    def num_bytes(self, bytes_per_element: int) -> int:
        """Bytes on a device that stores elements of this size, without padding."""
        return bytes_per_element * sum(
            lora.rank * (lora.target.in_features + lora.target.out_features)
            for lora in self.targets
        )


# Takes one tensor and its bytes, which are valid until it returns.
TakeTensor = Callable[[RawTensor, memoryview], None]


class BaseWeights(Protocol):
    """The weights of the base model, as they are stored."""

    def has_values(self, name: str, tensor: RawTensor, parts: Iterable[memoryview]) -> bool:
        """Whether the base's tensor ``name`` is that of ``tensor``, once both are cast.

        ``parts``: the bytes of ``tensor``, in whole rows. The type is the one that the base is
        served in. Raises ``ModelError`` if the base's files cannot be read.
        """
        ...


class AdapterReader(Protocol):
    """An adapter whose configuration and header have been read; its values come once, in order.

    A context manager, which closes the file.
    """

    @property
    def adapter(self) -> ResolvedAdapter:
        """Where each tensor belongs."""
        ...

    @property
    def digest(self) -> ContentDigest:
        """Of the content; known once ``read_layers`` has come to its end."""
        ...

    def expect(self, digest: ContentDigest) -> None:
        """Read nothing but this content. Before ``read_layers``.

        Raises ``AdapterError`` if it cannot be it: configuration, names or shapes are others.
        """
        ...

    def read_layers(self, take: TakeTensor) -> Iterator[int]:
        """Hand the tensors over, first layer first; yield each layer once it is whole.

        What was handed over counts only then, and without ``expect`` only once this has ended.
        Raises ``AdapterError`` if the file cannot be read or has changed.
        """
        ...

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
