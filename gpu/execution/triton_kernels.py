"""The sampler's Triton kernels; imported only on CUDA."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024

# What ``_least`` searches for: a bound of the number of larger values, or of their sum.
_FEWER: tl.constexpr = tl.constexpr(0)
_LESS: tl.constexpr = tl.constexpr(1)
_AT_MOST: tl.constexpr = tl.constexpr(2)


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


# Values are known by the bits of their float32, which are ordered as they are: none is negative.
@triton.jit
def _larger(
    row: tl.tensor, num_columns: tl.tensor, bits: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The number of values of a row with more than ``bits``, and their sum."""
    number = tl.zeros([BLOCK], dtype=tl.int32)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, num_columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(row + index, mask=index < num_columns, other=0.0)
        is_larger = (value.to(tl.int32, bitcast=True) > bits) & (index < num_columns)
        number += is_larger.to(tl.int32)
        total += tl.where(is_larger, value, 0.0).to(tl.float64)
    return tl.sum(number, axis=0), tl.sum(total, axis=0)


@triton.jit
def _least(
    row: tl.tensor,
    num_columns: tl.tensor,
    largest: tl.tensor,
    bound: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The smallest bits of which the larger values keep ``bound``; ``largest`` has no larger ones."""
    low, high = -1, largest
    for _ in range(31):
        middle = low + (high - low) // 2
        number, total = _larger(row, num_columns, middle, BLOCK)
        if KIND == _FEWER:
            is_kept = number.to(tl.int64) < bound
        elif KIND == _LESS:
            is_kept = total < bound
        else:
            is_kept = total <= bound
        is_open = high - low > 1
        high = tl.where(is_open & is_kept, middle, high)
        low = tl.where(is_open & (is_kept == 0), middle, low)
    return high


@triton.jit
def _column(
    row: tl.tensor, num_columns: tl.tensor, bits: tl.tensor, place: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The column of the value number ``place`` among those with ``bits``; int64."""
    num_before = 0
    column = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, num_columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(row + index, mask=index < num_columns, other=0.0)
        is_equal = ((value.to(tl.int32, bitcast=True) == bits) & (index < num_columns)).to(tl.int32)
        is_found = (is_equal > 0) & (num_before + tl.cumsum(is_equal, axis=0) == place + 1)
        column += tl.where(is_found, index, 0)
        num_before += tl.sum(is_equal, axis=0)
    return tl.sum(column, axis=0)


@triton.jit(
    do_not_specialize=["num_columns"],
    do_not_specialize_on_alignment=[
        "tokens",
        "probs",
        "is_complete",
        "numbers",
        "min_p",
        "top_k",
        "top_p",
        "has_limit",
    ],
)
def draw_rest_kernel(
    tokens: tl.tensor,
    probs: tl.tensor,
    is_complete: tl.tensor,
    numbers: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    has_limit: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """See ``draw_rest_on_cuda``. Grid: (rows,). Nothing is sorted: bounds are searched by halving."""
    number = tl.program_id(0)
    if tl.load(is_complete + number):
        return
    row = probs + number.to(tl.int64) * num_columns
    most = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(row + index, mask=index < num_columns, other=0.0))
    most = tl.max(most, axis=0)
    largest = most.to(tl.int32, bitcast=True)
    # The least likely tokens that min_p and top_k leave: the first ``num_last`` with ``last``.
    last = (tl.load(min_p + number) * most).to(tl.int32, bitcast=True)
    limit = tl.load(top_k + number)
    if limit < num_columns:
        last = tl.maximum(last, _least(row, num_columns, largest, limit, _FEWER, BLOCK))
    num_larger, total = _larger(row, num_columns, last, BLOCK)
    num_least, _ = _larger(row, num_columns, last - 1, BLOCK)
    num_last = tl.minimum(num_least, limit) - num_larger
    mass = tl.where(
        tl.load(has_limit + number), total + num_last * last.to(tl.float32, bitcast=True).to(tl.float64), 1.0
    )
    # Those that the nucleus leaves: of equal ones those before which less than top_p is kept.
    mass *= tl.load(top_p + number)
    crossing = _least(row, num_columns, largest, mass, _LESS, BLOCK)
    num_kept = num_last
    if crossing > last:
        last = crossing
        num_larger, total = _larger(row, num_columns, last, BLOCK)
        num_least, _ = _larger(row, num_columns, last - 1, BLOCK)
        num_kept = (num_least - num_larger).to(tl.int64)
    value = last.to(tl.float32, bitcast=True).to(tl.float64)
    if value > 0:
        num_kept = tl.minimum(num_kept, tl.ceil((mass - total) / value).to(tl.int32))
    # The token at which the sum of the kept ones passes the number.
    goal = tl.load(numbers + number) * (total + num_kept * value)
    drawn = tl.maximum(last, _least(row, num_columns, largest, goal, _AT_MOST, BLOCK))
    num_larger, total = _larger(row, num_columns, drawn, BLOCK)
    num_least, _ = _larger(row, num_columns, drawn - 1, BLOCK)
    if drawn > last:
        num_kept = (num_least - num_larger).to(tl.int64)
    value = drawn.to(tl.float32, bitcast=True).to(tl.float64)
    place = ((goal - total) / tl.where(value > 0, value, 1.0)).to(tl.int32)
    place = tl.maximum(tl.minimum(place, num_kept - 1), 0)
    tl.store(tokens + number, _column(row, num_columns, drawn, place, BLOCK))


def draw_rest_on_cuda(
    tokens: torch.Tensor, probs: torch.Tensor, is_complete: torch.Tensor, cut: Sequence[torch.Tensor]
) -> None:
    """Draw the rows that are not complete from all tokens, without waiting for the device.

    tokens: int64 [rows], written; probs: float32 [rows, vocabulary] without gaps; is_complete: bool
    [rows]; cut: see ``draws._Cut``.
    """
    assert probs.is_contiguous() and probs.dtype == torch.float32
    draw_rest_kernel[(len(tokens),)](
        tokens, probs, is_complete, *cut, probs.shape[1], BLOCK=_BLOCK, num_warps=8
    )
