"""Synthetic adapters on the device, each with memory of its own."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...gpu.execution.assemble import LoadedModel
from ...gpu.lora.base import PackedLora
from ...gpu.lora.table import DeviceAdapter


@dataclass(frozen=True, slots=True)
class BankAdapter:
    """One adapter of the bank."""

    table_row: int
    rank: int
    num_bytes: int  # over all layers of the model, even if the bank has fewer


class AdapterBank:
    """Adapters of several ranks on all targets, of as many layers as memory allows.

    No two share memory, as with requests for different adapters: no row profits from the reads of
    another.
    """

    def __init__(self, loaded: LoadedModel, ranks: Sequence[int], max_bytes: int) -> None:
        """One adapter for each entry of ``ranks``, in ``max_bytes`` or in one layer each."""
        self._loaded = loaded
        targets = loaded.target_map.inside
        self.num_layers = 1 + max(target.layer for target in targets)
        self._templates: dict[tuple[int, int, int], PackedLora] = {}
        layer_bytes = sum(self._layer_bytes(rank) for rank in ranks)
        self.num_adapted_layers = max(1, min(self.num_layers, max_bytes // layer_bytes))
        self.adapters = tuple(self._add(rank) for rank in ranks)
        self._templates.clear()

    @property
    def scale(self) -> float:
        """Layers of the model over layers that the adapters have."""
        return self.num_layers / self.num_adapted_layers

    def bytes_of(self, rank: int) -> int:
        """Bytes of an adapter of ``rank`` on all layers."""
        return next(adapter.num_bytes for adapter in self.adapters if adapter.rank == rank)

    def close(self) -> None:
        """Take them off the device."""
        for adapter in self.adapters:
            self._loaded.lora_table.remove(adapter.table_row)
        self.adapters = ()

    def _layer_bytes(self, rank: int) -> int:
        """Bytes of a middle layer: layers are alike, or nearly."""
        middle = self.num_layers // 2
        return sum(
            _num_bytes(self._template(rank, target.in_features, target.out_features))
            for target in self._loaded.target_map.inside
            if target.layer == middle
        )

    def _template(self, rank: int, in_features: int, out_features: int) -> PackedLora:
        """Weights for all targets of one shape."""
        key = rank, in_features, out_features
        if key not in self._templates:
            generator = torch.Generator().manual_seed(rank)
            dtype = self._loaded.dtype
            a = torch.randn(rank, in_features, generator=generator).to(dtype)
            b = torch.randn(out_features, rank, generator=generator).to(dtype)
            self._templates[key] = self._loaded.lora_backend.pack(a, b, 1e-4)
        return self._templates[key]

    def _add(self, rank: int) -> BankAdapter:
        packed = {}
        for target in self._loaded.target_map.inside:
            if target.layer < self.num_adapted_layers:
                one = self._template(rank, target.in_features, target.out_features)
                packed[target.index] = PackedLora(one.a.clone(), one.b.clone(), one.rank, one.scaling)
        num_bytes = sum(_num_bytes(one) for one in packed.values())
        row = self._loaded.lora_table.add(DeviceAdapter(packed))
        return BankAdapter(row, rank, round(num_bytes * self.scale))


def _num_bytes(packed: PackedLora) -> int:
    return packed.a.nbytes + packed.b.nbytes


def draw_batches(
    adapters: Sequence[BankAdapter], sizes: Sequence[int], num_batches: int, rng: random.Random
) -> list[tuple[BankAdapter, ...]]:
    """Batches of mixed ranks with widely spread sums of ranks, without repeats in a batch.

    Each is drawn from a range of the adapters in the order of their ranks: some batches get mostly
    small ones, some mostly large ones. The largest size may permit only one batch.
    """
    ordered = sorted(adapters, key=lambda adapter: adapter.rank)
    batches: list[tuple[BankAdapter, ...]] = []
    for size in sizes:
        room = len(ordered) - size
        for _ in range(num_batches if room else 1):
            first = rng.randint(0, room)
            stretch = ordered[first : first + size + rng.randint(0, room - first)]
            batch = tuple(rng.sample(stretch, size))
            batches.append(batch)
    return batches
