"""GPT-2's linears: the library's ``Conv1D`` stores the weight of a linear transposed."""

from torch import nn
from transformers.pytorch_utils import Conv1D


def linears_for_conv1d(model: nn.Module) -> frozenset[str]:
    """Replace every ``Conv1D`` of ``model`` by an equivalent ``nn.Linear``.

    The weight [in_features, out_features] is not copied, but viewed transposed. Returns the paths
    of the replaced modules.
    """
    paths = [path for path, module in model.named_modules() if type(module) is Conv1D]
    for path in paths:
        parent, _, name = path.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, name, _linear(model.get_submodule(path)))
    return frozenset(paths)


def _linear(conv: nn.Module) -> nn.Linear:
    weight, bias = conv.get_parameter("weight"), conv.get_parameter("bias")
    in_features, out_features = weight.shape
    linear = nn.Linear(in_features, out_features, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.t(), requires_grad=weight.requires_grad)
    linear.bias = nn.Parameter(bias, requires_grad=bias.requires_grad)
    return linear
