"""The operations of a decoder between its products, in bfloat16: norms, rotations, activations.

Each takes rows and writes rows in one pass over memory, and rounds where transformers' modules
round. The kernels get raw addresses and know nothing of modules or torch; strides are in values.
Each thread takes one contiguous share of the rows. Few rows are computed by the caller's thread
alone, because waking a second one would take longer.
"""

from typing import Any

import numpy as np
from numba import carray, njit, prange

from .simd.bfloat16 import rounded, widened
from .simd.compiled import address_of, call_function, kernel, part
from .simd.memory import pointer

# Calls with fewer values are computed by one thread: about 10 us.
_SERIAL_VALUES = 32 * 1024

_LOW_HALF, _HALF_BITS = np.uint32(0xFFFF), np.uint32(16)


# Only sums may be reordered; NaN and infinities are preserved.
@njit(error_model="numpy", nogil=True, fastmath={"reassoc", "nsz", "contract"})
def _inverse_rms(x: np.ndarray, epsilon: np.float32) -> Any:
    total = np.float32(0)
    for i in range(len(x)):
        value = widened(x[i])
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(len(x)) + epsilon)


@part
def _norm_share(
    x: int,
    x_stride: int,
    scale: int,
    y: int,
    features: int,
    epsilon: np.float32,
    rounds_twice: bool,
    first: int,
    last: int,
) -> None:
    factors = carray(pointer(scale), (features,), np.float32)
    for row in range(first, last):
        values = carray(pointer(x + 2 * row * x_stride), (features,), np.uint16)
        results = carray(pointer(y + 2 * row * features), (features,), np.uint16)
        inverse = _inverse_rms(values, epsilon)
        if rounds_twice:
            for i in range(features):
                normed = widened(rounded(widened(values[i]) * inverse))
                results[i] = rounded(normed * factors[i])
        else:
            for i in range(features):
                results[i] = rounded((widened(values[i]) * inverse) * factors[i])


@kernel(parallel=True)
def norm(
    x: int,
    x_stride: int,
    scale: int,
    y: int,
    num_rows: int,
    features: int,
    epsilon: np.float32,
    rounds_twice: bool,
    num_threads: int,
) -> None:
    """Write scale * x / sqrt(mean(x^2) + epsilon) of each row.

    x: bfloat16 [num_rows, features], ``x_stride`` values from one row to the next; y: the same
        without gaps; scale: float32 [features].
    rounds_twice: the normed row is rounded before it is scaled, too.
    num_threads: at most as many as numba has started.
    """
    whole = (x, x_stride, scale, y, features, epsilon, rounds_twice, np.int64(0), num_rows)
    share = address_of(_norm_share, whole)
    if num_threads == 1 or num_rows * features <= _SERIAL_VALUES:
        call_function(share, whole)
        return
    for worker in prange(num_threads):
        first = num_rows * worker // num_threads
        last = num_rows * (worker + 1) // num_threads
        call_function(share, (x, x_stride, scale, y, features, epsilon, rounds_twice, first, last))


@part
def _add_share(a: int, b: int, y: int, first: int, last: int) -> None:
    lefts = carray(pointer(a), (last,), np.uint16)
    rights = carray(pointer(b), (last,), np.uint16)
    results = carray(pointer(y), (last,), np.uint16)
    for i in range(first, last):
        results[i] = rounded(widened(lefts[i]) + widened(rights[i]))


@kernel(parallel=True)
def add(a: int, b: int, y: int, num_values: int, num_threads: int) -> None:
    """Write a + b; bfloat16 [num_values] each.

    num_threads: at most as many as numba has started.
    """
    whole = (a, b, y, np.int64(0), num_values)
    share = address_of(_add_share, whole)
    if num_threads == 1 or num_values <= _SERIAL_VALUES:
        call_function(share, whole)
        return
    for worker in prange(num_threads):
        first = num_values * worker // num_threads
        last = num_values * (worker + 1) // num_threads
        call_function(share, (a, b, y, first, last))


@part
def _gated_share(
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    table: int,
    y: int,
    features: int,
    first: int,
    last: int,
) -> None:
    activated = carray(pointer(table), (65536,), np.uint16)
    for row in range(first, last):
        gates = carray(pointer(gate + 2 * row * gate_stride), (features,), np.uint16)
        ups = carray(pointer(up + 2 * row * up_stride), (features,), np.uint16)
        results = carray(pointer(y + 2 * row * features), (features,), np.uint16)
        # Two loops: the first cannot use vectors, the second can. Pairs save reads and writes.
        gate_pairs = carray(pointer(gate + 2 * row * gate_stride), (features // 2,), np.uint32)
        result_pairs = carray(pointer(y + 2 * row * features), (features // 2,), np.uint32)
        for i in range(features // 2):
            pair = gate_pairs[i]
            low = np.uint32(activated[pair & _LOW_HALF])
            result_pairs[i] = low | np.uint32(activated[pair >> _HALF_BITS]) << _HALF_BITS
        if features % 2:
            results[features - 1] = activated[gates[features - 1]]
        for i in range(features):
            results[i] = rounded(widened(results[i]) * widened(ups[i]))


@kernel(parallel=True)
def gated(
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    table: int,
    y: int,
    num_rows: int,
    features: int,
    num_threads: int,
) -> None:
    """Write activation(gate) * up of each row.

    gate, up: bfloat16 [num_rows, features], strides in values from one row to the next; y: the
        same without gaps.
    table: bfloat16 [65536], the activation of every bfloat16, by its bits.
    num_threads: at most as many as numba has started.
    """
    whole = (gate, gate_stride, up, up_stride, table, y, features, np.int64(0), num_rows)
    share = address_of(_gated_share, whole)
    if num_threads == 1 or num_rows * features <= _SERIAL_VALUES:
        call_function(share, whole)
        return
    for worker in prange(num_threads):
        first = num_rows * worker // num_threads
        last = num_rows * (worker + 1) // num_threads
        call_function(share, (gate, gate_stride, up, up_stride, table, y, features, first, last))


@part
def _rotate_heads(
    x: int, head_stride: int, num_heads: int, dim: int, cos: np.ndarray, sin: np.ndarray, y: int
) -> None:
    half = len(cos) // 2
    for head in range(num_heads):
        values = carray(pointer(x + 2 * head * head_stride), (dim,), np.uint16)
        results = carray(pointer(y + 2 * head * dim), (dim,), np.uint16)
        for i in range(half):
            a, b = widened(values[i]), widened(values[half + i])
            near = widened(rounded(a * widened(cos[i])))
            far = widened(rounded(-b * widened(sin[i])))
            results[i] = rounded(near + far)
            near = widened(rounded(b * widened(cos[half + i])))
            far = widened(rounded(a * widened(sin[half + i])))
            results[half + i] = rounded(near + far)
        for i in range(2 * half, dim):
            results[i] = values[i]


@part
def _rotate_tokens(
    x: int,
    token_stride: int,
    head_stride: int,
    num_heads: int,
    y: int,
    dim: int,
    cos: int,
    sin: int,
    table_stride: int,
    rotary_dim: int,
    first: int,
    last: int,
) -> None:
    for token in range(first, last):
        cosines = carray(pointer(cos + 2 * token * table_stride), (rotary_dim,), np.uint16)
        sines = carray(pointer(sin + 2 * token * table_stride), (rotary_dim,), np.uint16)
        _rotate_heads(
            x + 2 * token * token_stride,
            head_stride,
            num_heads,
            dim,
            cosines,
            sines,
            y + 2 * token * num_heads * dim,
        )


@part
def _rotate_share(
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    q_heads: int,
    q_out: int,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    k_heads: int,
    k_out: int,
    dim: int,
    cos: int,
    sin: int,
    table_stride: int,
    rotary_dim: int,
    first: int,
    last: int,
) -> None:
    _rotate_tokens(
        q, q_token_stride, q_head_stride, q_heads, q_out, dim, cos, sin, table_stride, rotary_dim, first, last
    )
    _rotate_tokens(
        k, k_token_stride, k_head_stride, k_heads, k_out, dim, cos, sin, table_stride, rotary_dim, first, last
    )


@kernel(parallel=True)
def rotate(
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    q_heads: int,
    q_out: int,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    k_heads: int,
    k_out: int,
    dim: int,
    cos: int,
    sin: int,
    table_stride: int,
    rotary_dim: int,
    num_tokens: int,
    num_threads: int,
) -> None:
    """Rotate pairs (i, i + rotary_dim / 2) of the first ``rotary_dim`` values of each head.

    q, k: bfloat16, a value per (token, head, dim) at the given strides, dim without gaps; q_out,
        k_out: bfloat16 [num_tokens, heads, dim].
    cos, sin: bfloat16 [num_tokens, rotary_dim], ``table_stride`` values from one token to the
        next. Both products are rounded before they are added.
    num_threads: at most as many as numba has started.
    """
    heads = (
        q,
        q_token_stride,
        q_head_stride,
        q_heads,
        q_out,
        k,
        k_token_stride,
        k_head_stride,
        k_heads,
        k_out,
    )
    tables = (dim, cos, sin, table_stride, rotary_dim)
    whole = (*heads, *tables, np.int64(0), num_tokens)
    share = address_of(_rotate_share, whole)
    if num_threads == 1 or num_tokens * (q_heads + k_heads) * dim <= _SERIAL_VALUES:
        call_function(share, whole)
        return
    for worker in prange(num_threads):
        first = num_tokens * worker // num_threads
        last = num_tokens * (worker + 1) // num_threads
        call_function(share, (*heads, *tables, first, last))
