"""The module that replaces every linear of the base model, and the replacement.

Independent of adapters' names, requests and attention. Linears with the same input x are a group:
computed together, with the deltas of the running pass, at the first call, and returned one by one.
"""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from ...runtime.adapters.target_map import Target
from ..forward.batch import DeltaPass, StepContext
from ..forward.launcher import current_launcher
from .base import LinearBackend, MakeLinear
from .numba_backend import FusedProduct, KernelLinear, NumbaLinear, has_same_order
from .plain import FusedPlain, PlainLinear


class InputGroup:
    """Base products of some linears, and the deltas of those that are targets of adapters.

    Members may be called in any order, each with the same x. Results that have not been requested
    yet are stored together with x; after the last one nothing is stored.
    """

    def __init__(self, context: StepContext, key: Hashable, *, is_head: bool = False) -> None:
        """Start without members.

        ``key`` names the group to the pass that adds deltas; ``is_head``: it is the output head.
        """
        self._context = context
        self._key = key
        self._is_head = is_head
        self._backends: list[LinearBackend] = []
        self._fused: FusedProduct | FusedPlain | None = None  # of all members
        self._targets: list[tuple[int, int]] = []  # member, its target index
        self._waiting: dict[int, torch.Tensor] = {}
        self._x: torch.Tensor | None = None  # the input of the stored results
        self._deltas: DeltaPass | None = None  # of the pass of the stored results

    def join(self, backend: LinearBackend, target_index: int | None) -> int:
        """Add a member and return its number; it is a target if it has an index."""
        member = len(self._backends)
        self._backends.append(backend)
        if target_index is not None:
            self._targets.append((member, target_index))
        return member

    def fuse(self) -> None:
        """Compute the members in one product if their back ends can; after the last ``join``.

        Plain weights are copied into one, except on the CPU, where it gains nothing.
        """
        num_members = len(self._backends)
        kernels = [b for b in self._backends if isinstance(b, KernelLinear)]
        plain = [b for b in self._backends if isinstance(b, PlainLinear) and b.weight.device.type != "cpu"]
        if len(kernels) == num_members and _are_of_one_form(kernels):
            self._fused = FusedProduct(kernels)
        elif len(plain) == num_members > 1 and len({b.weight.dtype for b in plain}) == 1:
            self._fused = FusedPlain(plain)

    def product(self, member: int, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias + deltas of one member: [..., in_features] -> [..., out_features]."""
        if len(self._backends) == 1:
            return self._compute(x)[0]
        # A member called twice with the same x is called in another pass.
        deltas = self._pass_deltas
        if not (self._x is x and self._deltas is deltas and member in self._waiting):
            self._waiting = dict(enumerate(self._compute(x)))
            self._x, self._deltas = x, deltas
        result = self._waiting.pop(member)
        if not self._waiting:
            self._x = self._deltas = None
        return result

    def _compute(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._context.progress.advance()
        deltas = self._pass_deltas
        if deltas is None or not self._targets:
            return self._base_products(x)
        tokens = x.reshape(-1, x.shape[-1])
        # Repeatable deltas are recorded as the kernels that they consist of.
        call = _call_now if deltas.is_repeatable else current_launcher().call_in_every_pass
        call(lambda: self._running_deltas().begin(self._key, tokens))
        results = self._base_products(x)
        more = self._context.num_head_tokens - results[0].shape[-1] if self._is_head else 0
        if more > 0:  # tokens that only an adapter has
            results = [nn.functional.pad(result, (0, more)) for result in results]
        ys = [results[member] for member, _ in self._targets]
        ys = [_rows(y) for y in ys]
        indices = [index for _, index in self._targets]
        call(lambda: self._running_deltas().add(self._key, tokens, ys, indices))
        return results

    @property
    def _pass_deltas(self) -> DeltaPass | None:
        return self._context.head_deltas if self._is_head else self._context.deltas

    def _running_deltas(self) -> DeltaPass:
        deltas = self._pass_deltas
        assert deltas is not None
        return deltas

    def _base_products(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self._fused is not None:
            return self._fused(x)
        return [backend(x) for backend in self._backends]


def _call_now(call: Callable[[], None]) -> None:
    call()


def _are_of_one_form(kernels: Sequence[KernelLinear]) -> bool:
    are_one = len({kernel.tag.dtype for kernel in kernels}) == 1
    return are_one and all(has_same_order(kernel, kernels[0]) for kernel in kernels)


def _rows(y: torch.Tensor) -> torch.Tensor:
    """[1, tokens, features] -> [tokens, features]; a ``view`` of one token forgets the stride."""
    return y[0] if y.ndim == 3 and y.shape[0] == 1 else y.view(-1, y.shape[-1])


MakeAt = Callable[[str, nn.Linear], LinearBackend | None]


class TiedEmbedding(nn.Module):
    """Replaces an ``nn.Embedding``, so that the matrix is in memory only once."""

    def __init__(self, source: NumbaLinear) -> None:
        super().__init__()
        self._source = source

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [num_embeddings, features]; unpacked at each access."""
        return self._source.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Look up: int64 [...] -> [..., features]."""
        return self._source.rows(indices)


class AdaptedEmbedding(nn.Module):
    """Replaces the embedding of tokens: a look-up, and the deltas of adapters."""

    def __init__(self, base: nn.Module, context: StepContext, key: Hashable, target: Target) -> None:
        """``base``: an ``nn.Embedding``, which may scale its rows, or its replacement."""
        super().__init__()
        self._base = base
        self._context = context
        self._key = key
        self._target_index = target.index
        self._last_token = target.num_tokens - 1
        scale = getattr(base, "embed_scale", None)
        self._scale = None if scale is None else torch.as_tensor(scale)

    @property
    def weight(self) -> torch.Tensor:
        """The base's matrix [num_embeddings, features]; may be unpacked at each access."""
        weight = self._base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up: int64 [1, tokens] -> [1, tokens, features]."""
        y: torch.Tensor
        if self._context.embedding_deltas is None:
            y = self._base(token_ids)
            return y
        known = token_ids.clamp(max=self._last_token)  # others are an adapter's own
        y = self._base(known)
        if self._scale is None:
            self._change(token_ids, y)
            return y
        before = nn.functional.embedding(known, self.weight)
        rows = before.clone()
        self._change(token_ids, rows)
        is_changed = (rows != before).any(-1, keepdim=True)
        return torch.where(is_changed, rows * self._scale.to(y), y)

    def _change(self, token_ids: torch.Tensor, y: torch.Tensor) -> None:
        rows = y.view(-1, y.shape[-1])
        current_launcher().call_in_every_pass(lambda: self._add(token_ids.view(-1), rows))

    def _add(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        deltas = self._context.embedding_deltas
        assert deltas is not None
        deltas.add(self._key, token_ids, (rows,), (self._target_index,))


def plain_embeddings(model: nn.Module) -> dict[int, list[str]]:
    """Paths of embeddings by the identity of their weight, which a linear may share.

    Excludes subclasses, which may do more than look up.
    """
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Embedding and module.max_norm is None:
            paths.setdefault(id(module.weight), []).append(path)
    return paths


class CorunLinear(nn.Module):
    """A base product and, if adapters may change this linear, their deltas."""

    def __init__(
        self, linear: nn.Linear, backend: LinearBackend, group: InputGroup, target_index: int | None
    ) -> None:
        """Replace ``linear`` in ``group``; it is a target if it has an index."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.backend = backend  # of the base product
        self._target_index = target_index
        self._group = group
        self._member = group.join(self.backend, target_index)

    @property
    def weight(self) -> torch.Tensor:
        """The base weight [out_features, in_features]; may be unpacked at each access."""
        return self.backend.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The base bias [out_features], if there is one."""
        return self.backend.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias + deltas: [1, tokens, in_features] -> [1, tokens, out_features]."""
        return self._group.product(self._member, x)

    def extra_repr(self) -> str:
        """The text that ``print(model)`` shows."""
        target = "" if self._target_index is None else f", target_index={self._target_index}"
        return f"{self.in_features}, {self.out_features}, backend={self.backend.name}{target}"


def _make_backend(linear: nn.Linear, make_backend: MakeLinear) -> LinearBackend:
    """The back end for the model's type, unless this linear is stored in an unsupported one."""
    dtypes = make_backend.dtypes
    if dtypes is None or linear.weight.dtype in dtypes:
        return make_backend(linear.weight, linear.bias)
    return PlainLinear(linear.weight, linear.bias)


def wrap_linears(
    model: nn.Module,
    context: StepContext,
    make_backend: MakeLinear,
    target_of: Mapping[str, int],
    group_of: Mapping[str, Hashable],
    make_at: MakeAt = lambda _path, _linear: None,
    *,
    heads: frozenset[str] = frozenset(),
) -> int:
    """Replace every ``nn.Linear`` of ``model``, and every target, in place; return their number.

    Other subclasses of nn.Linear are left alone. A linear reachable by several paths stays one
    module. ``target_of`` maps module paths to target indices; all of them must be replaced.
    ``heads``: paths of those that are output heads. Linears with the same value in ``group_of``
    read the same x and are computed together. ``make_at`` may return the back end of a path; with
    None ``make_backend`` makes it, which needs an ``nn.Linear``. Weights are replaced one by one,
    so a packed copy and its original coexist for only one linear, and weights that are fused for
    only one group. An embedding tied to a linear reads its rows from the packed copy if possible;
    otherwise it keeps the weight alive.
    """
    missing = set(target_of)
    groups: dict[Hashable, InputGroup] = {}
    embeddings = plain_embeddings(model)
    num_wrapped = 0
    for paths in _linear_paths(model, target_of):
        index = next((target_of[path] for path in paths if path in target_of), None)
        key = next((group_of[path] for path in paths if path in group_of), None)
        group = InputGroup(context, key, is_head=not heads.isdisjoint(paths))
        if key is not None:
            group = groups.setdefault(key, group)
        linear = cast("nn.Linear", model.get_submodule(paths[0]))  # or a module in its place
        tied = embeddings.get(id(getattr(linear, "weight", None)), [])
        backend = make_at(paths[0], linear) or _make_backend(linear, make_backend)
        wrapper = CorunLinear(linear, backend, group, index)
        del linear, backend
        for path in paths:
            _put(model, path, wrapper)
        if isinstance(wrapper.backend, NumbaLinear):
            for path in tied:
                _put(model, path, TiedEmbedding(wrapper.backend))
        missing.difference_update(paths)
        num_wrapped += 1
    for group in groups.values():
        group.fuse()
    assert not missing, f"no nn.Linear at {sorted(missing)[:3]}"
    return num_wrapped


def adapt_embedding(model: nn.Module, context: StepContext, target: Target, key: Hashable) -> None:
    """Replace the embedding of tokens in place; ``key`` names it to the deltas."""
    base = model.get_submodule(target.path)
    _put(model, target.path, AdaptedEmbedding(base, context, key, target))


def detach_from_weight_files(model: nn.Module) -> None:
    """Copy the remaining tensors of the model into their own memory, in place.

    A tensor read through a mapping of its file keeps all of it mapped, so the linears' packed
    weights would be in memory twice.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _linear_paths(model: nn.Module, targets: Container[str]) -> list[list[str]]:
    """The paths of each linear: names instead of modules, so that nothing here keeps them alive."""
    paths: dict[int, list[str]] = {}
    linears = set()
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
        if type(module) is nn.Linear or path in targets:
            linears.add(id(module))
    return [of_one for identity, of_one in paths.items() if identity in linears]
