"""Compares an adapter's tensors other than LoRA with the base model's weights, in its files."""

from collections.abc import Iterable
from functools import cached_property

import torch

from ...runtime.adapters.resolved import RawTensor
from ...runtime.adapters.tensor_names import PathIndex
from ..lora.convert import STORED_DTYPES
from .source import ModelSource
from .weight_files import WeightFiles

_BITS = {4: torch.int32, 2: torch.int16}  # by bytes of an element


class StoredBaseWeights:
    """The weight files of one model; see ``resolved.BaseWeights``. Opened on first use."""

    def __init__(self, source: ModelSource, dtype: torch.dtype) -> None:
        """``dtype``: the dtype in which the model is served."""
        self._source = source
        self._dtype = dtype

    def has_values(self, name: str, tensor: RawTensor, parts: Iterable[memoryview]) -> bool:
        """See ``resolved.BaseWeights``."""
        files, names = self._opened
        stored = names.find(name)
        if stored is None or files.shape(stored) != tensor.shape:
            return False
        row = 0
        for part in parts:
            values = torch.frombuffer(part, dtype=STORED_DTYPES[tensor.dtype])
            values = values.view(-1, *tensor.shape[1:])
            base = files.read(stored, slice(row, row + len(values)))
            if not _have_same_bits(values.to(self._dtype), base.to(self._dtype)):
                return False
            row += len(values)
        return True

    @cached_property
    def _opened(self) -> tuple[WeightFiles, PathIndex[str]]:
        files = WeightFiles(self._source)
        return files, PathIndex({name: name for name in files.names})


def _have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = _BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))
