"""Norms, rotations and gated products on a GPU, and tensors that wait for the kernel reading them.

transformers' modules add, norm and rotate one after the other. Here the first of these returns a
``Pending``, and the kernel that reads it computes both. Any other reader gets the tensor.

Importing this module does not import Triton; computing something does.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from ..forward.batch import AttentionMetadata
from .rope import is_servable

_TILE_VALUES = 1024  # of rows or heads that are shorter
_VALUES_PER_WARP = 512
_MAX_WARPS = 16
_MAX_ALIGNMENT = 16  # values; more does not make loads wider
_ADDITIONS = frozenset({torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__})


class Pending:
    """Stands for a tensor, which is computed when it is first needed."""

    _tensor: torch.Tensor | None = None

    def _compute(self) -> torch.Tensor:
        raise NotImplementedError

    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = self._compute()
        return self._tensor

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function in _ADDITIONS and len(args) == 2 and not kwargs:
            return _add(*args)
        named = {name: resolved(argument) for name, argument in (kwargs or {}).items()}
        return function(*map(resolved, args), **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def __add__(self, other: Any) -> Any:
        return _add(self, other)

    def __radd__(self, other: Any) -> Any:
        return _add(other, self)

    __hash__ = object.__hash__


def resolved(value: Any) -> Any:
    """The value, with tensors in place of what stands for them."""
    if isinstance(value, Pending):
        return value.tensor()
    if isinstance(value, list | tuple) and any(isinstance(one, Pending) for one in value):
        return type(value)(map(resolved, value))
    return value


def _forward_operator(name: str) -> None:
    # Python looks operators up in the class, not by ``__getattr__``.
    def call(self: Pending, *arguments: Any) -> Any:
        return getattr(self.tensor(), name)(*map(resolved, arguments))

    setattr(Pending, name, call)


for _operator in (
    *("sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul"),
    *("neg", "abs", "invert", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne"),
    *("getitem", "setitem", "len", "iter", "bool", "int", "float"),
):
    _forward_operator(f"__{_operator}__")


class TritonNorm:
    """Replaces the ``forward`` of an RMS norm: [..., features] -> [..., features]."""

    def __init__(self, factors: torch.Tensor, epsilon: float, *, rounds_twice: bool) -> None:
        self.factors = factors.detach().float().contiguous()
        self.epsilon = epsilon
        self.rounds_twice = rounds_twice
        self.is_pending = False  # whether the result waits for its reader

    def __call__(self, x: Any) -> Any:
        """Norm each row; a sum is computed along."""
        if isinstance(x, Sum):
            return x.normed_by(self)
        return Normed(x, self) if self.is_pending else self.compute(resolved(x))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Norm each row now: [..., features] -> [..., features]."""
        return _norm(x, outer=self)[1]


def _norm(
    x: torch.Tensor,
    *,
    inner: TritonNorm | None = None,
    base: torch.Tensor | None = None,
    outer: TritonNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return total = base + inner(x), and outer(total); without outer the second is undefined."""
    x = x.contiguous()
    features = x.shape[-1]
    total = x if base is None else torch.empty_like(x)
    y = x if outer is None else torch.empty_like(x)
    num_rows = x.numel() // features
    features_pad = _next_power_of_2(features)
    block_rows = max(1, _TILE_VALUES // features_pad)
    # Arguments are always the same; unused ones may be any tensor.
    first, last = inner or outer, outer or inner
    assert first is not None and last is not None
    _launcher("norm_kernel")(
        (-(-num_rows // block_rows),),
        x,
        x if base is None else base.contiguous(),
        total,
        y,
        first.factors,
        last.factors,
        first.epsilon,
        last.epsilon,
        num_rows,
        FEATURES=features,
        FEATURES_PAD=features_pad,
        BLOCK_ROWS=block_rows,
        HAS_INNER=inner is not None,
        INNER_ROUNDS_TWICE=first.rounds_twice,
        HAS_BASE=base is not None,
        HAS_OUTER=outer is not None,
        OUTER_ROUNDS_TWICE=last.rounds_twice,
        num_warps=min(_MAX_WARPS, max(1, features_pad * block_rows // _VALUES_PER_WARP)),
    )
    return total, y


class Normed(Pending):
    """The result of a norm, for the sum or the rotation that reads it."""

    def __init__(self, x: torch.Tensor, norm: TritonNorm) -> None:
        self.x = x
        self.norm = norm

    def _compute(self) -> torch.Tensor:
        return self.norm.compute(self.x)

    def transpose(self, first: int, second: int) -> Any:
        """A view like that of a tensor; it waits, too, if the rows stay rows."""
        last = self.x.ndim - 1
        if last in {first % self.x.ndim, second % self.x.ndim}:
            return self.tensor().transpose(first, second)
        return Normed(self.x.transpose(first, second), self.norm)


class Sum(Pending):
    """The sum that a layer passes on, for the norm that reads it."""

    def __init__(self, base: torch.Tensor, addend: torch.Tensor | Normed | None = None) -> None:
        """Both of one shape and type; without ``addend`` it is ``base``."""
        self._base: torch.Tensor | None = base
        self._addend = addend
        self._tensor = base if addend is None else None

    def _compute(self) -> torch.Tensor:
        base, addend = self._base, self._addend
        assert base is not None and addend is not None
        self._base = self._addend = None
        if isinstance(addend, Normed):
            return _norm(addend.x, inner=addend.norm, base=base)[0]
        return torch.add(base, addend)

    def normed_by(self, norm: TritonNorm) -> torch.Tensor:
        """The norm of the sum, which is computed along if it has not been yet."""
        base, addend = self._base, self._addend
        if addend is None or base is None:
            return norm.compute(self.tensor())
        self._base = self._addend = None
        x, inner = (addend.x, addend.norm) if isinstance(addend, Normed) else (addend, None)
        self._tensor, y = _norm(x, inner=inner, base=base, outer=norm)
        return y


def _add(a: Any, b: Any) -> Any:
    """Return a + b, which waits for a norm if one of both is the sum of a layer."""
    stream, other = (a, b) if isinstance(a, Sum) else (b, a)
    if not isinstance(stream, Sum) or isinstance(other, Sum):
        return torch.add(resolved(a), resolved(b))
    base = stream.tensor()
    x = other.x if isinstance(other, Normed) else resolved(other)
    if not isinstance(x, torch.Tensor) or x.shape != base.shape or x.dtype != base.dtype:
        return torch.add(base, resolved(other))
    return Sum(base, other if isinstance(other, Normed) else x)


def gated_product(gate: torch.Tensor, up: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up: [..., tokens, features] of a 16-bit type, rows of one stride each.

    ``table``: [65536], the activation of every value, by its bits.
    """
    features = gate.shape[-1]
    gates, ups = gate.reshape(-1, features), up.reshape(-1, features)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = min(_TILE_VALUES, _next_power_of_2(features))
    _launcher("gated_kernel")(
        (gates.shape[0], -(-features // block)),
        gates.view(torch.int16),
        ups,
        table,
        y,
        gate.stride(-2),
        up.stride(-2),
        FEATURES=features,
        BLOCK=block,
        num_warps=4,
    )
    return y


class Rotation:
    """Queries and keys of one call with their cosines and sines; at first they are not rotated."""

    def __init__(self, q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._norms: tuple[TritonNorm, TritonNorm] | None = None
        are_normed = isinstance(q, Normed) and isinstance(k, Normed)
        if are_normed and q.norm.rounds_twice == k.norm.rounds_twice:
            self._norms = q.norm, k.norm
            q, k = q.x, k.x
        self._q, self._k = (resolved(one)[0].transpose(0, 1) for one in (q, k))
        self._tables = cos, sin
        self._rotated: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether nothing has been rotated yet."""
        return self._rotated is None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, rotated: [tokens, heads, dim]."""
        if self._rotated is None:
            num_tokens, kv_heads, dim = self._k.shape
            keys = self._k.new_empty((num_tokens, kv_heads, 1, dim))
            queries = self._launch(self._k, keys, keys, None)
            self._rotated = queries, keys[:, :, 0]
        return self._rotated

    def write(
        self,
        value: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write keys and ``value`` [tokens, kv_heads, dim] to the pool; return the queries."""
        return self._launch(value, key_blocks, value_blocks, metadata)

    def _launch(
        self,
        value: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> torch.Tensor:
        """``metadata``: None = each token has a block of its own."""
        (q, k), (cos, sin) = (self._q, self._k), self._tables
        norms = self._norms or (None, None)
        num_tokens, heads, dim = q.shape
        kv_heads, value_dim = k.shape[1], value.shape[2]
        queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dim_pad = _next_power_of_2(dim)
        block_heads = max(1, min(_TILE_VALUES // dim_pad, _next_power_of_2(heads)))
        num_tiles = -(-heads // block_heads) + -(-kv_heads // block_heads)
        _launcher("rotate_kernel")(
            (num_tokens, num_tiles),
            q,
            k,
            value,
            cos,
            sin,
            *(cos if norm is None else norm.factors for norm in norms),
            *(0.0 if norm is None else norm.epsilon for norm in norms),
            queries,
            key_blocks,
            value_blocks,
            cos if metadata is None else metadata.slot_mapping,
            *q.stride()[:2],
            *k.stride()[:2],
            *value.stride()[:2],
            cos.stride(1),
            *key_blocks.stride()[:2],
            *value_blocks.stride()[:2],
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            DIM_PAD=dim_pad,
            HALF=cos.shape[2] // 2,
            VALUE_DIM=value_dim,
            VALUE_PAD=_next_power_of_2(value_dim),
            BLOCK_HEADS=block_heads,
            BLOCK_SIZE=1 if metadata is None else metadata.block_size,
            HAS_NORM=self._norms is not None,
            ROUNDS_TWICE=self._norms is not None and self._norms[0].rounds_twice,
            IS_PAGED=metadata is not None,
            ALIGNMENT=_alignment(q, k, value, cos),
            num_warps=4,
            enable_fp_fusion=False,
        )
        return queries


class Rotated(Pending):
    """The queries or the keys of a rotation, for the kernel that writes the keys to the pool."""

    def __init__(self, rotation: Rotation, index: int, *, is_by_token: bool = False) -> None:
        """Queries have ``index`` 0: [tokens, heads, dim] by token, else [1, heads, tokens, dim]."""
        self.rotation = rotation
        self._index = index
        self._is_by_token = is_by_token

    def by_token(self) -> "Rotated":
        """The same as [tokens, heads, dim]."""
        return Rotated(self.rotation, self._index, is_by_token=True)

    def _compute(self) -> torch.Tensor:
        by_token = self.rotation.tensors()[self._index]
        return by_token if self._is_by_token else by_token.transpose(0, 1)[None]


def rotate(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Rotated, Rotated]:
    """See ``rope.rotate``; both results wait for their reader, and norms of q and k until then."""
    rows = [one.x if isinstance(one, Normed) else one for one in (q, k)]
    assert is_servable(rows[0], rows[1], cos, sin), (cos.shape, sin.shape)
    rotation = Rotation(q, k, cos, sin)
    return Rotated(rotation, 0), Rotated(rotation, 1)


def pending_rotation(query: Any, key: Any) -> Rotation | None:
    """The rotation that both are of, if it has not been computed yet."""
    if isinstance(query, Rotated) and isinstance(key, Rotated):
        rotation = query.rotation
        if rotation is key.rotation and rotation.is_pending:
            return rotation
    return None


@cache
def _launcher(name: str) -> Any:
    """The launcher of a kernel; imports Triton."""
    from ..forward.triton_launch import KernelLauncher
    from . import triton_kernels

    return KernelLauncher(getattr(triton_kernels, name))


def _alignment(*parts: torch.Tensor) -> int:
    """What all strides are multiples of; those of single tokens or heads say nothing."""
    sizes = (pair for part in parts for pair in zip(part.shape[:2], part.stride(), strict=False))
    return math.gcd(_MAX_ALIGNMENT, *(stride for size, stride in sizes if size > 1))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
