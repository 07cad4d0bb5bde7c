"""Compares an adapter's tensors other than LoRA with the base model's weights, in its files.

Quantised weights are dequantised for that.
"""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ...runtime.adapters.resolved import RawTensor
from ...runtime.adapters.tensor_names import PathIndex
from ..lora.convert import STORED_DTYPES
from .quantization import open_files
from .source import ModelSource, load_config
from .stored_quantization import read_stored_quantization
from .weight_files import WeightFiles

_BITS = {4: torch.int32, 2: torch.int16}  # by bytes of an element


class StoredBaseWeights:
    """The weight files of one model; see ``resolved.BaseWeights``. Opened on first use."""

    def __init__(self, source: ModelSource, dtype: torch.dtype) -> None:
        """``dtype``: the dtype in which the model is served."""
        self._source = source
        self._dtype = dtype

    def differing_rows(self, name: str, tensor: RawTensor, parts: Iterable[memoryview]) -> NDArray[np.bool_]:
        files, names = self._opened
        stored = names.find(name)
        shape = None if stored is None else files.shape(stored)
        num_rows = shape[0] if shape and shape[1:] == tensor.shape[1:] else 0
        differs = np.ones(tensor.shape[0], np.bool_)
        row = 0
        for part in parts:
            values = torch.frombuffer(part, dtype=STORED_DTYPES[tensor.dtype])
            values = values.view(-1, *tensor.shape[1:])
            end = min(row + len(values), num_rows)
            if stored is not None and row < end:
                base = files.read(stored, slice(row, end)).to(self._dtype)
                own = values[: end - row].to(self._dtype)
                differs[row:end] = _bits(own).ne(_bits(base)).flatten(1).any(1).numpy()
            row += len(values)
        return differs

    @cached_property
    def _opened(self) -> tuple[WeightFiles, PathIndex[str]]:
        files = open_files(self._source, read_stored_quantization(load_config(self._source)))
        return files, PathIndex({name: name for name in files.names})


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """At least two dimensions: those of a bias have one value each."""
    return rows.view(_BITS[rows.element_size()]).view(len(rows), -1)
