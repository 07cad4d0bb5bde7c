"""LoRA products for any number of tokens, cut into the register tiles there are.

What a token gets does not depend on the tile that it comes to lie in: all add in one order. Tiles
of two tokens are for decoding, where two requests of one adapter would else read its matrices one
after the other.
"""

from typing import Any

from .compiled import part
from .tiles import (
    expand_1x1,
    expand_1x4,
    expand_2x1,
    expand_2x4,
    expand_4x1,
    expand_4x4,
    shrink_1x1,
    shrink_1x2,
    shrink_2x1,
    shrink_2x2,
    shrink_4x1,
    shrink_4x2,
    shrink_8x1,
    shrink_8x2,
    store_1x1,
    store_1x4,
    store_2x1,
    store_2x4,
    store_4x1,
    store_4x4,
)


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
    """Write h = scaling * x A^T of 8 ranks, or of 16; see ``tiles`` for what is what."""
    left = num_tokens
    while left > 0:
        num = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        if is_pair:
            if num == 8:
                shrink_8x2(tag, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
            elif num == 4:
                shrink_4x2(tag, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
            elif num == 2:
                shrink_2x2(tag, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
            else:
                shrink_1x2(tag, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
        elif num == 8:
            shrink_8x1(tag, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
        elif num == 4:
            shrink_4x1(tag, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
        elif num == 2:
            shrink_2x1(tag, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
        else:
            shrink_1x1(tag, a, tile_bytes, x, x_stride, in_steps, scaling, h, h_stride)
        left -= num
        x += num * x_stride
        h += num * h_stride


def _make_expand_tokens(wide: tuple[Any, Any, Any], narrow: tuple[Any, Any, Any]) -> Any:
    """What computes h B^T of 64 columns (``wide``) or of 16, by tiles of 4, 2 and 1 tokens."""
    wide_4, wide_2, wide_1 = wide
    narrow_4, narrow_2, narrow_1 = narrow

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
            num = 4 if left >= 4 else 2 if left >= 2 else 1
            if is_wide:
                if num == 4:
                    wide_4(tag, b, group_bytes, h, h_stride, steps, y, y_stride)
                elif num == 2:
                    wide_2(tag, b, group_bytes, h, h_stride, steps, y, y_stride)
                else:
                    wide_1(tag, b, group_bytes, h, h_stride, steps, y, y_stride)
            elif num == 4:
                narrow_4(tag, b, group_bytes, h, h_stride, steps, y, y_stride)
            elif num == 2:
                narrow_2(tag, b, group_bytes, h, h_stride, steps, y, y_stride)
            else:
                narrow_1(tag, b, group_bytes, h, h_stride, steps, y, y_stride)
            left -= num
            h += num * h_stride
            y += num * y_stride

    return expand_tokens


# y += h B^T, and y = h B^T.
expand_tokens = _make_expand_tokens(
    (expand_4x4, expand_2x4, expand_1x4), (expand_4x1, expand_2x1, expand_1x1)
)
store_tokens = _make_expand_tokens(
    (store_4x4, store_2x4, store_1x4), (store_4x1, store_2x1, store_1x1)
)
