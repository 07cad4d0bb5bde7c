"""Grouped LoRA products on the CPU: y += scaling * (x A^T) B^T, all segments and targets at once.

Decides how work is cut. Knows nothing of tables, adapters or torch: it gets raw addresses of
matrices packed by ``layout``. Products accumulate in float32, and the sum is rounded once.

One path serves decode and prefill. Milliseconds for 512 tokens, 1024 x 1024, bfloat16, one thread
of a Zen 4, at rank 8 / 32 / 128: this 0.20 / 0.58 / 1.97 (without AVX512_BF16 0.23 / 0.73 / 2.71),
torch with float32 accumulation 1.34 / 1.68 / 3.71, torch in bfloat16, which rounds h and the delta,
too, 0.62 / 0.49 / 1.53. For 8 to 128 tokens this is the fastest but for rank 128.

Mixed ranks balance: shrink is cut by (segment, 8 tokens, 8 ranks), expand by (segment, 4 tokens,
128 columns) weighted by rank, and each thread takes one contiguous share. With helpers, threads take
a few tokens at a time: see ``pieces``.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import carray, prange

from ..simd.bfloat16 import is_widened, widen
from ..simd.compiled import address_of, call_function, kernel, part
from ..simd.emitter import VECTOR_BYTES
from ..simd.layout import COLUMNS_PER_GROUP, RANKS_PER_TILE
from ..simd.memory import float32_at, int32_at, int64_at, pointer, store_int64
from ..simd.pieces import JOB_FIELD, compute_pieces, has_helpers, job_of, piece_addresses
from .token_blocks import add_target, expand_tokens, shrink_target, shrink_tokens

Plan: TypeAlias = npt.NDArray[np.int64]

_SHRINK_TOKENS = 8
_EXPAND_TOKENS = 4
_BLOCK_TOKENS = 24  # their x stays in the second-level cache; twice the largest tile
_EXPAND_OVERHEAD_RANKS = 16  # cost of a unit besides its ranks: y is read and written
# 128 columns are the smallest work of a thread. Half as many cost more to find than to compute
# where ranks are small: 16 tokens, 16 adapters of rank 8, a model's q, k, v and o: 1.1 ms, and 0.8.
_GROUPS_PER_UNIT = 8
_WIDE_GROUPS = 4  # groups that ``expand_tokens`` takes at a time, if available
# From this many tokens per thread on, threads split tokens instead of units: each converts x to
# float32, shrinks and expands without waiting for others, and reads only what it has written.
_TOKENS_OF_THREAD = 4
# With fewer bytes of A one thread is done before a second one has woken up.
_SERIAL_BYTES = 32 * 1024

# Fields of each target: see ``add_deltas``.
TARGET_FIELDS = 4
_INDEX, _TARGET_Y, _TARGET_STRIDE, _TARGET_COLUMNS = range(TARGET_FIELDS)
# Fields of each pass.
BATCH_FIELDS = 6
_NUM_SEGMENTS, _STARTS, _ENDS, _ROWS, _SCRATCH, _WIDE = range(BATCH_FIELDS)

# Columns of a plan: one row per target and segment, and one more for the ends.
_START, _TOKENS, _RANK, _A, _B, _SHRINK_UNIT, _EXPAND_UNIT, _HIDDEN = range(8)
_SCALING, _Y, _Y_STRIDE, _NUM_GROUPS = range(8, 12)
_PLAN_COLUMNS = 12

# Fields of a job in pieces of some tokens.
_OF_PLAN, _PLAN_ROWS, _OF_SEGMENTS, _ITEMSIZE, _X, _X_STRIDE = range(JOB_FIELD, JOB_FIELD + 6)
_IN_STEPS, _OF_WIDE, _BEGIN, _END, _SIZE = range(JOB_FIELD + 6, JOB_FIELD + 11)
_MAX_PIECES = 16


@part
def _make_plan(
    targets: int,
    num_targets: int,
    a_pointers: int,
    b_pointers: int,
    ranks: int,
    scalings: int,
    row_stride: int,
    starts: int,
    ends: int,
    rows: int,
    num_segments: int,
    h: int,
) -> Plan:
    plan = np.zeros((num_targets * num_segments + 1, _PLAN_COLUMNS), np.int64)
    for t in range(num_targets):
        target = targets + 8 * TARGET_FIELDS * t
        groups = int64_at(target, _TARGET_COLUMNS) // COLUMNS_PER_GROUP
        column_units = -(-groups // _GROUPS_PER_UNIT)
        for s in range(num_segments):
            entry = int32_at(rows, s) * row_stride + int64_at(target, _INDEX)
            tokens = int32_at(ends, s) - int32_at(starts, s)
            rank = int32_at(ranks, entry)
            tiles = -(-rank // RANKS_PER_TILE)
            p = t * num_segments + s
            plan[p, _START] = int32_at(starts, s)
            plan[p, _TOKENS] = tokens
            plan[p, _RANK] = rank
            plan[p, _A] = int64_at(a_pointers, entry)
            plan[p, _B] = int64_at(b_pointers, entry)
            plan[p, _SCALING] = scalings + 4 * entry
            plan[p, _Y] = int64_at(target, _TARGET_Y)
            plan[p, _Y_STRIDE] = int64_at(target, _TARGET_STRIDE)
            plan[p, _NUM_GROUPS] = groups
            plan[p, _HIDDEN] = h
            h += 4 * tokens * tiles * RANKS_PER_TILE
            following = plan[p + 1]
            following[_SHRINK_UNIT] = plan[p, _SHRINK_UNIT] + tiles * -(-tokens // _SHRINK_TOKENS)
            units = column_units * -(-tokens // _EXPAND_TOKENS)
            following[_EXPAND_UNIT] = plan[p, _EXPAND_UNIT] + (units if rank else 0)
    return plan


@part
def _expand_cost(plan: Plan) -> int:
    cost = 0
    for s in range(plan.shape[0] - 1):
        units = plan[s + 1, _EXPAND_UNIT] - plan[s, _EXPAND_UNIT]
        cost += units * (plan[s, _RANK] + _EXPAND_OVERHEAD_RANKS)
    return cost


@part
def _expand_unit_at(plan: Plan, cost: int) -> int:
    """The unit before which units cost ``cost`` ranks together."""
    last = plan.shape[0] - 1
    for s in range(last):
        unit_cost = plan[s, _RANK] + _EXPAND_OVERHEAD_RANKS
        segment_cost = (plan[s + 1, _EXPAND_UNIT] - plan[s, _EXPAND_UNIT]) * unit_cost
        if cost < segment_cost:
            return int(plan[s, _EXPAND_UNIT] + cost // unit_cost)
        cost -= segment_cost
    return int(plan[last, _EXPAND_UNIT])


@part
def _shrink_share(tag: Any, plan: Plan, x: int, x_stride: int, in_steps: int, first: int, last: int) -> None:
    """Units [first, last): 8 tokens and 8 ranks each; neighbours of one token block go in pairs."""
    tile_bytes = in_steps * VECTOR_BYTES
    s = 0
    unit = first
    while unit < last:
        while plan[s + 1, _SHRINK_UNIT] <= unit:
            s += 1
        scaling = float32_at(plan[s, _SCALING], 0)
        tiles = -(-plan[s, _RANK] // RANKS_PER_TILE)
        h_stride = 4 * tiles * RANKS_PER_TILE
        block, tile = divmod(unit - plan[s, _SHRINK_UNIT], tiles)
        is_pair = tile + 1 < tiles and unit + 1 < last
        token = block * _SHRINK_TOKENS
        end = min(token + _SHRINK_TOKENS, plan[s, _TOKENS])
        a = plan[s, _A] + tile * tile_bytes
        values = x + (plan[s, _START] + token) * x_stride
        h = plan[s, _HIDDEN] + token * h_stride + 4 * tile * RANKS_PER_TILE
        shrink_tokens(
            tag, a, tile_bytes, is_pair, values, x_stride, in_steps, scaling, h, h_stride, end - token
        )
        unit += 2 if is_pair else 1


@part
def _expand_share(tag: Any, plan: Plan, itemsize: int, first: int, last: int) -> None:
    """Units [first, last): 4 tokens and 128 columns each."""
    s = 0
    for unit in range(first, last):
        while plan[s + 1, _EXPAND_UNIT] <= unit:
            s += 1
        rank = plan[s, _RANK]
        y_stride = plan[s, _Y_STRIDE]
        num_groups = plan[s, _NUM_GROUPS]
        column_units = -(-num_groups // _GROUPS_PER_UNIT)
        steps = -(-rank * itemsize // 4)
        group_bytes = steps * VECTOR_BYTES
        h_stride = 4 * RANKS_PER_TILE * -(-rank // RANKS_PER_TILE)
        block, column_unit = divmod(unit - plan[s, _EXPAND_UNIT], column_units)
        token = block * _EXPAND_TOKENS
        end = min(token + _EXPAND_TOKENS, plan[s, _TOKENS])
        group = column_unit * _GROUPS_PER_UNIT
        last_group = min(group + _GROUPS_PER_UNIT, num_groups)
        h = plan[s, _HIDDEN] + token * h_stride
        row = plan[s, _Y] + (plan[s, _START] + token) * y_stride
        while group < last_group:
            is_wide = last_group - group >= _WIDE_GROUPS
            expand_tokens(
                tag,
                plan[s, _B] + group * group_bytes,
                group_bytes,
                is_wide,
                h,
                h_stride,
                steps,
                row + group * COLUMNS_PER_GROUP * itemsize,
                y_stride,
                end - token,
            )
            group += _WIDE_GROUPS if is_wide else 1


@part
def _widen_share(x: int, x_stride: int, row_bytes: int, wide: int, first: int, last: int) -> None:
    for token in range(first, last):
        widen(x + token * x_stride, row_bytes // 2, wide + token * row_bytes * 2, row_bytes)


@part
def _token_cost(plan: Plan, num_segments: int, segment: int, in_steps: int) -> int:
    """The cost of one token of a segment, over all targets."""
    cost = in_steps
    for p in range(segment, plan.shape[0] - 1, num_segments):
        cost += plan[p, _RANK] * (in_steps + plan[p, _NUM_GROUPS])
    return cost


@part
def _token_at(plan: Plan, num_segments: int, in_steps: int, cost: int) -> int:
    """The token before which tokens cost ``cost`` together; one past the last if they cost less."""
    token = 0
    for s in range(num_segments):
        token_cost = _token_cost(plan, num_segments, s, in_steps)
        if cost < plan[s, _TOKENS] * token_cost:
            return int(plan[s, _START] + cost // token_cost)
        cost -= plan[s, _TOKENS] * token_cost
        token = plan[s, _START] + plan[s, _TOKENS]
    return int(token)


@part
def _tokens_share(
    tag: Any,
    plan: Plan,
    num_segments: int,
    itemsize: int,
    x: int,
    x_stride: int,
    in_steps: int,
    wide: int,
    begin: int,
    end: int,
) -> None:
    """All targets of tokens [begin, end), segment by segment, some tokens at a time."""
    row_bytes = 8 * in_steps * (2 if is_widened(tag) else 1)
    for s in range(num_segments):
        first = max(begin, plan[s, _START])
        last = min(end, plan[s, _START] + plan[s, _TOKENS])
        while first < last:
            count = min(last - first, _BLOCK_TOKENS)
            rows, stride = x + first * x_stride, x_stride
            if is_widened(tag):
                rows, stride = wide + first * row_bytes, row_bytes
                _widen_share(x, x_stride, row_bytes // 2, wide, first, first + count)
            for p in range(s, plan.shape[0] - 1, num_segments):
                rank = plan[p, _RANK]
                if rank == 0:
                    continue
                tiles = -(-rank // RANKS_PER_TILE)
                h_stride = 4 * tiles * RANKS_PER_TILE
                h = plan[p, _HIDDEN] + (first - plan[p, _START]) * h_stride
                shrink_target(
                    tag,
                    plan[p, _A],
                    tiles,
                    float32_at(plan[p, _SCALING], 0),
                    rows,
                    stride,
                    in_steps,
                    count,
                    h,
                    h_stride,
                )
                add_target(
                    tag,
                    plan[p, _B],
                    -(-rank * itemsize // 4),
                    plan[p, _NUM_GROUPS],
                    h,
                    h_stride,
                    count,
                    plan[p, _Y] + first * plan[p, _Y_STRIDE],
                    plan[p, _Y_STRIDE],
                    COLUMNS_PER_GROUP * itemsize,
                )
            first += count


@part
def _tokens_piece(tag: Any, job: int, number: int) -> None:
    """Some tokens of a job that ``_tokens_in_pieces`` has published."""
    plan = carray(
        pointer(int64_at(job, _OF_PLAN)), (int64_at(job, _PLAN_ROWS), np.int64(_PLAN_COLUMNS)), np.int64
    )
    first = int64_at(job, _BEGIN) + number * int64_at(job, _SIZE)
    _tokens_share(
        tag,
        plan,
        int64_at(job, _OF_SEGMENTS),
        int64_at(job, _ITEMSIZE),
        int64_at(job, _X),
        int64_at(job, _X_STRIDE),
        int64_at(job, _IN_STEPS),
        int64_at(job, _OF_WIDE),
        first,
        min(first + int64_at(job, _SIZE), int64_at(job, _END)),
    )


_piece_address = piece_addresses(_tokens_piece)


@part
def _tokens_in_pieces(
    tag: Any,
    plan: Plan,
    num_segments: int,
    itemsize: int,
    x: int,
    x_stride: int,
    in_steps: int,
    wide: int,
    begin: int,
    end: int,
    helpers: int,
) -> None:
    """All targets of tokens [begin, end), shared with helpers."""
    job, size = job_of(helpers), max(1, (end - begin) // _MAX_PIECES)
    store_int64(job, _OF_PLAN, plan.ctypes.data)
    store_int64(job, _PLAN_ROWS, plan.shape[0])
    store_int64(job, _OF_SEGMENTS, num_segments)
    store_int64(job, _ITEMSIZE, itemsize)
    store_int64(job, _X, x)
    store_int64(job, _X_STRIDE, x_stride)
    store_int64(job, _IN_STEPS, in_steps)
    store_int64(job, _OF_WIDE, wide)
    store_int64(job, _BEGIN, begin)
    store_int64(job, _END, end)
    store_int64(job, _SIZE, size)
    compute_pieces(helpers, _piece_address(tag), -(-(end - begin) // size))


@kernel(parallel=True)
def add_deltas(
    tag: Any,
    itemsize: int,
    x: int,
    x_stride: int,
    in_steps: int,
    targets: int,
    num_targets: int,
    a_pointers: int,
    b_pointers: int,
    ranks: int,
    scalings: int,
    row_stride: int,
    batch: int,
    num_threads: int,
    helpers: int,
) -> None:
    """Add the deltas of targets that read the same x to the y of each, for all segments.

    tag, itemsize: a format tag of ``layout`` and the bytes of one of its values.
    x: address; x_stride: bytes from one token to the next; in_steps: units of 8 bytes in a padded
        row of x.
    targets: address of int64 [num_targets, TARGET_FIELDS]: index in the table's rows, address of
        y, bytes from one token of y to the next, padded columns of y.
    a_pointers, b_pointers (int64), ranks (int32), scalings (float32): addresses of the tables,
        with ``row_stride`` entries per row. Rank 0 = nothing to add.
    batch: address of int64 [BATCH_FIELDS]: the values that differ from pass to pass, so that a call
        can be replayed. Number of segments; addresses of int32 [segments], first token, one past
        the last, table row; address of float32 scratch, for each target and segment tokens * (rank
        rounded up to 8); of further scratch, as many values as x has, for ``BFLOAT16``.
    num_threads: at most ``numba.get_num_threads()``, which a cached kernel cannot query itself.
    helpers: address of the memory that this thread shares with its helpers, or 0. While there are
        some, they take part instead of numba's threads.
    """
    plan = _make_plan(
        targets,
        num_targets,
        a_pointers,
        b_pointers,
        ranks,
        scalings,
        row_stride,
        int64_at(batch, _STARTS),
        int64_at(batch, _ENDS),
        int64_at(batch, _ROWS),
        int64_at(batch, _NUM_SEGMENTS),
        int64_at(batch, _SCRATCH),
    )
    num_segments, wide = int64_at(batch, _NUM_SEGMENTS), int64_at(batch, _WIDE)
    num_tokens = token_cost = 0
    for s in range(num_segments):
        num_tokens += plan[s, _TOKENS]
        token_cost += plan[s, _TOKENS] * _token_cost(plan, num_segments, s, in_steps)
    if num_tokens >= _TOKENS_OF_THREAD * num_threads:
        begin, end = plan[0, _START], plan[num_segments - 1, _START]
        end += plan[num_segments - 1, _TOKENS]
        if has_helpers(helpers):
            _tokens_in_pieces(
                tag, plan, num_segments, itemsize, x, x_stride, in_steps, wide, begin, end, helpers
            )
            return
        all_tokens = (tag, plan, num_segments, itemsize, x, x_stride, in_steps, wide, begin, end)
        tokens = address_of(_tokens_share, all_tokens)
        if num_threads == 1:
            call_function(tokens, all_tokens)
            return
        for worker in prange(num_threads):
            cost = token_cost * worker // num_threads
            first = _token_at(plan, num_segments, in_steps, cost)
            cost = token_cost * (worker + 1) // num_threads
            last = _token_at(plan, num_segments, in_steps, cost)
            call_function(
                tokens, (tag, plan, num_segments, itemsize, x, x_stride, in_steps, wide, first, last)
            )
        return
    if is_widened(tag):
        for s in range(num_segments):
            start = plan[s, _START]
            _widen_share(x, x_stride, 8 * in_steps, wide, start, start + plan[s, _TOKENS])
        x, x_stride = wide, 16 * in_steps
    shrink_units = plan[-1, _SHRINK_UNIT]
    cost = _expand_cost(plan)
    workers = num_threads
    if shrink_units * in_steps * VECTOR_BYTES <= _SERIAL_BYTES:
        workers = 1
    all_shrinks = (tag, plan, x, x_stride, in_steps, np.int64(0), shrink_units)
    all_expands = (tag, plan, itemsize, np.int64(0), plan[-1, _EXPAND_UNIT])
    shrink = address_of(_shrink_share, all_shrinks)
    expand = address_of(_expand_share, all_expands)
    if workers == 1:
        call_function(shrink, all_shrinks)
        call_function(expand, all_expands)
        return
    for worker in prange(workers):
        first = shrink_units * worker // workers
        last = shrink_units * (worker + 1) // workers
        call_function(shrink, (tag, plan, x, x_stride, in_steps, first, last))
    for worker in prange(workers):
        first = _expand_unit_at(plan, cost * worker // workers)
        last = _expand_unit_at(plan, cost * (worker + 1) // workers)
        call_function(expand, (tag, plan, itemsize, first, last))
