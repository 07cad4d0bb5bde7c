"""Where an adapter is read from, and what fits the model: the tensors of its file, by target.

Plain data between the reader, which knows files, and the device side, which knows arithmetic.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from .conventions import AdapterConventions
from .digest import ContentDigest
from .target_map import Target

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .lora_spec import LoraSpec

# Of DoRA for each row of an output: a factor and a summand, float32.
FACTOR_BYTES = 8
ID_BYTES = 4  # of the token of a row
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the served types, by their names in safetensors


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor in the file: row-major, little-endian."""

    name: str
    dtype: str  # of safetensors: F32, F16, BF16, …
    shape: tuple[int, ...]
    start: int  # of its bytes, after the file's header
    num_bytes: int

    def rows(self, first: int, end: int, name: str) -> "RawTensor":
        """Return the rows [first, end) as a tensor with this name."""
        row_bytes = self.num_bytes // self.shape[0]
        shape = (end - first, *self.shape[1:])
        start = self.start + first * row_bytes
        return RawTensor(name, self.dtype, shape, start, (end - first) * row_bytes)


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
        return (self.a, self.b) if self.magnitudes is None else (self.a, self.b, self.magnitudes)


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """A tensor of the file that the base model has, too."""

    tensor: RawTensor
    base_name: str  # of the base's tensor, e.g. "lm_head.weight"
    target: Target | None  # its rows that differ from the base's are served; None = none may


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of consecutive tokens, for the embedding of tokens or the output head."""

    first: int  # token id
    tensor: RawTensor  # [tokens, features]; of the file, or a part of one

    @property
    def end(self) -> int:
        """One past the last token id."""
        return self.first + self.tensor.shape[0]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The rows of the embedding of tokens or the output head that an adapter has itself.

    They take the place of the base's rows, before LoRA is added, or follow them.
    """

    target: Target
    num_tokens: int  # of the adapter's vocabulary
    runs: tuple[TokenRows, ...]  # by ascending token id
    refusal: str = ""  # why none may differ from the base's; "" = they may

    @property
    def num_rows(self) -> int:
        return sum(run.end - run.first for run in self.runs)

    @property
    def changes_base(self) -> bool:
        """Whether it has any row, or fewer tokens than the base."""
        return bool(self.runs) or self.num_tokens != self.target.num_tokens


@dataclass(frozen=True, slots=True, eq=False)  # those of equal shapes are one object
class ResolvedAdapter:
    """An adapter that fits the model: at least one target, by ascending index."""

    targets: tuple[TargetLora, ...]
    saved: tuple[SavedWeight, ...] = ()
    rows: tuple[TargetRows, ...] = ()  # by ascending index of the target
    left_out: tuple[str, ...] = ()  # parts of the file without effect on text, with reasons: phrases

    @property
    def max_rank(self) -> int:
        return max(lora.rank for lora in self.targets)

    def num_bytes(self, bytes_per_element: int) -> int:
        """Bytes on a device that stores elements of this size, without padding."""
        matrices = bytes_per_element * sum(
            lora.rank * (lora.target.in_features + lora.target.out_features) for lora in self.targets
        )
        scaled = (lora.target for lora in self.targets if lora.magnitudes is not None)
        factors = FACTOR_BYTES * sum(target.out_features for target in scaled)
        rows = sum(
            one.num_rows * (ID_BYTES + one.target.row_features * bytes_per_element) for one in self.rows
        )
        return matrices + factors + rows


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


Stamp = tuple[int, int, int]  # of a file: bytes, time of the last change in ns, inode


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What is known of an adapter before its values are read."""

    spec: "LoraSpec"
    tensors: tuple[RawTensor, ...]
    stamp: Stamp  # of their file


StoredTensor = tuple[RawTensor, memoryview]  # with its bytes
# Called with some tensors. Their bytes are valid until the call returns.
TakeTensors = Callable[[Sequence[StoredTensor]], None]


class BaseWeights(Protocol):
    """The stored weights of the base model."""

    def differing_rows(
        self, name: str, tensor: RawTensor, parts: Iterable[memoryview]
    ) -> "NDArray[np.bool_]":
        """Which rows of ``tensor`` differ from those of the base's tensor ``name``: [rows].

        ``parts``: the bytes of ``tensor``, in whole rows. Both are cast to the type that the base
        is served in. Rows that the base lacks differ. Raises ``ModelError`` if the base's files
        cannot be read.
        """


class AdapterReader(Protocol):
    """An adapter with its configuration and header read. Its values are read once, in order.

    A context manager, which closes the file.
    """

    @property
    def outline(self) -> ResolvedAdapter:
        """The adapter as its header says, without the rows that only a comparison finds."""

    @property
    def adapter(self) -> ResolvedAdapter:
        """All of the adapter; compares saved weights with the base's, unless ``expect`` was called.

        Raises ``AdapterError`` for weights that differ and may not, or are not finite.
        """

    @property
    def digest(self) -> ContentDigest:
        """The digest of the content; known once ``read_layers`` has ended."""

    def expect(self, digest: ContentDigest) -> None:
        """Accept only this content. Call it before ``read_layers``.

        Raises ``AdapterError`` if configuration, names or shapes already differ.
        """

    def begin(self) -> FileHeader | None:
        """What identifies the file if no value of it is needed to use its first layers, else None."""

    def resume(self, header: FileHeader) -> None:
        """Accept only the file of which another reader's ``begin`` returned this.

        Raises ``AdapterChangedError`` if it has changed since.
        """

    def read_layers(self, take: TakeTensors) -> Iterator[int]:
        """Pass the tensors to ``take``, in the order of layers; yield each complete layer.

        Tensors are valid only once their layer is yielded, and without ``expect`` only once the
        last one is. Raises ``AdapterError`` if the file cannot be read or has changed.
        """

    def close(self) -> None:
        """Close the file. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
