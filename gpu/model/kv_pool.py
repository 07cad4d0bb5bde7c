"""The paged KV pool: one slab of bytes; a block holds the keys and values of all layers.

Owns the memory and its layout. Does not track requests or free blocks.
"""

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..device.huge_pages import advise_huge_pages

_ALIGNMENT_BYTES = 64  # a cache line; every layer's keys and values start on one


@dataclass(frozen=True, slots=True)
class LayerKvShape:
    """Keys and values of one layer, per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Byte layout of one block of ``block_size`` tokens over all layers.

    Within a block: per layer the keys [kv_heads, block_size, key_dim], then the values
    [kv_heads, block_size, value_dim], each aligned to a cache line.
    """

    layers: tuple[LayerKvShape, ...]
    block_size: int
    dtype: torch.dtype

    def offsets_bytes(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Return ((key offset, value offset) per layer, bytes of a block)."""
        offsets: list[tuple[int, int]] = []
        position = 0
        for layer in self.layers:
            key_offset = position
            value_offset = _align(key_offset + self._matrix_bytes(layer, layer.key_dim))
            position = _align(value_offset + self._matrix_bytes(layer, layer.value_dim))
            offsets.append((key_offset, value_offset))
        return tuple(offsets), position

    @property
    def block_bytes(self) -> int:
        return self.offsets_bytes()[1]

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, for any block size."""
        values = sum(one.num_kv_heads * (one.key_dim + one.value_dim) for one in self.layers)
        return values * self.dtype.itemsize

    def _matrix_bytes(self, layer: LayerKvShape, dim: int) -> int:
        return layer.num_kv_heads * self.block_size * dim * self.dtype.itemsize


class KvPool:
    """``num_blocks`` blocks on ``device`` and the views that the layers read and write.

    On the CPU the slab is an anonymous mapping: a block's memory is allocated when it is first
    written and returned by ``release``, so adapters and KV share one budget without a fixed split.
    Huge pages are requested, because the blocks of a context are scattered and each would span
    several small pages; memory is then allocated in pieces of 2 MiB. On CUDA the whole slab is
    allocated.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        offsets, block_bytes = layout.offsets_bytes()
        self.block_bytes = block_bytes
        self._mapping: mmap.mmap | None = None
        self._slab = self._allocate(num_blocks * block_bytes, device)
        blocks = self._slab.view(num_blocks, block_bytes)
        self._views = tuple(
            (
                self._view(blocks, key_offset, layer.num_kv_heads, layer.key_dim),
                self._view(blocks, value_offset, layer.num_kv_heads, layer.value_dim),
            )
            for layer, (key_offset, value_offset) in zip(layout.layers, offsets, strict=True)
        )

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [blocks, kv_heads, block_size, key_dim] and values of one layer."""
        return self._views[index]

    def bytes_of(self, first: int, num_blocks: int) -> torch.Tensor:
        """All layers' keys and values of adjacent blocks, uint8."""
        end = first + num_blocks
        assert 0 <= first < end <= self.num_blocks, (first, end, self.num_blocks)
        return self._slab[first * self.block_bytes : end * self.block_bytes]

    def release(self, block_ids: Iterable[int]) -> None:
        """Return the memory of unused blocks to the machine (CPU only).

        Whole memory pages inside each block are returned; the blocks can be written again.
        """
        if self._mapping is None:
            return
        page = mmap.PAGESIZE
        for block_id in block_ids:
            start = -(-block_id * self.block_bytes // page) * page
            end = (block_id + 1) * self.block_bytes // page * page
            if end > start:
                self._mapping.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Drop the views and the slab."""
        self._views = ()
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._mapping = None  # unmapped with the last tensor that refers to it

    def _allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        size = max(num_bytes, mmap.PAGESIZE)
        self._mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge_pages(self._mapping)
        buffer = (ctypes.c_char * num_bytes).from_buffer(self._mapping)
        return torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes)

    def _view(self, blocks: torch.Tensor, offset: int, num_heads: int, dim: int) -> torch.Tensor:
        num_bytes = num_heads * self.layout.block_size * dim * self.layout.dtype.itemsize
        part = blocks[:, offset : offset + num_bytes].view(self.layout.dtype)
        return part.view(-1, num_heads, self.layout.block_size, dim)


def _align(position: int) -> int:
    return -(-position // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
