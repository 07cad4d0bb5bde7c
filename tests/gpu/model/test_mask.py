"""Masks are read from their function, at any distance of their edges."""

import pytest
import torch
from corun.gpu.model.attention_hook import MaskFunction, Sight, read_mask
from corun.runtime.errors import ModelError
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("size", [1, 2, 7, 36, 2047, 8192, 131_072])
def test_windows_and_chunks(size: int) -> None:
    window = sliding_window_causal_mask_function(size)
    chunk = chunked_causal_mask_function(size, NO_PADDING)
    assert read_mask(window, size) == Sight(window=size)
    assert read_mask(causal_mask_function, size) == Sight()
    if size > 1:  # a chunk of one token is a window of one
        assert read_mask(chunk, size) == Sight(chunk=size)


def test_full_attention() -> None:
    assert read_mask(causal_mask_function, None) == Sight()


def outside(low: int) -> MaskFunction:
    return lambda batch, head, query, key: key >= low


@pytest.mark.parametrize(
    ("mask", "local_size"),
    [
        (bidirectional_mask_function, None),
        (sliding_window_causal_mask_function(36), None),  # of a size that is not given
        (sliding_window_causal_mask_function(36), 40),
        (or_masks(sliding_window_causal_mask_function(36), bidirectional_mask_function), 36),
        (and_masks(causal_mask_function, outside(2)), None),
        (lambda batch, head, query, key: torch.zeros(5, 5)[query, key] == 0, None),
    ],
)
def test_other_masks_are_refused(mask: MaskFunction, local_size: int | None) -> None:
    with pytest.raises(ModelError, match="its attention mask is"):
        read_mask(mask, local_size)
