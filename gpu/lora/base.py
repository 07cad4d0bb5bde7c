"""The interface of LoRA products: y += scaling * (x A^T) B^T, per segment of tokens.

Adapters with factors (DoRA) then scale y: y = y * factor + summand, by column.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ..forward.batch import LoraBatch
from .matrix_layout import ROWS, MatrixLayout

if TYPE_CHECKING:
    from .table import LoraTable


@dataclass(frozen=True, slots=True)
class OwnRows:
    """An adapter's own rows of tokens, in place of the base's or behind them."""

    token_ids: torch.Tensor  # int32 [rows], ascending
    rows: torch.Tensor  # [rows, features], of the model's dtype
    num_tokens: int  # of the adapter's vocabulary


@dataclass(frozen=True, slots=True)
class PackedLora:
    """A and B of one target in the layout of one back end."""

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scaling: float
    factors: torch.Tensor | None = None  # float32 [2, out_features], of ``factors``
    own: OwnRows | None = None  # of an embedding or the output head


class LoraBackend(Protocol):
    """Computes deltas with the adapters of a ``LoraTable``."""

    name: str
    layout: MatrixLayout  # the layout of A and B
    table: "LoraTable"

    def pack(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> PackedLora:
        """Lay out A [rank, in_features] and B [out_features, rank] for this back end.

        The result is on the back end's device in the model's dtype; the rank is padded only as far
        as a vector register needs.
        """

    def add_delta(self, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch) -> None:
        """Add the deltas of one target to y, in place.

        x: [tokens, in_features], y: [tokens, out_features], both of the model's dtype with a
        contiguous last dimension. Products accumulate in float32. Adapters of the batch that do
        not have this target add nothing. Factors of the target are applied to the sum.
        """

    def add_deltas(
        self, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int], batch: LoraBatch
    ) -> None:
        """``add_delta`` for several targets that read the same x, each with its own y."""

    def prepare_factors(self) -> None:
        """Compile what only adapters with factors call. Any thread may call it."""


class TargetByTarget(ABC):
    """Base of back ends that read plain rows and do not benefit from targets with the same x."""

    layout: MatrixLayout = ROWS

    @abstractmethod
    def add_delta(self, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: LoraBatch) -> None:
        """See ``LoraBackend``."""

    def add_deltas(
        self, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int], batch: LoraBatch
    ) -> None:
        """Add the deltas of one target at a time; see ``LoraBackend``."""
        for y, target_index in zip(ys, target_indices, strict=True):
            self.add_delta(x, y, target_index, batch)
