"""Replaces modules of a model by one-pass kernels that give the same results.

There is no list of architectures. Every module that looks like a norm, a gated feed-forward or an
attention with rotary embeddings is compared on random and extreme inputs, of one token and of many.
It is replaced only if the kernel gives the same bits, but for the last place of a few.
"""

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from . import triton_backend
from .activation import ActivationTables, gated_product, is_gated, mlp_candidates
from .compare import Forward, FusedCounts, FusedKernels, Input, Inputs, agree
from .norm import FusedNorm, is_weighted_norm, norm_candidates
from .rope import Rotate, is_rotary_embedding, is_servable, rotate, rotation_of, with_rotation
from .sums import install_sums, let_norms_wait
from .triton_backend import Normed, TritonNorm, resolved

_LOG = logging.getLogger(__name__)

_NUM_TOKENS = (1, 41)
_MLP_NUM_TOKENS = (1, 11)  # products of many are slow
# Magnitudes of inputs: squares that overflow float32, squares that underflow, and common ones.
_SCALES = (1.0, 30.0, 1e-3, 1e25, 1e-30, 0.0)
# Only the structure of gated feed-forwards is unknown; their activations are tables.
_MLP_SCALES = (1.0, 30.0)

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
        if found.unknown and not found.replaced:
            _LOG.warning(
                "fused kernels: no %s, because corun does not know the form of %s in transformers "
                "%s; the model's own code is used, which is correct but slower",
                kind, ", ".join(sorted(found.unknown)), transformers.__version__,
            )  # fmt: skip
    return counts


def _install_norms(model: nn.Module, kernels: FusedKernels) -> FusedCounts:
    counts = FusedCounts()
    inputs = Inputs(_NUM_TOKENS, _SCALES, kernels)
    for module in model.modules():
        candidates = list(norm_candidates(module, kernels.dtype, kernels.norm))
        if candidates:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            _install_first_equal(module, candidates, inputs.of(len(weight)), counts)
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
            _install_first_equal(module, candidates, inputs.of(first.in_features), counts)
        elif is_gated(module):
            counts.unknown.add(type(module).__name__)
    return counts


def _install_first_equal(
    module: nn.Module, candidates: Iterable[Forward], inputs: list[Input], counts: FusedCounts
) -> None:
    counts.found += 1
    forward: Forward = module.forward
    expected = [forward(given.x) for given in inputs]
    for candidate in candidates:
        if all(
            agree(candidate(given.x), y, given.num_parts)
            for given, y in zip(inputs, expected, strict=True)
        ):
            module.forward = candidate
            counts.replaced += 1
            return
    _LOG.info(
        "fused kernels: none for %s, because none gives the module's own results",
        type(module).__name__,
    )


def _install_rotations(
    model: nn.Module, run: Callable[[], object], kernels: FusedKernels
) -> FusedCounts:
    counts = FusedCounts()
    watched: list[tuple[nn.Module, _WatchedRotation]] = []
    known: dict[Hashable, bool] = {}
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
        if watch.is_equal:
            module.forward = with_rotation(module, kernels.rotate)
            counts.replaced += 1
        else:
            let_norms_wait(module, False)
            _LOG.info(
                "fused kernels: no rotary embedding for %s, because results differ from the "
                "module's own", type(module).__name__,
            )  # fmt: skip
    return counts


class _WatchedRotation:
    """Applies the model's own function, and compares corun's on inputs like those of the call."""

    def __init__(
        self, rotation: Rotate, kernels: FusedKernels, known: dict[Hashable, bool]
    ) -> None:
        """``known``: results by function and sizes, as most layers share both."""
        self._rotation = rotation
        self._kernels = kernels
        self._known = known
        self._verdicts: list[bool] = []
        self._has_other_arguments = False

    @property
    def is_equal(self) -> bool:
        """Whether it was called, and corun's gave the same result each time."""
        return bool(self._verdicts) and all(self._verdicts)

    @property
    def is_of_known_form(self) -> bool:
        """Whether it was called with arguments of the known form, except perhaps for dtypes."""
        return bool(self._verdicts) and not self._has_other_arguments

    def __call__(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if len(arguments) != 4 or named:
            self._has_other_arguments = True
        can_compare = not self._has_other_arguments and is_servable(*arguments)
        self._verdicts.append(can_compare and self._verdict(*arguments))
        return self._rotation(*arguments, **named)

    def _verdict(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> bool:
        norms = [one.norm if isinstance(one, Normed) else None for one in (q, k)]
        key = (self._rotation, q.shape[1], q.shape[3], k.shape[1], cos.shape[2], *norms)
        if key not in self._known:
            self._known[key] = self._compare(q, k, cos)
        return self._known[key]

    def _compare(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
        for num_tokens in _NUM_TOKENS:
            for scale in _SCALES:
                # Heads and tokens are in memory as in the model: tokens first.
                q_new, k_new = (self._drawn_like(t, num_tokens, scale) for t in (q, k))
                # No pairs of equal cosines: they would hide a wrong pairing.
                angles = self._kernels.draw((1, num_tokens, cos.shape[2]), 1.0)
                tables = (angles.cos(), angles.sin())
                expected = self._rotation(q_new, k_new, *tables)
                actual = map(resolved, self._kernels.rotate(q_new, k_new, *tables))
                if not all(map(agree, actual, expected)):
                    return False
        return True

    def _drawn_like(self, like: Any, num_tokens: int, scale: float) -> Any:
        shape = (1, num_tokens, like.shape[1], like.shape[3])
        x = self._kernels.draw(shape, scale).transpose(1, 2)
        return Normed(x, like.norm) if isinstance(like, Normed) else x
