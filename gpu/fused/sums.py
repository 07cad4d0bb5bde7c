"""Sums that a decoder's layers pass on, and that wait for the next norm."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .compare import Forward, FusedCounts, agree
from .triton_backend import Sum, TritonNorm, resolved

_LOG = logging.getLogger(__name__)


def let_norms_wait(module: nn.Module, is_pending: bool) -> bool:
    """Whether a module's own norms wait for their readers; returns whether it has such norms."""
    norms = [one.forward for one in module.children() if isinstance(one.forward, TritonNorm)]
    for norm in norms:
        norm.is_pending = is_pending
    return bool(norms)


def install_sums(model: nn.Module, run: Callable[[], object]) -> FusedCounts:
    """Have layers pass on sums that wait for the next layer's norm."""
    counts = FusedCounts()
    stacks = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    layers = [layer for stack in stacks for layer in stack if let_norms_wait(layer, False)]
    watched = [_WatchedLayer(layer) for layer in layers]
    run()
    for watch in watched:
        let_norms_wait(watch.layer, True)
    run()
    for watch in watched:
        counts.found += 1
        counts.replaced += watch.end()
    return counts


class _WatchedLayer:
    """Calls a layer, and at the second call compares what it computes from a sum that waits."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._forward: Forward = layer.forward
        self._first: tuple[torch.Tensor, Any] | None = None  # hidden states and result
        self._reason = "it is not called with hidden states"
        layer.forward = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not arguments or not isinstance(arguments[0], torch.Tensor):
            return self._forward(*arguments, **named)
        hidden, *others = arguments
        if self._first is None:
            self._first = hidden.clone(), self._forward(*arguments, **named)
            return self._first[1]
        hidden, expected = self._first
        try:
            actual = self._forward(Sum(hidden), *others, **named)
        except Exception as error:  # any error of the model's code on what is not a tensor
            self._reason = f"it fails: {type(error).__name__}: {error}"
            return expected
        is_equal = agree(*(resolved(_hidden_of(one)) for one in (actual, expected)))
        self._reason = "" if is_equal else "results differ from the module's own"
        return expected

    def end(self) -> bool:
        """Whether the layer passes on sums from now on."""
        if self._reason:
            name = type(self.layer).__name__
            _LOG.info("fused kernels: no sums that wait for %s, because %s", name, self._reason)
            del self.layer.forward
            let_norms_wait(self.layer, False)
            return False
        self.layer.forward = _SummingLayer(self._forward)
        return True


class _SummingLayer:
    """The ``forward`` of a layer: it gets a sum, adds to it and passes it on."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, hidden: Any, *arguments: Any, **named: Any) -> Any:
        stream = hidden if isinstance(hidden, Sum) else Sum(resolved(hidden))
        return self._forward(stream, *arguments, **named)


def _hidden_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
