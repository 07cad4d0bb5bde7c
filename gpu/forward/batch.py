"""The metadata of one forward pass, built by the model runner from a sub-batch.

transformers calls wrapped linears with x alone. The runner therefore owns one ``StepContext``,
which the wrapped linears and the attention function hold; there are no module globals.

Vocabulary: a *row* is one request's tokens in this sub-batch; the tokens of all rows are *packed*
into one sequence, rows of the same adapter next to each other.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The places of each row's queries in the packed sequence and of its keys in the KV pool.

    Tensors are on the model's device. ``*_host`` are the same values for Python code.
    """

    query_starts: torch.Tensor  # int32 [rows + 1], first packed token of each row
    context_lens: torch.Tensor  # int32 [rows], tokens in the KV pool including this step's
    block_tables: torch.Tensor  # int32 [rows, max_blocks], unused entries 0
    slot_mapping: torch.Tensor  # int64 [tokens], block * block_size + offset of each new token
    query_starts_host: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    max_query_len: int  # 1 = all rows decode
    min_query_len: int  # 1 = some rows decode
    max_context_len: int
    block_size: int

    @property
    def num_rows(self) -> int:
        return len(self.context_lens_host)

    @property
    def num_tokens(self) -> int:
        return self.query_starts_host[-1]


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Maps packed tokens to adapters.

    Segments are ascending and disjoint; tokens in none of them are the base model's. ``table_rows``
    index the ``LoraTable``; an adapter may own several segments. Kernels read the tensors, in which
    segments may be cut into pieces.
    """

    segment_starts: torch.Tensor  # int32 [pieces], first packed token
    segment_ends: torch.Tensor  # int32 [pieces], one past the last
    table_rows: torch.Tensor  # int32 [pieces]
    segment_starts_host: tuple[int, ...]
    segment_ends_host: tuple[int, ...]
    table_rows_host: tuple[int, ...]
    max_piece_tokens: int
    max_rank: int  # over the adapters of this batch
    # Of a batch of the output head: tokens of its largest vocabulary; 0 = all use the base's rows.
    num_head_tokens: int = 0

    @property
    def num_pieces(self) -> int:
        """Pieces of segments in the batch; at least one."""
        return len(self.table_rows)


class DeltaPass(Protocol):
    """Adds the adapters' deltas to one pass; compared by identity."""

    # Whether it calls only kernels, and the same ones for every batch. A graph then contains them;
    # otherwise the graph calls the pass that is running.
    is_repeatable: bool
    # Whether adapters of the batch have factors, for which a repeatable pass calls other kernels.
    has_factors: bool

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        """Called before the base products of an input group; computation elsewhere may start.

        group: the key that the linears were wrapped with. x: [tokens, in_features].
        """

    def add(
        self, group: Hashable, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int]
    ) -> None:
        """Add the deltas of the group's targets to the base products ys, in place.

        x as in ``begin``, or int64 [tokens], the ids, of an embedding; ys: one [tokens,
        out_features] per target.
        """


@dataclass(frozen=True, slots=True)
class PassMetadata:
    """The inputs of a pass besides token ids and positions."""

    attention: AttentionMetadata
    lora: LoraBatch | None  # None = no row has an adapter
    deltas: DeltaPass | None  # None = no row has an adapter
    # Whether adapters change the embedding of tokens, and the output head; ``num_head_tokens``.
    outside: tuple[bool, bool, int] = (False, False, 0)
    most_context_len: int = 0  # of any request


class WorkProgress(Protocol):
    """Is notified as the engine's thread gets from one part of its work to the next."""

    def begin_layer(self, layer: int) -> None:
        """A pass has reached the attention of this layer, counted from 0."""

    def advance(self) -> None:
        """A pass has reached another product, or a copy has gone on."""


class _Unwatched:
    """Nothing watches the work."""

    def begin_layer(self, layer: int) -> None:
        pass

    def advance(self) -> None:
        pass


_UNWATCHED = _Unwatched()


@dataclass(slots=True)
class StepContext:
    """The state that a model's modules read of the running pass; owned by its runner."""

    attention: AttentionMetadata | None = None
    deltas: DeltaPass | None = None  # None = no row of this pass has an adapter
    # Of the embedding of tokens and of the output head; None = no row of this pass changes it.
    embedding_deltas: DeltaPass | None = None
    head_deltas: DeltaPass | None = None
    num_head_tokens: int = 0  # of the head's ``LoraBatch``
    known_lens_host: tuple[int, ...] = ()  # [rows], known tokens of each request (read by rope)
    progress: WorkProgress = _UNWATCHED
