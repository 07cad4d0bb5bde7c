"""Linears with the same input x: computed together at the first call, returned one by one.

Adds the LoRA deltas of the running pass. Knows nothing of modules; the caller decides which linears
read the same x.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from ..forward.batch import DeltaPass, StepContext
from ..forward.launcher import current_launcher
from .base import LinearBackend
from .numba_backend import FusedProduct, KernelLinear, has_same_order
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
