"""The operations of a decoder between its products, for 16-bit types on a GPU.

They round where transformers' modules round. LLVM computes a product or a sum that is rounded to 16
bits in the 16-bit type, and fuses both into one operation that rounds only once: a kernel in which a
rounded product is added to something must be launched without fusion. Imported only if Triton is
used. Lengths and strides that change from pass to pass are not specialized: a variant that a later
step needs first would be compiled while serving.
"""

import triton
import triton.language as tl


@triton.jit
def _inverse_rms(values: tl.tensor, epsilon: tl.tensor, FEATURES: tl.constexpr) -> tl.tensor:
    """Return 1 / sqrt(mean(values^2) + epsilon) of each row; zeros stand behind the features."""
    wide = values.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) / FEATURES + epsilon)


@triton.jit
def _scaled(
    values: tl.tensor,  # [rows, columns]
    inverse: tl.tensor,  # float32 [rows]
    factors: tl.tensor,  # float32 [columns]
    ROUNDS_TWICE: tl.constexpr,
) -> tl.tensor:
    """Return factors * (values * inverse), where the product in brackets may be rounded, too."""
    normed = values.to(tl.float32) * inverse[:, None]
    if ROUNDS_TWICE:
        normed = normed.to(values.dtype).to(tl.float32)
    return (normed * factors[None, :]).to(values.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x: tl.tensor,  # [rows, FEATURES], contiguous, as total, base and y
    base: tl.tensor,  # unused unless HAS_BASE
    total: tl.tensor,  # base + x; unused unless HAS_BASE
    y: tl.tensor,  # unused unless HAS_OUTER
    inner_factors: tl.tensor,  # float32 [FEATURES]; unused unless HAS_INNER
    outer_factors: tl.tensor,  # float32 [FEATURES]; unused unless HAS_OUTER
    inner_epsilon: tl.tensor,
    outer_epsilon: tl.tensor,
    num_rows: tl.tensor,
    FEATURES: tl.constexpr,
    FEATURES_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_INNER: tl.constexpr,
    INNER_ROUNDS_TWICE: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    OUTER_ROUNDS_TWICE: tl.constexpr,
) -> None:
    """Norm x, add it to base and norm the sum, or some of these; grid (tiles of rows)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, FEATURES_PAD)
    places = row.to(tl.int64)[:, None] * FEATURES + column[None, :]
    mask = (row < num_rows)[:, None] & (column < FEATURES)[None, :]
    values = tl.load(x + places, mask=mask, other=0.0)
    if HAS_INNER:
        inverse = _inverse_rms(values, inner_epsilon, FEATURES)
        factors = tl.load(inner_factors + column, mask=column < FEATURES, other=0.0)
        values = _scaled(values, inverse, factors, INNER_ROUNDS_TWICE)
    if HAS_BASE:
        before = tl.load(base + places, mask=mask, other=0.0)
        values = (before.to(tl.float32) + values.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + places, values, mask=mask)
    if HAS_OUTER:
        inverse = _inverse_rms(values, outer_epsilon, FEATURES)
        factors = tl.load(outer_factors + column, mask=column < FEATURES, other=0.0)
        tl.store(y + places, _scaled(values, inverse, factors, OUTER_ROUNDS_TWICE), mask=mask)


@triton.jit
def gated_kernel(
    gate: tl.tensor,  # the bits of [rows, FEATURES], int16
    up: tl.tensor,  # [rows, FEATURES]
    table: tl.tensor,  # [65536], the activation of every value, by its bits
    y: tl.tensor,  # [rows, FEATURES], contiguous
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write activation(gate) * up; grid (rows, tiles of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < FEATURES
    bits = tl.load(gate + row * gate_stride + column, mask=mask, other=0).to(tl.int32) & 0xFFFF
    activated = tl.load(table + bits, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    results = (activated * factors).to(y.dtype.element_ty)
    tl.store(y + row * FEATURES + column, results, mask=mask)


@triton.jit
def _rotated(
    x: tl.tensor,  # one token, at its first head
    head_stride: tl.tensor,
    head: tl.tensor,
    head_ok: tl.tensor,
    cos: tl.tensor,  # of the token
    sin: tl.tensor,
    factors: tl.tensor,
    epsilon: tl.tensor,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_TWICE: tl.constexpr,
) -> tl.tensor:
    """[heads, dim] of one token, normed and then rotated in pairs (i, i + HALF)."""
    dim = tl.arange(0, DIM_PAD)
    other = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))
    mask = head_ok[:, None] & (dim < DIM)[None, :]
    rows = x + head.to(tl.int64)[:, None] * head_stride
    values = tl.load(rows + dim[None, :], mask=mask, other=0.0)
    others = tl.load(rows + other[None, :], mask=mask, other=0.0)
    if HAS_NORM:
        inverse = _inverse_rms(values, epsilon, DIM)
        scale = tl.load(factors + dim, mask=dim < DIM, other=0.0)
        values = _scaled(values, inverse, scale, ROUNDS_TWICE)
        scale = tl.load(factors + other, mask=dim < DIM, other=0.0)
        others = _scaled(others, inverse, scale, ROUNDS_TWICE)
    is_rotated = dim < 2 * HALF
    near = tl.load(cos + dim, mask=is_rotated, other=1.0).to(tl.float32)[None, :]
    far = tl.load(sin + dim, mask=is_rotated, other=0.0).to(tl.float32)
    signed = (far * tl.where(dim < HALF, -1.0, 1.0))[None, :]  # -far would turn 0 into 0, not -0
    first = (values.to(tl.float32) * near).to(values.dtype)
    second = (others.to(tl.float32) * signed).to(values.dtype)
    total = (first.to(tl.float32) + second.to(tl.float32)).to(values.dtype)
    return tl.where(is_rotated[None, :], total, values)


@triton.jit(
    do_not_specialize=[
        "query_stride_token",
        "query_stride_head",
        "key_stride_token",
        "key_stride_head",
        "value_stride_token",
        "value_stride_head",
        "table_stride",
    ]
)
def rotate_kernel(
    query: tl.tensor,  # [tokens, HEADS, DIM]
    key: tl.tensor,  # [tokens, KV_HEADS, DIM]
    value: tl.tensor,  # [tokens, KV_HEADS, VALUE_DIM]; unused unless IS_PAGED
    cos: tl.tensor,  # [tokens, 2 * HALF]
    sin: tl.tensor,
    query_factors: tl.tensor,  # float32 [DIM]; unused unless HAS_NORM
    key_factors: tl.tensor,
    query_epsilon: tl.tensor,
    key_epsilon: tl.tensor,
    query_out: tl.tensor,  # [tokens, HEADS, DIM], contiguous
    key_out: tl.tensor,  # blocks of the pool, or contiguous [tokens, KV_HEADS, DIM]
    value_out: tl.tensor,  # blocks of the pool; unused unless IS_PAGED
    slot_mapping: tl.tensor,  # int64 [tokens]; unused unless IS_PAGED
    query_stride_token: tl.tensor,
    query_stride_head: tl.tensor,
    key_stride_token: tl.tensor,
    key_stride_head: tl.tensor,
    value_stride_token: tl.tensor,
    value_stride_head: tl.tensor,
    table_stride: tl.tensor,
    key_stride_block: tl.tensor,
    key_stride_kv_head: tl.tensor,
    value_stride_block: tl.tensor,
    value_stride_kv_head: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_TWICE: tl.constexpr,
    IS_PAGED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """Norm and rotate queries and keys; write keys and values to their slots of the pool.

    A token with a slot below 0 has none, and its key and value are not written.
    Grid (tokens, tiles of query heads + tiles of key heads). Strides of query, key, value, cos
    and sin are multiples of ALIGNMENT.
    """
    token = tl.program_id(0).to(tl.int64)
    query_stride_token = tl.multiple_of(query_stride_token, ALIGNMENT)
    query_stride_head = tl.multiple_of(query_stride_head, ALIGNMENT)
    key_stride_token = tl.multiple_of(key_stride_token, ALIGNMENT)
    key_stride_head = tl.multiple_of(key_stride_head, ALIGNMENT)
    value_stride_token = tl.multiple_of(value_stride_token, ALIGNMENT)
    value_stride_head = tl.multiple_of(value_stride_head, ALIGNMENT)
    table_stride = tl.multiple_of(table_stride, ALIGNMENT)
    QUERY_TILES: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    tile = tl.program_id(1)
    cos += token * table_stride
    sin += token * table_stride
    dim = tl.arange(0, DIM_PAD)
    if tile < QUERY_TILES:
        head = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        head_ok = head < HEADS
        queries = _rotated(
            query + token * query_stride_token,
            query_stride_head,
            head,
            head_ok,
            cos,
            sin,
            query_factors,
            query_epsilon,
            DIM,
            DIM_PAD,
            HALF,
            HAS_NORM,
            ROUNDS_TWICE,
        )
        places = (token * HEADS + head)[:, None] * DIM + dim[None, :]
        tl.store(query_out + places, queries, mask=head_ok[:, None] & (dim < DIM)[None, :])
        return
    head = (tile - QUERY_TILES) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head_ok = head < KV_HEADS
    keys = _rotated(
        key + token * key_stride_token,
        key_stride_head,
        head,
        head_ok,
        cos,
        sin,
        key_factors,
        key_epsilon,
        DIM,
        DIM_PAD,
        HALF,
        HAS_NORM,
        ROUNDS_TWICE,
    )
    slot = token
    if IS_PAGED:
        slot = tl.load(slot_mapping + token)
        if slot < 0:
            return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    places = block * key_stride_block + offset * DIM + head.to(tl.int64) * key_stride_kv_head
    targets = key_out + places[:, None] + dim[None, :]
    tl.store(targets, keys, mask=head_ok[:, None] & (dim < DIM)[None, :])
    if IS_PAGED:
        dim = tl.arange(0, VALUE_PAD)
        mask = head_ok[:, None] & (dim < VALUE_DIM)[None, :]
        places = token * value_stride_token + head.to(tl.int64) * value_stride_head
        values = tl.load(value + places[:, None] + dim[None, :], mask=mask, other=0.0)
        places = block * value_stride_block + offset * VALUE_DIM
        places += head.to(tl.int64) * value_stride_kv_head
        tl.store(value_out + places[:, None] + dim[None, :], values, mask=mask)
