"""An adapter that fits the model: which tensors of its file are the matrices of which target.

Plain data between the reader, which knows files, and the device half, which knows arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

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
class ResolvedAdapter:
    """An adapter that fits the model: at least one target, by ascending index."""

    targets: tuple[TargetLora, ...]

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


class AdapterReader(Protocol):
    """An adapter whose configuration and header have been read; its tensors come once, in order.

    A context manager, which closes the file.
    """

    @property
    def adapter(self) -> ResolvedAdapter:
        """Where each tensor belongs."""
        ...

    @property
    def digest(self) -> str:
        """Of the content, hexadecimal; known once ``tensors`` has come to its end."""
        ...

    def tensors(self) -> Iterator[tuple[RawTensor, memoryview]]:
        """Read the tensors one after the other; the bytes are valid until the next one.

        Raises ``AdapterError`` if the file cannot be read or has changed meanwhile.
        """
        ...

    def __enter__(self) -> Self:
        """Use it in a ``with`` statement."""
        ...

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        ...
