"""Where an adapter is read from, and what fits the model: the tensors of its file, by target.

Plain data between the reader, which knows files, and the device side, which knows arithmetic.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from .conventions import AdapterConventions
from .digest import ContentDigest
from .target_map import Target

# Of DoRA for each row of an output: a factor and a summand, float32.
FACTOR_BYTES = 8
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the served types, by their names in safetensors


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor in the file: row-major, little-endian."""

    name: str
    dtype: str  # of safetensors: F32, F16, BF16, …
    shape: tuple[int, ...]
    start: int  # of its bytes, after the file's header
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TargetLora:
    """The tensors of one target.

    The delta of its output is scaling * (x A^T) B^T. With magnitudes (DoRA), the output without the
    bias is then multiplied by magnitude / norm of (W + scaling * B A), by row of W.
    """

    target: Target
    a: RawTensor  # [rank, in_features]
    b: RawTensor  # [out_features, rank]
    rank: int
    scaling: float
    magnitudes: RawTensor | None = None  # [out_features]; of DoRA

    @property
    def tensors(self) -> tuple[RawTensor, ...]:
        """All tensors of the target."""
        return (self.a, self.b) if self.magnitudes is None else (self.a, self.b, self.magnitudes)


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A tensor of the file that must equal one of the base model."""

    tensor: RawTensor
    base_name: str  # of the base's tensor, e.g. "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """An adapter that fits the model: at least one target, by ascending index."""

    targets: tuple[TargetLora, ...]
    copies: tuple[BaseCopy, ...] = ()
    left_out: tuple[
        str, ...
    ] = ()  # parts of the file without effect on text, with reasons: phrases

    @property
    def max_rank(self) -> int:
        """The largest rank of any target."""
        return max(lora.rank for lora in self.targets)

    def num_bytes(self, bytes_per_element: int) -> int:
        """Bytes on a device that stores elements of this size, without padding."""
        matrices = bytes_per_element * sum(
            lora.rank * (lora.target.in_features + lora.target.out_features)
            for lora in self.targets
        )
        scaled = (lora.target for lora in self.targets if lora.magnitudes is not None)
        return matrices + FACTOR_BYTES * sum(target.out_features for target in scaled)


@dataclass(frozen=True, slots=True)
class PartSource:
    """The version of a part that a mix is made of."""

    name: str
    path: str
    digest: str
    scale: float


@dataclass(frozen=True, slots=True)
class MixSource:
    """All that a mix is read from."""

    parts: tuple[PartSource, ...]
    conventions: AdapterConventions

    def __str__(self) -> str:
        return " and ".join(part.path for part in self.parts)


AdapterPath = str | MixSource  # a PEFT directory, or those of a mix


# Called with one tensor and its bytes, which are valid until it returns.
TakeTensor = Callable[[RawTensor, memoryview], None]


class BaseWeights(Protocol):
    """The stored weights of the base model."""

    def has_values(self, name: str, tensor: RawTensor, parts: Iterable[memoryview]) -> bool:
        """Whether the base's tensor ``name`` equals ``tensor``, after a cast of both.

        ``parts``: the bytes of ``tensor``, in whole rows. Both are cast to the type that the base
        is served in. Raises ``ModelError`` if the base's files cannot be read.
        """
        ...


class AdapterReader(Protocol):
    """An adapter with its configuration and header read. Its values are read once, in order.

    A context manager, which closes the file.
    """

    @property
    def adapter(self) -> ResolvedAdapter:
        """The targets of all tensors."""
        ...

    @property
    def digest(self) -> ContentDigest:
        """The digest of the content; known once ``read_layers`` has ended."""
        ...

    def expect(self, digest: ContentDigest) -> None:
        """Accept only this content. Call it before ``read_layers``.

        Raises ``AdapterError`` if configuration, names or shapes already differ.
        """
        ...

    def read_layers(self, take: TakeTensor) -> Iterator[int]:
        """Pass the tensors to ``take``, in the order of layers; yield each complete layer.

        Tensors are valid only once their layer is yielded, and without ``expect`` only once this
        has ended. Raises ``AdapterError`` if the file cannot be read or has changed.
        """
        ...

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
