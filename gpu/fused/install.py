"""Replaces modules of a model by one-pass kernels that give the same results.

There is no list of architectures. Every module that looks like a norm, a gated feed-forward or an
attention with rotary embeddings is compared on random and extreme inputs, of one token and of many.
It is replaced only if the kernel gives the same bits, but for the last place of a few.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .activation import ActivationTables, is_gated, mlp_candidates
from .norm import is_weighted_norm, norm_candidates
from .rope import Rotate, is_rotary_embedding, is_servable, rotate, rotation_of, with_rotation

_LOG = logging.getLogger(__name__)

_NUM_TOKENS = (1, 41)
_MLP_NUM_TOKENS = (1, 11)  # products of many are slow
# Another order of the sums in a norm occasionally moves a value over the boundary between two
# bfloat16 values; where the result is rounded twice, over two boundaries.
_MAX_STEPS_APART = 2
_MIN_EQUAL_SHARE = 0.99
# Magnitudes of inputs: squares that overflow float32, squares that underflow, and common ones.
_SCALES = (1.0, 30.0, 1e-3, 1e25, 1e-30, 0.0)
# Only the structure of gated feed-forwards is unknown; their activations are tables.
_MLP_SCALES = (1.0, 30.0)

Forward = Callable[..., Any]


@dataclass(slots=True)
class FusedCounts:
    """How many modules of a kind were found, and how many use a kernel of corun."""

    found: int = 0
    replaced: int = 0
    unknown: set[str] = field(default_factory=set)  # classes of the kind, of another form


def select_fused_kernels(name: str, model: PreTrainedModel, run: Callable[[], object]) -> str:
    """Install the kernels, unless disabled; returns a description for logs.

    ``run``: see ``install_fused_kernels``.
    """
    if name == "off":
        reason = "configured"
    elif model.device.type != "cpu":
        reason = f"they are for the CPU, the model runs on {model.device.type}"
    elif model.dtype != torch.bfloat16:
        reason = f"they compute bfloat16, the model is {model.dtype}"
    else:
        counts = install_fused_kernels(model, run)
        return "numba" if any(kind.replaced for kind in counts.values()) else "off"
    _LOG.info("fused kernels: off (%s)", reason)
    return "off"


def install_fused_kernels(model: nn.Module, run: Callable[[], object]) -> dict[str, FusedCounts]:
    """Replace ``forward`` of modules of a bfloat16 model on the CPU; returns counts by kind.

    ``run`` computes a short pass through the model's attention: rotary embeddings are compared on
    its inputs. The first call compiles kernels.
    """
    with torch.inference_mode():
        counts = {
            "norms": _install_norms(model),
            "gated activations": _install_mlps(model),
            "rotary embeddings": _install_rotations(model, run),
        }
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


def _install_norms(model: nn.Module) -> FusedCounts:
    counts = FusedCounts()
    inputs = _Inputs(_NUM_TOKENS, _SCALES)
    for module in model.modules():
        candidates = list(norm_candidates(module))
        if candidates:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            _install_first_equal(module, candidates, inputs.of(len(weight)), counts)
        elif is_weighted_norm(module):
            counts.unknown.add(type(module).__name__)
    return counts


def _install_mlps(model: nn.Module) -> FusedCounts:
    counts = FusedCounts()
    tables = ActivationTables()
    inputs = _Inputs(_MLP_NUM_TOKENS, _MLP_SCALES)
    for module in list(model.modules()):
        candidates = list(mlp_candidates(module, tables))
        if candidates:
            first: Any = next(module.children())
            _install_first_equal(module, candidates, inputs.of(first.in_features), counts)
        elif is_gated(module):
            counts.unknown.add(type(module).__name__)
    return counts


@dataclass(frozen=True, slots=True)
class _Input:
    """Tokens [1, parts * tokens of a part, features]; each part must agree by itself."""

    x: torch.Tensor
    num_parts: int


class _Inputs:
    """Inputs of the comparison: one token of each scale, and many of all scales at once."""

    def __init__(self, num_tokens: tuple[int, int], scales: Sequence[float]) -> None:
        self._num_tokens = num_tokens
        self._scales = scales
        self._drawn: dict[int, list[_Input]] = {}

    def of(self, features: int) -> list[_Input]:
        """Drawn once for all modules of a width."""
        if features not in self._drawn:
            one, many = (
                [_draw((1, num, features), scale) for scale in self._scales]
                for num in self._num_tokens
            )
            parts = _Input(torch.cat(many, dim=1), len(many))
            self._drawn[features] = [*(_Input(x, 1) for x in one), parts]
        return self._drawn[features]


def _install_first_equal(
    module: nn.Module, candidates: Iterable[Forward], inputs: list[_Input], counts: FusedCounts
) -> None:
    counts.found += 1
    forward: Forward = module.forward
    expected = [forward(given.x) for given in inputs]
    for candidate in candidates:
        if all(
            _agree(candidate(given.x), y, given.num_parts)
            for given, y in zip(inputs, expected, strict=True)
        ):
            module.forward = candidate
            counts.replaced += 1
            return
    _LOG.info(
        "fused kernels: none for %s, because none gives the module's own results",
        type(module).__name__,
    )


def _install_rotations(model: nn.Module, run: Callable[[], object]) -> FusedCounts:
    counts = FusedCounts()
    watched: list[tuple[nn.Module, _WatchedRotation]] = []
    known: dict[Hashable, bool] = {}
    rotary = {type(one).__name__ for one in model.modules() if is_rotary_embedding(one)}
    for module in model.modules():
        rotation = rotation_of(module)
        if rotation is not None:
            watch = _WatchedRotation(rotation, known)
            module.forward = with_rotation(module, watch)
            watched.append((module, watch))
    run()
    if not any(watch.is_of_known_form for _, watch in watched):
        counts.unknown = {type(module).__name__ for module, _ in watched} or rotary
    for module, watch in watched:
        counts.found += 1
        del module.forward
        if watch.is_equal:
            module.forward = with_rotation(module, rotate)
            counts.replaced += 1
        else:
            _LOG.info(
                "fused kernels: no rotary embedding for %s, because results differ from the "
                "module's own", type(module).__name__,
            )  # fmt: skip
    return counts


class _WatchedRotation:
    """Applies the model's own function, and compares corun's on inputs like those of the call."""

    def __init__(self, rotation: Rotate, known: dict[Hashable, bool]) -> None:
        """``known``: results by function and sizes, as most layers share both."""
        self._rotation = rotation
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
        key = (self._rotation, q.shape[1], q.shape[3], k.shape[1], cos.shape[2])
        if key not in self._known:
            self._known[key] = self._compare(q, k, cos)
        return self._known[key]

    def _compare(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
        for num_tokens in _NUM_TOKENS:
            for scale in _SCALES:
                # Heads and tokens are in memory as in the model: tokens first.
                q_new, k_new = (
                    _draw((1, num_tokens, t.shape[1], t.shape[3]), scale).transpose(1, 2)
                    for t in (q, k)
                )
                # No pairs of equal cosines: they would hide a wrong pairing.
                angles = _draw((1, num_tokens, cos.shape[2]), 1.0)
                tables = (angles.cos(), angles.sin())
                expected = self._rotation(q_new, k_new, *tables)
                actual = rotate(q_new, k_new, *tables)
                if not all(map(_agree, actual, expected)):
                    return False
        return True


def _draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def _agree(actual: torch.Tensor, expected: torch.Tensor, num_parts: int = 1) -> bool:
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


def _place(values: torch.Tensor) -> torch.Tensor:
    """The index of each bfloat16 in ascending order; both zeros have the same one."""
    bits = values.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
