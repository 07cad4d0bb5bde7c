"""Replaces modules of a model by one-pass kernels that give the same results.

There is no list of architectures. Every module that looks like a norm, a gated feed-forward or an
attention with rotary embeddings is compared on random and extreme inputs, of one token and of many.
It is replaced only if the kernel gives the same bits, but for the last place of a few.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ...cpu_workers.kernels import fused as kernels
from ..forward.kernel_threads import num_kernel_threads
from ..forward.launcher import current_launcher
from . import triton_backend
from .activation import ActivationTables, GatedProduct, gated_product, is_gated, mlp_candidates
from .rope import Rotate, is_rotary_embedding, is_servable, rotate, rotation_of, with_rotation
from .triton_backend import Normed, Sum, TritonNorm, resolved

Forward = Callable[..., Any]

# Another order of the sums in a norm occasionally moves a value over the boundary between two
# values of 16 bits; where the result is rounded twice, over two boundaries.
_MAX_STEPS_APART = 2
_MIN_EQUAL_SHARE = 0.99


@dataclass(slots=True)
class FusedCounts:
    """How many modules of a kind were found, and how many use a kernel of corun."""

    found: int = 0
    replaced: int = 0
    unknown: set[str] = field(default_factory=set)  # classes of the kind, of another form
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # classes with reasons

    def refuse(self, module: nn.Module, reason: str) -> None:
        """Count a module that keeps its own code."""
        self.refused[type(module).__name__, reason] += 1


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """The kernels of a device, and the models that they are for."""

    name: str
    norm: Callable[..., Forward]  # see ``norm_candidates``
    product: GatedProduct
    rotate: Rotate
    dtype: torch.dtype
    device: torch.device

    def draw(self, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        """Normal values of this magnitude, the same ones for each shape."""
        generator = torch.Generator().manual_seed(sum(shape))
        drawn = torch.randn(shape, generator=generator) * scale
        return drawn.to(self.device, self.dtype)


@dataclass(frozen=True, slots=True)
class Input:
    """Tokens [1, parts * tokens of a part, features]; each part must agree by itself."""

    x: torch.Tensor
    num_parts: int


class Inputs:
    """Inputs of the comparison: one token of each scale, and many of all scales at once."""

    def __init__(self, num_tokens: tuple[int, int], scales: Sequence[float], kernels: FusedKernels) -> None:
        self._num_tokens = num_tokens
        self._scales = scales
        self._kernels = kernels
        self._drawn: dict[int, list[Input]] = {}
        self._known: set[tuple[type, int]] = set()

    def add_known(self, kind: type, features: int) -> None:
        """Further modules of this class and width are compared on single tokens only.

        They differ from the one that has been replaced in their weights, perhaps in constants.
        """
        self._known.add((kind, features))

    def of(self, kind: type, features: int) -> list[Input]:
        """Drawn once for all modules of a width."""
        if features not in self._drawn:
            one, many = (
                [self._kernels.draw((1, num, features), scale) for scale in self._scales]
                for num in self._num_tokens
            )
            parts = Input(torch.cat(many, dim=1), len(many))
            self._drawn[features] = [*(Input(x, 1) for x in one), parts]
        return self._drawn[features][: -1 if (kind, features) in self._known else None]


def agree(actual: torch.Tensor, expected: torch.Tensor, num_parts: int = 1) -> bool:
    """Whether the same numbers are NaN, and the others equal or adjacent.

    Each part, of equal size in memory, must have enough equal numbers.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    is_nan = expected.isnan()
    if not torch.equal(actual.isnan(), is_nan):
        return False
    apart = (_place(actual) - _place(expected)).masked_fill(is_nan, 0).abs()
    equal_shares = (apart == 0).reshape(num_parts, -1).float().mean(dim=1)
    return float(equal_shares.min()) >= _MIN_EQUAL_SHARE and int(apart.max()) <= _MAX_STEPS_APART


def _described(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Say how results that do not agree differ, for the log."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"the kernel gives {actual.dtype} {list(actual.shape)}, the module {expected.dtype} "
            f"{list(expected.shape)}"
        )
    is_other = (actual != expected) & ~(actual.isnan() & expected.isnan())
    first = is_other.nonzero()[0].tolist()
    one, other = (float(values[tuple(first)]) for values in (actual, expected))
    steps = int((_place(actual) - _place(expected))[is_other].abs().max())
    return (
        f"{float(is_other.float().mean()):.3%} of the values of {list(actual.shape)} differ from the "
        f"module's, by up to {steps} steps of the last place; the first, at {first}, is {one:.9g}, "
        f"not {other:.9g}"
    )


def _place(values: torch.Tensor) -> torch.Tensor:
    """The index of each value of 16 bits in ascending order; both zeros have the same one."""
    bits = values.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


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
        watch.end(counts)
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
        results = [resolved(_hidden_of(one)) for one in (actual, expected)]
        self._reason = "" if agree(*results) else _described(*results)
        return expected

    def end(self, counts: FusedCounts) -> None:
        """Have the layer pass on sums from now on, unless there is a reason against it."""
        counts.found += 1
        if self._reason:
            counts.refuse(self.layer, self._reason)
            del self.layer.forward
            let_norms_wait(self.layer, False)
            return
        self.layer.forward = _SummingLayer(self._forward)
        counts.replaced += 1


class _SummingLayer:
    """The ``forward`` of a layer: it gets a sum, adds to it and passes it on."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, hidden: Any, *arguments: Any, **named: Any) -> Any:
        stream = hidden if isinstance(hidden, Sum) else Sum(resolved(hidden))
        return self._forward(stream, *arguments, **named)


def _hidden_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


_LOG = logging.getLogger(__name__)

_NUM_TOKENS = (1, 41)
_MLP_NUM_TOKENS = (1, 11)  # products of many are slow
# Magnitudes of inputs: squares that overflow float32, squares that underflow, and common ones.
_SCALES = (1.0, 30.0, 1e-3, 1e25, 1e-30, 0.0)
# Only the structure of gated feed-forwards is unknown; their activations are tables.
_MLP_SCALES = (1.0, 30.0)

Norm = TypeVar("Norm")


class FusedNorm:
    """Replaces the ``forward`` of an RMS norm: [..., features] -> [..., features]."""

    def __init__(self, factors: torch.Tensor, epsilon: float, *, rounds_twice: bool) -> None:
        """``factors``: [features], multiplied with the normed row, in float32.

        ``rounds_twice``: the normed row is also rounded before the multiplication.
        """
        self._factors = factors.detach().float().contiguous()
        self._epsilon = np.float32(epsilon)
        self._rounds_twice = rounds_twice
        self._features = len(factors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norm each row of bfloat16."""
        features = self._features
        assert x.dtype == torch.bfloat16 and x.shape[-1] == features, (x.dtype, x.shape)
        rows = x if x.is_contiguous() else x.contiguous()
        launcher = current_launcher()
        y = launcher.new_output(rows.shape, torch.bfloat16)
        launcher.launch(
            kernels.norm,
            rows.data_ptr(),
            features,
            self._factors.data_ptr(),
            y.data_ptr(),
            rows.numel() // features,
            features,
            self._epsilon,
            self._rounds_twice,
            num_kernel_threads(),
        )
        return y


def is_weighted_norm(module: nn.Module) -> bool:
    """Whether a module is a norm by its name, and not one of torch's own."""
    is_norm = "norm" in type(module).__name__.lower() and not isinstance(module, nn.LayerNorm)
    return is_norm and any(True for _ in module.parameters(recurse=False))


def norm_candidates(module: nn.Module, dtype: torch.dtype, make: Callable[..., Norm]) -> Iterator[Norm]:
    """Possible kernels for a module that looks like an RMS norm; a check decides.

    ``make``: ``FusedNorm``, or a class with the same arguments.
    """
    if not is_weighted_norm(module):
        return
    # Only of norms: a linear's weight may be packed, and unpacking a model takes half a second.
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or not isinstance(weight, torch.Tensor):
        return
    if weight.ndim == 1 and weight.dtype == dtype:
        # Llama and later families; OLMo 2 and gpt-oss; Gemma.
        yield make(weight, epsilon, rounds_twice=True)
        yield make(weight, epsilon, rounds_twice=False)
        yield make(1.0 + weight.float(), epsilon, rounds_twice=False)


NUMBA = FusedKernels("numba", FusedNorm, gated_product, rotate, torch.bfloat16, torch.device("cpu"))


def triton_kernels(dtype: torch.dtype, device: torch.device) -> FusedKernels:
    """Those of a GPU, for float16 or bfloat16."""
    one = triton_backend
    return FusedKernels("triton", TritonNorm, one.gated_product, one.rotate, dtype, device)


def select_fused_kernels(name: str, model: PreTrainedModel, run: Callable[[], object]) -> str:
    """Install the kernels, unless disabled; returns a description for logs.

    ``run``: see ``install_fused_kernels``.
    """
    device, dtype = model.device, model.dtype
    is_cpu = device.type == "cpu"
    kernels = NUMBA if is_cpu else triton_kernels(dtype, device)
    if name == "off":
        reason: str | None = "configured"
    elif is_cpu and dtype != torch.bfloat16:
        reason = f"they compute bfloat16, the model is {dtype}"
    elif dtype not in {torch.bfloat16, torch.float16}:
        reason = f"they compute bfloat16 and float16, the model is {dtype}"
    else:
        reason = None if is_cpu else _failure_of(kernels)
    if reason is not None:
        _LOG.info("fused kernels: off (%s)", reason)
        return "off"
    counts = install_fused_kernels(model, run, kernels)
    return kernels.name if any(kind.replaced for kind in counts.values()) else "off"


def _failure_of(kernels: FusedKernels) -> str | None:
    """Why kernels cannot be compiled or run here, if they cannot."""
    x = kernels.draw((1, 16), 1.0)
    try:
        kernels.norm(torch.ones_like(x[0]), 1e-6, rounds_twice=False)(x)
    except Exception as error:  # any error of a compiler or a driver
        reason = f"they do not work here: {type(error).__name__}: {error}"
        _LOG.warning("fused kernels: the model's own code is slower, but %s", reason)
        return reason
    return None


def install_fused_kernels(
    model: nn.Module, run: Callable[[], object], kernels: FusedKernels = NUMBA
) -> dict[str, FusedCounts]:
    """Replace ``forward`` of modules of a model of the kernels' type; returns counts by kind.

    ``run`` computes a short pass through the model's attention: rotary embeddings are compared on
    its inputs. The first call compiles kernels.
    """
    with torch.inference_mode():
        counts = {
            "norms": _install_norms(model, kernels),
            "gated activations": _install_mlps(model, kernels),
            "rotary embeddings": _install_rotations(model, run, kernels),
        }
        if kernels.norm is TritonNorm:
            counts["sums of layers"] = install_sums(model, run)
    described = ", ".join(f"{n.replaced} of {n.found} {kind}" for kind, n in counts.items())
    _LOG.info("fused kernels: %s", described)
    for kind, found in counts.items():
        for (name, reason), number in found.refused.items():
            _LOG.info("fused kernels: %d %s keep their own %s: %s", number, name, kind, reason)
        if found.unknown and not found.replaced:
            _LOG.warning(
                "fused kernels: no %s, because corun does not know the form of %s in transformers "
                "%s; the model's own code is used, which is correct but slower",
                kind,
                ", ".join(sorted(found.unknown)),
                transformers.__version__,
            )
    return counts


def _install_norms(model: nn.Module, kernels: FusedKernels) -> FusedCounts:
    counts = FusedCounts()
    inputs = Inputs(_NUM_TOKENS, _SCALES, kernels)
    for module in model.modules():
        candidates = list(norm_candidates(module, kernels.dtype, kernels.norm))
        if candidates:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            _install_first_equal(module, candidates, len(weight), inputs, counts)
        elif is_weighted_norm(module):
            counts.unknown.add(type(module).__name__)
    return counts


def _install_mlps(model: nn.Module, kernels: FusedKernels) -> FusedCounts:
    counts = FusedCounts()
    tables = ActivationTables(kernels.dtype, kernels.device)
    inputs = Inputs(_MLP_NUM_TOKENS, _MLP_SCALES, kernels)
    for module in list(model.modules()):
        candidates = list(mlp_candidates(module, tables, kernels.product))
        if candidates:
            first: Any = next(module.children())
            _install_first_equal(module, candidates, first.in_features, inputs, counts)
        elif is_gated(module):
            counts.unknown.add(type(module).__name__)
    return counts


def _install_first_equal(
    module: nn.Module, candidates: Iterable[Forward], features: int, inputs: Inputs, counts: FusedCounts
) -> None:
    counts.found += 1
    forward: Forward = module.forward
    compared = [(given, forward(given.x)) for given in inputs.of(type(module), features)]
    for candidate in candidates:
        if all(agree(candidate(given.x), expected, given.num_parts) for given, expected in compared):
            module.forward = candidate
            counts.replaced += 1
            inputs.add_known(type(module), features)
            return
    counts.refuse(module, "no kernel gives the module's own results")


def _install_rotations(model: nn.Module, run: Callable[[], object], kernels: FusedKernels) -> FusedCounts:
    counts = FusedCounts()
    watched: list[tuple[nn.Module, _WatchedRotation]] = []
    known: dict[Hashable, str] = {}
    rotary = {type(one).__name__ for one in model.modules() if is_rotary_embedding(one)}
    for module in model.modules():
        rotation = rotation_of(module)
        if rotation is not None:
            watch = _WatchedRotation(rotation, kernels, known)
            module.forward = with_rotation(module, watch)
            let_norms_wait(module, True)
            watched.append((module, watch))
    run()
    if not any(watch.is_of_known_form for _, watch in watched):
        counts.unknown = {type(module).__name__ for module, _ in watched} or rotary
    for module, watch in watched:
        counts.found += 1
        del module.forward
        if watch.reason is None:
            module.forward = with_rotation(module, kernels.rotate)
            counts.replaced += 1
        else:
            let_norms_wait(module, False)
            counts.refuse(module, watch.reason)
    return counts


class _WatchedRotation:
    """Applies the model's own function, and compares corun's on inputs like those of the call."""

    def __init__(self, rotation: Rotate, kernels: FusedKernels, known: dict[Hashable, str]) -> None:
        """``known``: differences by function and sizes, as most layers share both."""
        self._rotation = rotation
        self._kernels = kernels
        self._known = known
        self._differences: list[str] = []
        self._has_other_arguments = False

    @property
    def reason(self) -> str | None:
        """Why corun's must not replace it; None if it was called, and they agreed each time."""
        if not self._differences:
            return "they are not called"
        return next(filter(None, self._differences), None)

    @property
    def is_of_known_form(self) -> bool:
        """Whether it was called with arguments of the known form, except perhaps for dtypes."""
        return bool(self._differences) and not self._has_other_arguments

    def __call__(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if len(arguments) != 4 or named:
            self._has_other_arguments = True
        can_compare = not self._has_other_arguments and is_servable(*arguments)
        self._differences.append(
            self._difference(*arguments) if can_compare else "they have arguments of another form"
        )
        return self._rotation(*arguments, **named)

    def _difference(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str:
        norms = [one.norm if isinstance(one, Normed) else None for one in (q, k)]
        key = (self._rotation, q.shape[1], q.shape[3], k.shape[1], cos.shape[2], *norms)
        if key not in self._known:
            self._known[key] = self._compare(q, k, cos)
        return self._known[key]

    def _compare(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> str:
        """Return the first difference; empty if all agree."""
        for num_tokens in _NUM_TOKENS:
            for scale in _SCALES:
                # Heads and tokens are in memory as in the model: tokens first.
                q_new, k_new = (self._drawn_like(t, num_tokens, scale) for t in (q, k))
                # No pairs of equal cosines: they would hide a wrong pairing.
                angles = self._kernels.draw((1, num_tokens, cos.shape[2]), 1.0)
                tables = (angles.cos(), angles.sin())
                expected = self._rotation(q_new, k_new, *tables)
                actual = map(resolved, self._kernels.rotate(q_new, k_new, *tables))
                for one, other in zip(actual, expected, strict=True):
                    if not agree(one, other):
                        return f"with inputs of about {scale:g}, {_described(one, other)}"
        return ""

    def _drawn_like(self, like: Any, num_tokens: int, scale: float) -> Any:
        shape = (1, num_tokens, like.shape[1], like.shape[3])
        x = self._kernels.draw(shape, scale).transpose(1, 2)
        return Normed(x, like.norm) if isinstance(like, Normed) else x
