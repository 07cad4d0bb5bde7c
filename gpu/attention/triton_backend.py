"""Paged attention on a CUDA device by Triton kernels; also chooses tile sizes.

Importing this module does not import Triton; constructing ``TritonAttention`` does. Machines
without Triton can therefore import everything else.
"""

import math

import torch

from ..forward.batch import AttentionMetadata
from ..fused.triton_backend import pending_rotation, resolved
from .base import AttentionParams

# Programs that keep a large device busy: a decode batch with fewer is split along the context.
_WANTED_PROGRAMS = 256
_MAX_SPLITS = 32
# A split covers at least this many positions, otherwise merging costs more than it gains.
_MIN_SPLIT_TOKENS = 512
# Tiles of keys of one program in a decode batch: a step waits for its longest context.
_MAX_DECODE_ROUNDS = 32
_MIN_TILE = 16  # of tl.dot
_ALIGNMENT = 8  # values of 16 bits; more does not make loads wider
# Values that a warp has in registers without spilling: of the weighted sum, float32.
_WARP_VALUES = 1024
_TALL_DIM = 128  # the widest head of which 128 rows have their sums in registers
_LARGE_SHARED_BYTES = 160 << 10
# Shared memory of an H100; the limit of a program without a device: in the interpreter.
_DEFAULT_SHARED_BYTES = 227 << 10


class TritonAttention:
    """The back end for CUDA devices, and for Triton's interpreter on the CPU."""

    name = "triton"

    def __init__(self, device: torch.device | None = None) -> None:
        """``device``: the target device; None = the current one.

        Raises ImportError where Triton is not installed.
        """
        from ..forward.triton_launch import KernelLauncher
        from .triton_kernels import attend_kernel, merge_kernel, write_kv_kernel

        self._launch_write = KernelLauncher(write_kv_kernel)
        self._launch_attend = KernelLauncher(attend_kernel)
        self._launch_merge = KernelLauncher(merge_kernel)
        self._shared_bytes = _shared_bytes_of(device)

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, because of TRITON_INTERPRET=1."""
        import triton

        return not isinstance(self._launch_attend.kernel, triton.JITFunction)

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
        pools = (key_blocks, value_blocks)
        if metadata.min_query_len == 1:
            self._attend(query, *pools, attended, metadata, params, is_decode=True)
        if metadata.max_query_len > 1:
            self._attend(query, *pools, attended, metadata, params, is_decode=False)
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
        self._launch_write(
            (num_tokens, kv_heads),
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
        *,
        is_decode: bool,
    ) -> None:
        """Attend the rows of one token, or all others."""
        _, heads, key_dim = query.shape
        kv_heads, value_dim = key_blocks.shape[1], value_blocks.shape[3]
        group = heads // kv_heads
        group_pad = _next_power_of_2(group)
        key_pad = max(_MIN_TILE, _next_power_of_2(key_dim))
        value_pad = max(_MIN_TILE, _next_power_of_2(value_dim))
        tile_m, tile_n = tile_shape(
            group_pad, key_pad, value_pad, query.element_size(), self._shared_bytes, is_decode=is_decode
        )
        num_tiles, num_splits, split_tokens = 1, 1, 0
        if is_decode:
            num_splits, split_tokens = _splits(metadata, kv_heads, tile_n, params.sliding_window)
        else:
            num_tiles = -(-metadata.max_query_len // (tile_m // group_pad))
        alignment = math.gcd(_ALIGNMENT, query.stride(0), query.stride(1))
        # Arguments are the same with and without splits; unused ones may be any tensor.
        sums = logs = attended
        if num_splits > 1:
            parts = (metadata.num_rows, heads, num_splits)
            sums = query.new_empty((*parts, value_dim), dtype=torch.float32)
            logs = query.new_empty(parts, dtype=torch.float32)
        self._launch_attend(
            (num_tiles * num_splits, kv_heads, metadata.num_rows),
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
            query.stride(0) // alignment,
            query.stride(1) // alignment,
            key_blocks.stride(0),
            key_blocks.stride(1),
            value_blocks.stride(0),
            value_blocks.stride(1),
            metadata.block_tables.stride(0),
            split_tokens,
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
            IS_DECODE=is_decode,
            QUERY_ALIGNMENT=alignment,
            NUM_SPLITS=num_splits,
            TILE_M=tile_m,
            TILE_N=tile_n,
            num_warps=num_warps(tile_m, value_pad),
            num_stages=num_stages(self._shared_bytes),
        )
        if num_splits > 1:
            self._launch_merge(
                (metadata.num_rows * heads,),
                sums,
                logs,
                attended,
                metadata.query_starts,
                HEADS=heads,
                VALUE_DIM=value_dim,
                VALUE_PAD=value_pad,
                NUM_SPLITS=num_splits,
                num_warps=num_warps(num_splits, value_pad),
            )


def _in_rows(part: torch.Tensor) -> torch.Tensor:
    """With a last stride of 1, which the kernels assume."""
    return part if part.stride(2) == 1 else part.contiguous()


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def tile_shape(
    group_pad: int, key_pad: int, value_pad: int, element_bytes: int, shared_bytes: int, *, is_decode: bool
) -> tuple[int, int]:
    """Rows (query tokens x heads of a group) and keys of a tile.

    A tile of keys and one of values take up to 32 KiB of shared memory each, less on devices with
    less shared memory, and half in prefill, where registers are full as well. Prefill reads keys
    for twice as many rows where shared memory is large. float32 is multiplied without tensor
    cores, by code that grows with the tile, so its tile is small.

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
        is_tall = dim <= _TALL_DIM and num_stages(shared_bytes) > 2
        num_rows = _MIN_TILE if is_decode else 128 if is_tall else 64
        num_keys = min(64, ((32 if is_decode else 16) << 10) // (dim * element_bytes))
    num_rows, num_keys = max(num_rows, group_pad), max(num_keys, _MIN_TILE)
    min_rows = max(_MIN_TILE, group_pad)

    def is_too_large() -> bool:
        # Queries; keys and values of all rounds that are in flight, or once and the weights beside
        # them.
        widths = key_pad + value_pad
        elements = num_rows * key_pad + num_keys * max(num_stages(shared_bytes) * widths, widths + num_rows)
        return elements * element_bytes > shared_bytes

    while num_keys > _MIN_TILE and is_too_large():
        num_keys //= 2
    while num_rows > min_rows and is_too_large():
        num_rows //= 2
    return num_rows, num_keys


def num_stages(shared_bytes: int) -> int:
    """Rounds of keys and values that are in flight: those loaded and the one multiplied."""
    return 3 if shared_bytes >= _LARGE_SHARED_BYTES else 2


def num_warps(num_rows: int, value_pad: int) -> int:
    """Warps of a program with a tile of ``num_rows``, so that its sums fit its registers."""
    return 8 if num_rows * value_pad > 4 * _WARP_VALUES else 4


def _shared_bytes_of(device: torch.device | None) -> int:
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return _DEFAULT_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _splits(
    metadata: AttentionMetadata, kv_heads: int, tile_n: int, sliding_window: int | None
) -> tuple[int, int]:
    """Parts, a power of two, that the longest context of rows of one token is divided into.

    Returns their number and the positions of each; other contexts have as many parts as they fill.
    There are enough for a busy device, and for a program to have few rounds.
    """
    visible = min(metadata.max_context_len, sliding_window or metadata.max_context_len)
    # A window may begin within a tile.
    num_tiles = -(-visible // tile_n) + (visible < metadata.max_context_len)
    programs = metadata.num_rows * kv_heads
    busy = min(_WANTED_PROGRAMS // programs, visible // _MIN_SPLIT_TOKENS)
    least = -(-num_tiles // _MAX_DECODE_ROUNDS)
    wanted = max(1 << (busy.bit_length() - 1) if busy else 1, _next_power_of_2(least))
    num_splits = min(wanted, _MAX_SPLITS)
    return num_splits, -(-num_tiles // num_splits) * tile_n
