"""Tensors without values, without the long way that torch takes to find their shapes.

A model is made of meta tensors before its weights are read. What computes with them is in part
written in Python, for symbolic shapes, and imports sympy first: 0.3 s of a start, for shapes that
are plain numbers. What models do with their small tensors (rotary frequencies) is done on the CPU
instead, and what is only for values is left out.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MAX_ELEMENTS = 1 << 20
# For others the CPU lacks some functions that meta tensors have.
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
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
            if _is_short_range(args, kwargs):
                return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        elif func is torch.empty_like:
            if args and _is_meta(args[0]) and _is_plain(args[0], kwargs):
                given = {name: value for name, value in kwargs.items() if value is not None}
                options = {"dtype": args[0].dtype, "device": "meta", **given}
                return torch.empty(args[0].shape, **options)
        elif func in _ELEMENTWISE and not kwargs and _are_small_floats(args):
            return func(*map(_with_values, args)).to("meta")
        return func(*args, **kwargs)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_short_range(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    if str(options.get("device")) != "meta" or not options.keys() <= {"dtype", "device"}:
        return False
    if not 1 <= len(args) <= 3 or not all(map(_is_number, args)):
        return False
    start, end = (0, *args) if len(args) == 1 else args[:2]
    step = args[2] if len(args) == 3 else 1
    return bool(step) and abs((end - start) / step) <= _MAX_ELEMENTS


def _is_plain(tensor: torch.Tensor, options: Mapping[str, Any]) -> bool:
    return tensor.is_contiguous() and options.keys() <= {"dtype", "device"}


def _are_small_floats(args: tuple[Any, ...]) -> bool:
    """Whether these are numbers and plain meta tensors of which no result can be large."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return (
        bool(tensors)
        and all(_is_number(value) or isinstance(value, torch.Tensor) for value in args)
        and all(
            tensor.is_meta
            and tensor.dtype in _DTYPES
            and tensor.is_contiguous()
            and not tensor.requires_grad
            for tensor in tensors
        )
        and math.prod(tensor.numel() for tensor in tensors) <= _MAX_ELEMENTS
    )


def _with_values(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.ones(value.shape, dtype=value.dtype)
