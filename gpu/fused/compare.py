"""Whether kernels compute what modules do, but for the last place of a few values of 16 bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .activation import GatedProduct
from .rope import Rotate

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

    def __init__(
        self, num_tokens: tuple[int, int], scales: Sequence[float], kernels: FusedKernels
    ) -> None:
        self._num_tokens = num_tokens
        self._scales = scales
        self._kernels = kernels
        self._drawn: dict[int, list[Input]] = {}

    def of(self, features: int) -> list[Input]:
        """Drawn once for all modules of a width."""
        if features not in self._drawn:
            one, many = (
                [self._kernels.draw((1, num, features), scale) for scale in self._scales]
                for num in self._num_tokens
            )
            parts = Input(torch.cat(many, dim=1), len(many))
            self._drawn[features] = [*(Input(x, 1) for x in one), parts]
        return self._drawn[features]


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


def _place(values: torch.Tensor) -> torch.Tensor:
    """The index of each value of 16 bits in ascending order; both zeros have the same one."""
    bits = values.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
