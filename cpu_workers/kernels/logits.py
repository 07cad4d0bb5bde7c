"""Changes logits in place before a token is drawn: masks of allowed tokens, and added values."""

import numpy as np
from numba import carray

from .simd.compiled import kernel, part
from .simd.memory import pointer

_WORD_BITS = 32
_NO_BIT, _ALL_BITS = np.int32(0), np.int32(-1)
_MINUS_INF = np.int32(-0x800000)  # the bits of -inf
_SHIFTS = np.arange(_WORD_BITS - 1, -1, -1, dtype=np.int32)  # each moves a bit to the sign


@part
def _mask_word(values: np.ndarray, bits: np.int32) -> None:
    """Without branches and in 32 bits, so that it uses vectors. values: the bits of 32 float32."""
    for i in range(_WORD_BITS):
        keep = np.int32(np.int32(bits << _SHIFTS[i]) >> np.int32(31))  # all bits, or none
        values[i] = (values[i] & keep) | (_MINUS_INF & ~keep)


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def adjust_logits(
    logits: int,
    num_columns: int,
    masks: int,
    mask_rows: int,
    num_masks: int,
    num_words: int,
    entries: int,
    num_entries: int,
) -> None:
    """Set logits without a bit to -inf, then add values to single logits.

    logits: float32 [rows, num_columns], without gaps.
    masks: int32 [num_masks, num_words]; bit i of word w stands for column 32 * w + i. Columns
        beyond the words have no bit. mask_rows: int32 [num_masks], the row of each mask.
    entries: 32-bit [3, num_entries]: rows and columns as int32, values as float32. Columns outside
        of the logits are skipped.
    """
    nothing = np.float32(-np.inf)
    rows = carray(pointer(mask_rows), (num_masks,), np.int32)
    for number in range(num_masks):
        first = logits + 4 * np.int64(rows[number]) * num_columns
        words = carray(pointer(masks + 4 * number * num_words), (num_words,), np.int32)
        num_whole = min(num_words, num_columns // _WORD_BITS)
        for word in range(num_whole):
            bits = words[word]
            if bits == _ALL_BITS:
                continue
            values = carray(pointer(first + 4 * word * _WORD_BITS), (_WORD_BITS,), np.int32)
            if bits == _NO_BIT:
                for i in range(_WORD_BITS):
                    values[i] = _MINUS_INF
            else:
                _mask_word(values, bits)
        rest = carray(pointer(first), (num_columns,), np.float32)
        for column in range(num_whole * _WORD_BITS, num_columns):
            word, bit = column // _WORD_BITS, np.int32(column % _WORD_BITS)
            if word >= num_words or not (words[word] >> bit) & 1:
                rest[column] = nothing
    targets = carray(pointer(entries), (2, num_entries), np.int32)
    added = carray(pointer(entries + 8 * num_entries), (num_entries,), np.float32)
    for number in range(num_entries):
        token = np.int64(targets[1, number])
        if 0 <= token < num_columns:
            row = carray(
                pointer(logits + 4 * np.int64(targets[0, number]) * num_columns), (num_columns,), np.float32
            )
            row[token] += added[number]
