"""Reads a model's weights as they are served, for what is computed from them on the host."""

import torch
from transformers import PreTrainedModel

from ...runtime.adapters.target_map import Target
from .quantized_linear import QuantizedLinear
from .wrapper import CorunLinear


class BaseReader:
    """Implements ``lora.factors.ReadBase``. Any thread may call it: weights do not change."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Copies on it wait for nothing that passes have enqueued, and nothing waits for them.
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None

    def __call__(self, target: Target) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight [out_features, in_features] and bias of one target, in the host's memory.

        A quantised weight is dequantised without rounding.
        """
        linear = self._model.get_submodule(target.physical_path)
        assert isinstance(linear, CorunLinear), target.physical_path
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if isinstance(linear.backend, QuantizedLinear):
                weight = torch.from_numpy(linear.backend.packed.unpacked().dequantized())
            else:
                weight = linear.weight.cpu()
            bias = None if linear.bias is None else linear.bias.cpu()
        return weight, bias
