"""A checkpoint of quantised tensors, read as if it were full.

Each format has a reader, which finds its tensors by their names, types and sizes before anything
else of them is read (``four_bit.py``, ``scaled.py``, ``mxfp4.py``, ``stored_integers.py``).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...runtime.errors import ModelError
from ..linear.quantized import QuantizedWeight
from .source import ModelSource
from .weight_files import WeightFiles

_LOG = logging.getLogger(__name__)

# As safetensors names them.
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# Of no full tensor that a model loads.
_QUANTIZED_DTYPES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"})


class StoredMatrix(Protocol):
    """A quantised tensor on disk, and the full one that it represents."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The type to which the format's own library rounds its values."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Entries [start, stop) of the first dimension, in their own memory.

        Raises ``ModelError``, also for values that are not finite.
        """


class CodedMatrix(StoredMatrix, Protocol):
    """A matrix of codes that the kernels compute with."""

    def as_stored(self) -> QuantizedWeight:
        """Its codes and scales. Raises ``ModelError``."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a format has found in the files."""

    matrices: Mapping[str, StoredMatrix]  # by the names of the full tensors
    parts: frozenset[str]  # the names on disk of all tensors that belong to them
    coded: Mapping[str, CodedMatrix] = field(default_factory=dict)  # some of the matrices


class FullFiles(WeightFiles):
    """The *.safetensors of a model, with a full tensor in place of each quantised one."""

    def __init__(self, source: ModelSource, find: Callable[[WeightFiles], Found], method: str) -> None:
        """Find all quantised tensors. Raises ``ModelError``.

        ``method``: what config.json calls the format, for logs.
        """
        super().__init__(source)
        found = find(WeightFiles(source))
        self._matrices = found.matrices
        self.coded = found.coded  # the matrices that can be served as stored, by name
        self._names = (frozenset(super().names) - found.parts) | found.matrices.keys()
        self._transposed: frozenset[str] = frozenset()
        for name in sorted(self._names - found.matrices.keys()):
            if super().dtype(name) in _QUANTIZED_DTYPES:
                raise unreadable(
                    name, f"it is {super().dtype(name)}, but no tensors of {method} belong to it"
                )
        if not self._matrices:
            _LOG.warning(
                "config.json of %s says that the checkpoint is quantised (%s), but no tensor is; "
                "the weights are served as stored",
                source.path,
                method,
            )

    @property
    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._matrices.get(name)
        if found is not None:
            return found.shape
        return super().shape(name) if name in self._names else None

    def dtype(self, name: str) -> str:
        found = self._matrices.get(name)
        return super().dtype(name) if found is None else _NAMES[found.dtype]

    def read(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        found = self._matrices.get(name)
        if found is None:
            return super().read(name, rows)
        start, stop, _ = rows.indices(found.shape[0])
        return found.read(start, stop)

    @property
    def num_quantized(self) -> int:
        """Number of quantised tensors."""
        return len(self._matrices)

    def transpose(self, paths: Iterable[str]) -> None:
        """Make transformers load the matrices of these modules in the layout of ``Conv1D``.

        On disk they have the layout of linears, by which quantisation replaces ``Conv1D``.
        """
        weights = tuple(f".{path}.weight" for path in paths)
        self._transposed = frozenset(
            name for name in self._matrices if any(one.endswith(f".{name}") for one in weights)
        )

    @contextmanager
    def lazily(self, names: Collection[str]) -> Iterator[dict[str, Any]]:
        full = [name for name in names if name not in self._matrices]
        with super().lazily(full) as tensors:
            yield tensors | {
                name: _Lazy(self, name, is_transposed=name in self._transposed)
                for name in self._matrices.keys() & names
            }


class _Lazy:
    """A matrix that is read when transformers slices it."""

    def __init__(self, files: FullFiles, name: str, *, is_transposed: bool) -> None:
        self._files = files
        self._name = name
        self._is_transposed = is_transposed

    def __getitem__(self, index: Any) -> torch.Tensor:
        matrix = self._files.read(self._name)
        return (matrix.T if self._is_transposed else matrix)[index]


def unreadable(name: str, what: str) -> ModelError:
    """The error for a quantised tensor or linear."""
    return ModelError(f"the quantised tensor {name} cannot be read: {what}")


def check_finite(name: str, values: torch.Tensor) -> None:
    """Refuse scales, or products with them, that are not finite. Raises ``ModelError``."""
    if not bool(values.isfinite().all()):
        raise unreadable(name, "it has scales or values that are not finite (NaN or infinity)")
