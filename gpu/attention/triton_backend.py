"""Paged attention on a CUDA device by Triton kernels; also chooses tile sizes.

Importing this module does not import Triton; constructing ``TritonAttention`` does. Machines
without Triton can therefore import everything else.
"""

import torch

from ..forward.batch import AttentionMetadata
from ..fused.triton_backend import pending_rotation, resolved
from .base import AttentionParams

# Programs that keep a large device busy: a decode batch with fewer is split along the context.
_WANTED_PROGRAMS = 256
_MAX_SPLITS = 16
# A split covers at least this many positions, otherwise merging costs more than it gains.
_MIN_SPLIT_TOKENS = 512
_MIN_TILE = 16  # of tl.dot
# Shared memory of an H100; the limit of a program without a device: in the interpreter.
_DEFAULT_SHARED_BYTES = 227 << 10


class TritonAttention:
    """The back end for CUDA devices, and for Triton's interpreter on the CPU."""

    name = "triton"

    def __init__(self, device: torch.device | None = None) -> None:
        """``device``: the target device; None = the current one.

        Raises ImportError where Triton is not installed.
        """
        from . import triton_kernels

        self._kernels = triton_kernels
        self._shared_bytes = _shared_bytes_of(device)

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, because of TRITON_INTERPRET=1."""
        import triton

        return not isinstance(self._kernels.attend_kernel, triton.JITFunction)

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
        """See ``AttentionBackend.forward``; float32, float16 or bfloat16."""
        rotation = pending_rotation(query, key)
        if rotation is not None:
            query = rotation.write(_in_rows(value), key_blocks, value_blocks, metadata)
        else:
            query, key, value = (_in_rows(resolved(part)) for part in (query, key, value))
            self._write_kv(key, value, key_blocks, value_blocks, metadata)
        num_tokens, heads, _ = query.shape
        attended = query.new_empty((num_tokens, heads, value_blocks.shape[3]))
        num_splits = _num_splits(metadata, key_blocks.shape[1], params.sliding_window)
        self._attend(query, key_blocks, value_blocks, attended, metadata, params, num_splits)
        return attended

    def _write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        num_tokens, kv_heads, key_dim = key.shape
        value_dim = value.shape[2]
        self._kernels.write_kv_kernel[(num_tokens, kv_heads)](
            key,
            value,
            key_blocks,
            value_blocks,
            metadata.slot_mapping,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            key_blocks.stride(0),
            key_blocks.stride(1),
            value_blocks.stride(0),
            value_blocks.stride(1),
            BLOCK_SIZE=metadata.block_size,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_PAD=_next_power_of_2(key_dim),
            VALUE_PAD=_next_power_of_2(value_dim),
            num_warps=1,
        )

    def _attend(
        self,
        query: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        attended: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        num_splits: int,
    ) -> None:
        num_tokens, heads, key_dim = query.shape
        kv_heads, value_dim = key_blocks.shape[1], value_blocks.shape[3]
        group = heads // kv_heads
        group_pad = _next_power_of_2(group)
        key_pad = max(_MIN_TILE, _next_power_of_2(key_dim))
        value_pad = max(_MIN_TILE, _next_power_of_2(value_dim))
        is_decode = metadata.max_query_len == 1
        tile_m, tile_n = tile_shape(
            group_pad, key_pad, value_pad, query.element_size(), self._shared_bytes,
            is_decode=is_decode,
        )  # fmt: skip
        num_tiles = -(-metadata.max_query_len // (tile_m // group_pad))
        # Arguments are the same with and without splits; unused ones may be any tensor.
        sums = logs = attended
        if num_splits > 1:
            parts = (num_tokens, heads, num_splits)
            sums = query.new_empty((*parts, value_dim), dtype=torch.float32)
            logs = query.new_empty(parts, dtype=torch.float32)
        self._kernels.attend_kernel[(num_tiles * num_splits, kv_heads, metadata.num_rows)](
            query,
            key_blocks,
            value_blocks,
            attended,
            sums,
            logs,
            attended if params.sinks is None else params.sinks,
            metadata.query_starts,
            metadata.context_lens,
            metadata.block_tables,
            params.scaling,
            params.softcap or 1.0,
            query.stride(0),
            query.stride(1),
            key_blocks.stride(0),
            key_blocks.stride(1),
            value_blocks.stride(0),
            value_blocks.stride(1),
            metadata.block_tables.stride(0),
            HEADS=heads,
            GROUP=group,
            GROUP_PAD=group_pad,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_PAD=key_pad,
            VALUE_PAD=value_pad,
            BLOCK_SIZE=metadata.block_size,
            WINDOW=params.sliding_window or 0,
            HAS_SOFTCAP=params.softcap is not None,
            HAS_SINKS=params.sinks is not None,
            NUM_SPLITS=num_splits,
            TILE_M=tile_m,
            TILE_N=tile_n,
            num_warps=4,
            num_stages=2,
        )
        if num_splits > 1:
            self._kernels.merge_kernel[(num_tokens * heads,)](
                sums,
                logs,
                attended,
                VALUE_DIM=value_dim,
                VALUE_PAD=value_pad,
                NUM_SPLITS=num_splits,
                num_warps=1,
            )


def _in_rows(part: torch.Tensor) -> torch.Tensor:
    """With a last stride of 1, which the kernels assume."""
    return part if part.stride(2) == 1 else part.contiguous()


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def tile_shape(
    group_pad: int, key_pad: int, value_pad: int, element_bytes: int, shared_bytes: int,
    *, is_decode: bool,
) -> tuple[int, int]:  # fmt: skip
    """Rows (query tokens x heads of a group) and keys of a tile.

    A tile of keys and one of values take up to 32 KiB of shared memory each, less on devices with
    less shared memory. float32 is multiplied without tensor cores, by code that grows with the
    tile, so its tile is small.

    Args:
        group_pad: Heads of a group, padded; a tile has as many rows at least.
        key_pad: Padded width of keys and queries.
        value_pad: That of values.
        element_bytes: Of the model's type.
        shared_bytes: What the device gives one program.
        is_decode: Whether every row of the batch is one token.
    """
    dim = max(key_pad, value_pad)
    if element_bytes > 2:
        num_rows, num_keys = _MIN_TILE, min(32, (16 << 10) // (dim * element_bytes))
    else:
        num_rows = _MIN_TILE if is_decode else 64
        num_keys = min(64, (32 << 10) // (dim * element_bytes))
    num_rows, num_keys = max(num_rows, group_pad), max(num_keys, _MIN_TILE)
    min_rows = max(_MIN_TILE, group_pad)

    def is_too_large() -> bool:
        # Queries; keys and values twice where the compiler prefetches, otherwise once and the
        # weights beside them.
        widths = key_pad + value_pad
        elements = num_rows * key_pad + num_keys * max(2 * widths, widths + num_rows)
        return elements * element_bytes > shared_bytes

    while num_keys > _MIN_TILE and is_too_large():
        num_keys //= 2
    while num_rows > min_rows and is_too_large():
        num_rows //= 2
    return num_rows, num_keys


def _shared_bytes_of(device: torch.device | None) -> int:
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return _DEFAULT_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _num_splits(metadata: AttentionMetadata, kv_heads: int, sliding_window: int | None) -> int:
    """Parts, a power of two, into which each context of a decode batch is divided."""
    if metadata.max_query_len > 1:
        return 1
    programs = metadata.num_rows * kv_heads
    visible = min(metadata.max_context_len, sliding_window or metadata.max_context_len)
    wanted = min(_WANTED_PROGRAMS // programs, visible // _MIN_SPLIT_TOKENS, _MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1
