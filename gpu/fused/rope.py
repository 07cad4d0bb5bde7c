"""Rotary embeddings of transformers' decoders in one pass, in bfloat16.

The attention modules call a function of their own file by its name. A module gets a copy of its
``forward``, and of its decorators, in which the name refers to corun's function; code shared with
other models is not changed.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...cpu_workers.kernels import fused as kernels
from ..forward.kernel_threads import num_kernel_threads
from ..forward.launcher import current_launcher

_NAME = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[Any, Any]]  # queries and keys


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys.

    q, k: bfloat16 [1, heads, tokens, dim] in any order of heads and tokens; cos, sin: bfloat16
    [1, tokens, rotary dim], of pairs (i, i + rotary dim / 2). Returns the same shapes, laid out
    as [1, tokens, heads, dim].
    """
    assert q.dtype == torch.bfloat16, q.dtype
    assert is_servable(q, k, cos, sin), (q.shape, k.shape, cos.shape, sin.shape)
    _, q_heads, num_tokens, dim = q.shape
    k_heads = k.shape[1]
    launcher = current_launcher()
    q_out = launcher.new_output((1, num_tokens, q_heads, dim), torch.bfloat16)
    k_out = launcher.new_output((1, num_tokens, k_heads, dim), torch.bfloat16)
    launcher.launch(
        kernels.rotate,
        q.data_ptr(),
        q.stride(2),
        q.stride(1),
        q_heads,
        q_out.data_ptr(),
        k.data_ptr(),
        k.stride(2),
        k.stride(1),
        k_heads,
        k_out.data_ptr(),
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.stride(1),
        cos.shape[2],
        num_tokens,
        num_kernel_threads(),
    )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def is_servable(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether ``rotate``, on CUDA also for float16, supports these tensors."""
    tensors = (q, k, cos, sin)
    return (
        all(t.dtype == q.dtype and t.shape[0] == 1 and t.stride(-1) == 1 for t in tensors)
        and q.dtype.itemsize == 2
        and q.ndim == k.ndim == 4
        and cos.ndim == 3
        and cos.shape == sin.shape
        and cos.stride() == sin.stride()
        and q.shape[2] == k.shape[2] == cos.shape[1]
        and q.shape[3] == k.shape[3] >= cos.shape[2]
        and cos.shape[2] % 2 == 0
    )


def is_rotary_embedding(module: nn.Module) -> bool:
    """Whether a module, by its name, computes the factors of the rotation."""
    return "rotary" in type(module).__name__.lower()


def rotation_of(module: nn.Module) -> Rotate | None:
    """The function that a module's ``forward`` calls by the usual name for the rotation, if any."""
    forward = _innermost(type(module).forward)
    found: Rotate | None = None if forward is None else forward.__globals__.get(_NAME)
    return found


def with_rotation(module: nn.Module, rotation: Rotate) -> Callable[..., Any]:
    """A ``forward`` for the module with another rotation function, decorated like its own."""
    forward = type(module).forward
    assert isinstance(forward, types.FunctionType)
    return types.MethodType(_copy(forward, rotation), module)


def _innermost(function: Any) -> types.FunctionType | None:
    """The function under the decorators that calls the rotation by the usual name; None if none."""
    while isinstance(function, types.FunctionType):
        if _NAME in function.__code__.co_names:
            return function
        cell = _cell_of_decorated(function)
        function = None if cell is None else cell.cell_contents
    return None


def _copy(function: types.FunctionType, rotation: Rotate) -> types.FunctionType:
    """A copy that uses another rotation in its innermost function."""
    names, closure = function.__globals__, function.__closure__ or ()
    if _NAME in function.__code__.co_names:
        names = {**names, _NAME: rotation}
    else:
        decorated = _cell_of_decorated(function)
        assert decorated is not None
        inner = types.CellType(_copy(decorated.cell_contents, rotation))
        closure = tuple(inner if cell is decorated else cell for cell in closure)
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _cell_of_decorated(function: types.FunctionType) -> types.CellType | None:
    """The closure cell in which a decorator refers to the decorated function."""
    decorated = getattr(function, "__wrapped__", None)
    if decorated is None:
        return None
    # Cells are compared, because one may be empty.
    expected = types.CellType(decorated)
    return next((cell for cell in function.__closure__ or () if cell == expected), None)
