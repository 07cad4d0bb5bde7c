"""Paged attention on the CPU by numba kernels, for decode rows and chunks alike.

Owns scratch memory and the plan of the latest metadata, which every layer of a pass reuses.
One instance serves one thread.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numba
import numpy as np
import torch

from ...cpu_workers.kernels.attention import kernel as kernels
from ...cpu_workers.kernels.attention.layout import NO_WINDOW, Shape, Step, make_shape
from ...cpu_workers.kernels.attention.plan import make_items
from ...cpu_workers.kernels.simd.arithmetic import bfloat16_tag
from ...cpu_workers.kernels.simd.layout import FLOAT32
from ..forward.batch import AttentionMetadata
from ..forward.launcher import current_launcher
from .base import AttentionParams

_CACHE_LINE_BYTES = 64


@dataclass(slots=True, eq=False)
class _LayerKind:
    """Layers of one shape and window; their calls share the fields of a pass."""

    shape: Shape
    window: int
    share_function: int  # see ``Step``
    # A ``Step`` and a ``Shape``, int64, at a fixed address, so that a call can be replayed.
    fields: np.ndarray
    address: int  # address of the fields
    metadata: AttentionMetadata | None = None  # the pass that the fields describe
    arrays: tuple[np.ndarray, ...] = ()  # kept alive: the fields hold their addresses


class NumbaAttention:
    """The back end for float32 and bfloat16 on the CPU.

    Args:
        tag: The arithmetic for bfloat16, a tag of ``layout``; None = the fastest here.
    """

    name = "numba"

    def __init__(self, *, tag: np.generic | None = None) -> None:
        self._tags = {torch.float32: FLOAT32, torch.bfloat16: bfloat16_tag() if tag is None else tag}
        self._kinds: dict[Hashable, _LayerKind] = {}
        self._scratch_bytes: dict[Shape, tuple[int, int]] = {}  # per thread, per partial result
        self._scratch = np.empty(0, np.uint8)
        self._partials = np.empty(0, np.uint8)

    @property
    def threading_layer(self) -> str:
        """The layer that runs numba's threads: omp, tbb or workqueue. After ``forward``."""
        return str(numba.threading_layer())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``; CPU tensors in float32 or bfloat16."""
        window = params.sliding_window
        num_tokens, heads, _ = query.shape
        blocks = (key_blocks, value_blocks)
        key_of_kind = (query.dtype, heads, window, *((b.shape[1:], b.stride()) for b in blocks))
        kind = self._kinds.get(key_of_kind)
        if kind is None:
            shape = _shape_of(heads, key_blocks, value_blocks)
            kind = _make_kind(shape, window or NO_WINDOW, self._tags[query.dtype])
            self._kinds[key_of_kind] = kind
        self._prepare(kind, metadata)
        launcher = current_launcher()
        launcher.before_replay(kind, lambda now: self._prepare(kind, now.attention))
        attended = launcher.new_output((num_tokens, heads, value_blocks.shape[3]), query.dtype)
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        launcher.launch(
            kernels.attend,
            self._tags[query.dtype],
            kind.address,
            *_places(query),
            *_places(key),
            *_places(value),
            key_blocks.data_ptr(),
            value_blocks.data_ptr(),
            attended.data_ptr(),
            params.scaling,
            params.softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
        )
        return attended

    def _prepare(self, kind: _LayerKind, metadata: AttentionMetadata) -> None:
        """Cut the pass into items, unless the fields describe it already."""
        if kind.metadata is metadata:
            return
        shape, window = kind.shape, kind.window
        num_shares = numba.get_num_threads()
        items, merges, num_partials = make_items(
            np.array(metadata.query_starts_host, np.int32),
            np.array(metadata.context_lens_host, np.int32),
            window,
            shape.kv_heads,
            shape.group,
            shape.block_size,
            num_shares,
        )
        counter = np.zeros(1, np.int64)
        if shape not in self._scratch_bytes:
            self._scratch_bytes[shape] = kernels.scratch_bytes(shape)
        share_bytes, partial_bytes = self._scratch_bytes[shape]
        self._scratch = _at_least(self._scratch, num_shares * share_bytes)
        self._partials = _at_least(self._partials, num_partials * partial_bytes)
        step = Step(
            num_shares,
            len(items),
            items.ctypes.data,
            len(merges),
            merges.ctypes.data,
            metadata.num_tokens,
            metadata.slot_mapping.data_ptr(),
            metadata.block_tables.data_ptr(),
            metadata.block_tables.stride(0),
            window,
            int(metadata.max_query_len > 1),
            counter.ctypes.data,
            _aligned(self._scratch),
            share_bytes,
            _aligned(self._partials),
            kind.share_function,
        )
        kind.fields[:] = (*step, *shape)
        # Other layer kinds may enlarge scratch memory, or be called between these layers.
        kind.arrays = (items, merges, counter, self._scratch, self._partials)
        kind.metadata = metadata


def _shape_of(heads: int, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> Shape:
    _, kv_heads, block_size, key_dim = key_blocks.shape
    (key_block, key_head, *_), (value_block, value_head, *_) = (
        blocks.stride() for blocks in (key_blocks, value_blocks)
    )
    return make_shape(
        heads,
        kv_heads,
        block_size,
        key_dim,
        value_blocks.shape[3],
        key_blocks.itemsize,
        (key_block, key_head, value_block, value_head),
    )


def _make_kind(shape: Shape, window: int, tag: np.generic) -> _LayerKind:
    fields = np.zeros(len(Step._fields) + len(shape), np.int64)
    function = kernels.share_function(tag)
    return _LayerKind(shape, window, function, fields, int(fields.ctypes.data))


def _places(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address, and byte strides of a token and of a head."""
    token, head, _ = tensor.stride()
    item_bytes = tensor.itemsize
    return tensor.data_ptr(), token * item_bytes, head * item_bytes


def _at_least(memory: np.ndarray, num_bytes: int) -> np.ndarray:
    needed = num_bytes + _CACHE_LINE_BYTES
    return memory if memory.size >= needed else np.empty(needed, np.uint8)


def _aligned(memory: np.ndarray) -> int:
    return -(-memory.ctypes.data // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
