"""Quantised checkpoints on CUDA: transformers loads them with the library of their format.

The linears are modules of that library, which corun calls; deltas are added to their results.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...runtime.adapters.tensor_names import PathIndex
from ...runtime.errors import AdapterError
from ..linear.plain import ModuleLinear
from ..lora.convert import STORED_DTYPES
from .load import load_model
from .quantization import Weights, open_files
from .quantization_plan import Quantization
from .skeleton import build_skeleton
from .source import ModelSource
from .stored_quantization import BITSANDBYTES
from .weight_files import WeightFiles

_LOG = logging.getLogger(__name__)


class QuantizedModules:
    """The linears of one model that the library of its format computes.

    It has the interface of ``QuantizedLinears``, but makes nothing and stores nothing.
    """

    task = ""

    def __init__(self, source: ModelSource, config: Any, quantization: Quantization) -> None:
        """Read the list of tensors. Raises ``ModelError``."""
        assert quantization.stored is not None
        self._source = source
        self._config = config
        self._quantization = quantization
        self._method = quantization.stored.method
        self._files = open_files(source, quantization.stored)
        self._names = PathIndex({name.removesuffix(".weight"): name for name in self._files.names})
        self._bytes: dict[str, int] = {}  # of modules that ``make`` has taken, by path
        self.skeleton: PreTrainedModel  # the model with full linears, on the meta device

    def load_rest(self, dtype: torch.dtype, device: torch.device, attention: str) -> PreTrainedModel:
        """Load the model like ``load_model``, with the modules of its format's library.

        Raises ``ModelError``.
        """
        self.skeleton = build_skeleton(self._source, self._config, attention).model
        asked = dtype
        if self._method == BITSANDBYTES:
            dtype = self._stored_dtype() or dtype
            # It would repeat for each product that it computes in float16.
            logging.getLogger("bitsandbytes.autograd").setLevel(logging.ERROR)
        model = load_model(self._source, self._config, dtype, device, attention)
        if model.dtype != asked:
            _LOG.warning(
                "the model is served in %s instead of %s, as its %s linears need it",
                model.dtype,
                asked,
                self._method,
            )
        return model

    def quantizes_all(self, _model: nn.Module) -> bool:
        """Whether no linear is left for other back ends."""
        return False

    def make(self, path: str, linear: nn.Module) -> ModuleLinear | None:
        """The back end of the linear at ``path``; None if it is an ``nn.Linear``."""
        if type(linear) is nn.Linear:
            return None
        self._bytes[path] = sum(tensor.nbytes for tensor in linear.state_dict().values())
        return ModuleLinear(linear, partial(_read, self._files, self._names.find(path), path))

    def finish(self, full_bytes: Mapping[str, int]) -> Weights:
        """The memory of the loaded tensors.

        ``full_bytes``: of all original parameters of the model, by name.
        """
        _LOG.info(
            "%d linears are computed by modules of %s, and the others in full", len(self._bytes), self._method
        )
        quantized_bytes = sum(self._bytes.values())
        others = sum(size for name, size in full_bytes.items() if name.rpartition(".")[0] not in self._bytes)
        kind = self._method if self._bytes else ""
        return Weights(quantized_bytes + others, quantized_bytes, kind, self._quantization.label)

    def _stored_dtype(self) -> torch.dtype | None:
        """The type of the embedding on disk. For bitsandbytes transformers converts only biases."""
        embedding = self.skeleton.get_input_embeddings()
        path = next(path for path, one in self.skeleton.named_modules() if one is embedding)
        name = self._names.find(path)
        return None if name is None else STORED_DTYPES.get(self._files.dtype(name))


def _read(files: WeightFiles, name: str | None, path: str) -> torch.Tensor:
    """The full matrix of the linear at ``path``, as corun's own reader of the format makes it."""
    if name is None:
        raise AdapterError(f"DoRA needs the weight of {path}, which the checkpoint stores under another name")
    return files.read(name)
