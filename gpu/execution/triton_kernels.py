"""The Triton kernel of the sampler's inputs; imported only on CUDA."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_columns", "num_masks", "num_words", "num_entries"])
def adjust_logits_kernel(
    logits: tl.tensor,
    masks: tl.tensor,
    mask_rows: tl.tensor,
    entries: tl.tensor,
    num_columns: tl.tensor,
    num_masks: tl.tensor,
    num_words: tl.tensor,
    num_entries: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """See ``adjust_logits`` of the CPU. Grid: (tiles of columns or entries, masks + 1).

    The last row of programs adds the entries. Both orders of a mask and an entry give -inf.
    """
    number = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if number < num_masks:
        is_column = index < num_columns
        word = tl.load(masks + number * num_words + index // 32, mask=is_column, other=0)
        is_allowed = (word >> (index % 32)) & 1
        row = logits + tl.load(mask_rows + number).to(tl.int64) * num_columns
        tl.store(row + index, float("-inf"), mask=is_column & (is_allowed == 0))
    else:
        is_entry = index < num_entries
        row_index = tl.load(entries + index, mask=is_entry, other=0).to(tl.int64)
        column = tl.load(entries + num_entries + index, mask=is_entry, other=0)
        value = tl.load(entries + 2 * num_entries + index, mask=is_entry, other=0)
        tl.atomic_add(
            logits + row_index * num_columns + column,
            value.to(tl.float32, bitcast=True),
            mask=is_entry & (column < num_columns),
        )


def adjust_logits_on_cuda(
    logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor, entries: torch.Tensor
) -> None:
    """Change ``logits`` in place, without waiting for the device.

    logits: float32 [rows, columns]; masks: int32 [masks, words], a bit for each column;
    mask_rows: int32 [masks]; entries: int32 [3, entries], the last row the bits of float32.
    """
    assert logits.is_contiguous() and logits.dtype == torch.float32
    num_masks, num_words = masks.shape
    num_entries = entries.shape[1]
    num_tiles = triton.cdiv(max(num_entries, logits.shape[1] if num_masks else 0), _BLOCK)
    adjust_logits_kernel[(num_tiles, num_masks + 1)](
        logits, masks, mask_rows, entries, logits.shape[1], num_masks, num_words, num_entries, BLOCK=_BLOCK
    )
