"""Tensors without values, without the long way that torch takes to find their shapes.

A model is made of meta tensors before its weights are read. What computes with them is in part
written in Python, for symbolic shapes, and imports sympy first: 0.3 s of a start, for shapes that
are plain numbers. What models do with their small tensors (rotary frequencies) is done on the CPU
instead, and what is only for values is left out.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MAX_ELEMENTS = 1 << 16
_OPERATORS = ("add", "sub", "mul", "truediv", "div", "pow")
_FUNCTIONS = ("add", "sub", "mul", "div", "true_divide", "pow")
_ELEMENTWISE = frozenset(
    getattr(owner, name)
    for owner, names in (
        (torch.Tensor, [f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")]),
        (torch.Tensor, _FUNCTIONS),
        (torch, _FUNCTIONS),
    )
    for name in names
    if hasattr(owner, name)
)


class CheapMetaTensors(TorchFunctionMode):
    """As a context: the same meta tensors as ever, by a shorter way where one is known."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            tensor = kwargs.get("tensor", args[0] if args else None)
            if _is_meta(tensor):
                return tensor
        elif func is torch.arange:
            if str(kwargs.get("device")) == "meta":
                return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        elif func is torch.empty_like:
            if args and _is_meta(args[0]) and _is_plain(args[0], kwargs):
                options = {"dtype": args[0].dtype, "device": "meta", **kwargs}
                return torch.empty(args[0].shape, **options)
        elif func in _ELEMENTWISE and not kwargs and _are_small_floats(args):
            return func(*map(_with_values, args)).to("meta")
        return func(*args, **kwargs)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_plain(tensor: torch.Tensor, options: Mapping[str, Any]) -> bool:
    return tensor.is_contiguous() and options.keys() <= {"dtype", "device"}


def _are_small_floats(args: tuple[Any, ...]) -> bool:
    """Whether the tensors among these are meta, few and such that no value is refused."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(
        tensor.is_meta
        and tensor.is_floating_point()
        and tensor.is_contiguous()
        and tensor.numel() <= _MAX_ELEMENTS
        for tensor in tensors
    )


def _with_values(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.ones(value.shape, dtype=value.dtype)
