"""The kernels' table of adapters on the device: pointers, ranks and scalings by row.

Owns the rows and keeps the adapters' tensors alive. Independent of requests, steps and the memory
budget. The caller must not remove a row that a running step refers to.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from ...runtime.errors import ResourceError
from ..forward.upload import Mirror, upload
from .base import PackedLora


@dataclass(frozen=True, slots=True, eq=False)
class TableEntries:
    """The values of one row of a ``LoraTable`` for some targets: one array element per target."""

    target_indices: np.ndarray  # int64
    a_pointers: np.ndarray  # int64
    b_pointers: np.ndarray  # int64
    ranks: np.ndarray  # int32
    scalings: np.ndarray  # float32
    factor_pointers: np.ndarray  # int64, 0 = no factors
    max_rank: int

    @classmethod
    def of(cls, targets: Mapping[int, PackedLora]) -> Self:
        matrices = targets.values()
        return cls(
            np.array(list(targets), np.int64),
            np.array([packed.a.data_ptr() for packed in matrices], np.int64),
            np.array([packed.b.data_ptr() for packed in matrices], np.int64),
            np.array([packed.rank for packed in matrices], np.int32),
            np.array([packed.scaling for packed in matrices], np.float32),
            np.array([0 if p.factors is None else p.factors.data_ptr() for p in matrices], np.int64),
            max((packed.rank for packed in matrices), default=0),
        )


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """One adapter on the device: its packed matrices by target index."""

    targets: Mapping[int, PackedLora]
    # Called when no kernel reads the matrices any more, if they are borrowed memory.
    release: Callable[[], None] | None = None
    # The table's values for the targets, if they are known without viewing the matrices.
    known_entries: TableEntries | None = None

    @property
    def entries(self) -> TableEntries:
        return self.known_entries or TableEntries.of(self.targets)

    @property
    def max_rank(self) -> int:
        """Highest rank over the targets; 0 if there are none."""
        if self.known_entries is not None:
            return self.known_entries.max_rank
        return max((packed.rank for packed in self.targets.values()), default=0)


class LoraTable:
    """Per (row, target): pointers of A, B and factors, rank, scaling; rank 0 = nothing to add.

    Every array is [capacity, num_targets] and stays at one address permanently, so that captured
    graphs may read it: ``a_pointers``, ``b_pointers`` and ``factor_pointers`` (0 = none) int64,
    ``ranks`` int32, ``scalings`` float32, all on ``device``. ``host_*`` are the same values as
    numpy arrays (on the CPU they share the memory). The device gets changes with the next pass
    that is lowered with ``mirror``, or from ``upload``.
    """

    def __init__(
        self,
        num_targets: int,
        capacity: int,
        device: torch.device | str,
        *,
        embeddings: Iterable[int] = (),
        heads: Mapping[int, int] | None = None,
    ) -> None:
        """Make an empty table for ``capacity`` adapters at once.

        ``embeddings``: indices of the targets that are one. ``heads``: the tokens of those that are
        the output head, by index.
        """
        self._embeddings, self._heads = frozenset(embeddings), dict(heads or {})
        shape = (capacity, num_targets)
        self.num_targets = num_targets
        self.capacity = capacity
        self.device = torch.device(device)
        self.host_a_pointers = np.zeros(shape, np.int64)
        self.host_b_pointers = np.zeros(shape, np.int64)
        self.host_ranks = np.zeros(shape, np.int32)
        self.host_scalings = np.zeros(shape, np.float32)
        self.host_factor_pointers = np.zeros(shape, np.int64)
        self.mirror = Mirror(self._host_arrays(), self.device)
        self.a_pointers, self.b_pointers, self.ranks, self.scalings, self.factor_pointers = (
            self.mirror.tensors
        )
        self._scaled_rows: set[int] = set()  # with factors
        self._embedding_rows: set[int] = set()  # that change the embedding of tokens
        self._head_rows: set[int] = set()  # that change the output head
        # By row, of adapters with own rows of the head: tokens of their vocabulary.
        self._num_tokens: dict[int, int] = {}
        self._adapters: list[DeviceAdapter | None] = [None] * capacity
        self._free_rows = list(range(capacity - 1, -1, -1))

    def _host_arrays(self) -> tuple[np.ndarray, ...]:
        return (
            self.host_a_pointers,
            self.host_b_pointers,
            self.host_ranks,
            self.host_scalings,
            self.host_factor_pointers,
        )

    @property
    def num_free_rows(self) -> int:
        """The number of adapters that can still be added."""
        return len(self._free_rows)

    def add(self, adapter: DeviceAdapter) -> int:
        """Add an adapter and return its row, which it keeps until ``remove``.

        Raises ResourceError if the table is full.
        """
        if not self._free_rows:
            raise ResourceError(
                f"the LoRA table is full: {self.capacity} adapters are on the device, which is "
                "the limit; unload one"
            )
        row = self._free_rows.pop()
        self._adapters[row] = adapter
        entries = adapter.entries
        self.host_a_pointers[row, entries.target_indices] = entries.a_pointers
        self.host_b_pointers[row, entries.target_indices] = entries.b_pointers
        self.host_ranks[row, entries.target_indices] = entries.ranks
        self.host_scalings[row, entries.target_indices] = entries.scalings
        self.host_factor_pointers[row, entries.target_indices] = entries.factor_pointers
        if entries.factor_pointers.any():
            self._scaled_rows.add(row)
        indices = entries.target_indices.tolist()
        if not self._embeddings.isdisjoint(indices):
            self._embedding_rows.add(row)
        for index in self._heads.keys() & set(indices):
            self._head_rows.add(row)
            own = adapter.targets[index].own
            if own is not None:
                self._num_tokens[row] = own.num_tokens
        self.mirror.mark((row,))
        return row

    def has_factors(self, rows: Iterable[int]) -> bool:
        """Whether the adapter of any of these rows has factors."""
        return not self._scaled_rows.isdisjoint(rows)

    def remove(self, row: int) -> None:
        """Remove the adapter of ``row`` and release its tensors; the row may be reused."""
        assert self._adapters[row] is not None, f"table row {row} is empty"
        for host in self._host_arrays():
            host[row] = 0
        self.mirror.mark((row,))
        adapter, self._adapters[row] = self._adapters[row], None
        self._scaled_rows.discard(row)
        self._embedding_rows.discard(row)
        self._head_rows.discard(row)
        self._num_tokens.pop(row, None)
        self._free_rows.append(row)
        if adapter is not None and adapter.release is not None:
            adapter.release()

    def has_embedding(self, rows: Iterable[int]) -> bool:
        """Whether the adapter of any of these rows changes the embedding of tokens."""
        return not self._embedding_rows.isdisjoint(rows)

    def has_head(self, rows: Iterable[int]) -> bool:
        """Whether the adapter of any of these rows changes the output head."""
        return not self._head_rows.isdisjoint(rows)

    def head_tokens(self, target_index: int) -> int:
        return self._heads[target_index]

    def num_tokens(self, rows: Sequence[int]) -> list[int] | None:
        """By row, the tokens of its adapter's vocabulary; None if no adapter has own head rows.

        Rows below 0, and those of other adapters, have the base's.
        """
        if self._num_tokens.keys().isdisjoint(rows):
            return None
        base = max(self._heads.values())
        return [self._num_tokens.get(row, base) for row in rows]

    def clear(self) -> None:
        """Remove all adapters."""
        for row, adapter in enumerate(self._adapters):
            if adapter is not None:
                self.remove(row)

    def packed(self, row: int, target_index: int) -> PackedLora | None:
        """The matrices of one target, or None if this adapter does not have it."""
        adapter = self._adapters[row]
        assert adapter is not None, f"table row {row} is empty"
        return adapter.targets.get(target_index)

    def upload(self) -> None:
        """Bring changes to the device now, for products outside of a pass."""
        upload({}, self.device, [self.mirror])
