"""An adapter that has been read and fits the model: its matrices by target, still as bytes.

Plain data between the reader, which knows files, and the device half, which knows arithmetic.
"""

from dataclasses import dataclass

from .target_map import Target

FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the served types, as safetensors calls them


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as it lies in the file: row-major, little-endian."""

    name: str
    dtype: str  # of safetensors: F32, F16, BF16, …
    shape: tuple[int, ...]
    data: memoryview  # of bytes, writable, owned by this tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return self.data.nbytes


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
