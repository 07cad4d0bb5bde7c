"""LoRA products for any number of tokens, cut into the available register tiles.

A token's result does not depend on its tile: all tiles add in one order. Tiles of two tokens are
for decoding, where two requests of one adapter would otherwise read its matrices one after the
other.
"""

from typing import Any

from ..simd.compiled import part
from ..simd.emitter import VECTOR_BYTES
from ..simd.layout import RANKS_PER_TILE
from .tiles import (
    EXPAND_STREAMS,
    EXPAND_TOKENS,
    SHRINK_TOKENS,
    add_expand_tile,
    shrink_tile,
    store_expand_tile,
)

_MOST_SHRUNK, _MOST_EXPANDED = SHRINK_TOKENS[0], EXPAND_TOKENS[0]


@part
def _block_tokens(left: int, most: int) -> int:
    """Tokens of the next tile: the largest size, but four are twice two, not three and one.

    Tiles have ``most`` tokens or, if that is a power of two, each smaller one; if it is three, two
    and one.
    """
    if most == 3:
        return 2 if left == 4 else min(left, 3)
    if left >= 8 and most >= 8:
        return 8
    return 4 if left >= 4 else 2 if left >= 2 else 1


@part
def shrink_tokens(
    tag: Any,
    a: int,
    tile_bytes: int,
    is_pair: bool,
    x: int,
    x_stride: int,
    in_steps: int,
    scaling: Any,
    h: int,
    h_stride: int,
    num_tokens: int,
) -> None:
    """Write h = scaling * x A^T of 8 ranks, or of 16; arguments as in ``tiles``."""
    left = num_tokens
    while left > 0:
        num = _block_tokens(left, _MOST_SHRUNK)
        shrink_tile(tag, num, is_pair, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
        left -= num
        x += num * x_stride
        h += num * h_stride


@part
def shrink_target(
    tag: Any,
    a: int,
    tiles: int,
    scaling: Any,
    x: int,
    x_stride: int,
    in_steps: int,
    num_tokens: int,
    h: int,
    h_stride: int,
) -> None:
    """All ranks of one target; two tiles of 8 ranks for all tokens before the next two."""
    tile_bytes = in_steps * VECTOR_BYTES
    tile = 0
    while tile < tiles:
        is_pair = tile + 1 < tiles
        shrink_tokens(
            tag,
            a,
            tile_bytes,
            is_pair,
            x,
            x_stride,
            in_steps,
            scaling,
            h + 4 * tile * RANKS_PER_TILE,
            h_stride,
            num_tokens,
        )
        num_tiles = 2 if is_pair else 1
        tile += num_tiles
        a += num_tiles * tile_bytes


def _make_expand_tokens(tile: Any) -> Any:
    """A function that computes h B^T of 64 columns (``is_wide``) or of 16."""

    @part
    def expand_tokens(
        tag: Any,
        b: int,
        group_bytes: int,
        is_wide: bool,
        h: int,
        h_stride: int,
        steps: int,
        y: int,
        y_stride: int,
        num_tokens: int,
    ) -> None:
        left = num_tokens
        while left > 0:
            num = _block_tokens(left, _MOST_EXPANDED)
            tile(tag, num, is_wide, b, group_bytes, h, h_stride, steps, y, y_stride)
            left -= num
            h += num * h_stride
            y += num * y_stride

    return expand_tokens


# y += h B^T, and y = h B^T.
expand_tokens = _make_expand_tokens(add_expand_tile)
store_tokens = _make_expand_tokens(store_expand_tile)


def _make_expand_target(tokens: Any) -> Any:
    @part
    def expand_target(
        tag: Any,
        b: int,
        steps: int,
        num_groups: int,
        h: int,
        h_stride: int,
        num_tokens: int,
        y: int,
        y_stride: int,
        y_group_bytes: int,
    ) -> None:
        """All columns of one target, in units of 64 columns for all tokens."""
        group_bytes = steps * VECTOR_BYTES
        group = 0
        while group < num_groups:
            is_wide = num_groups - group >= EXPAND_STREAMS
            tokens(tag, b, group_bytes, is_wide, h, h_stride, steps, y, y_stride, num_tokens)
            done = EXPAND_STREAMS if is_wide else 1
            group += done
            b += done * group_bytes
            y += done * y_group_bytes

    return expand_target


add_target = _make_expand_target(expand_tokens)
store_target = _make_expand_target(store_tokens)
