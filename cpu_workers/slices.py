"""Distributes the cold tokens of a step over cores. Pure.

One core serves ``c`` tokens in the available time (the per-core budget of the profile), so L tokens
of a step need ceil(L / c) cores. Source: Toppings, section 4.2, which cuts each request on its own
and describes neither several requests nor more slices than cores. Here all cold tokens of the step
are concatenated and divided equally, across requests. Tokens beyond the cores' budget are cut into
slices of at most c that wait in order.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Tokens that kernels compute at once. Cutting between blocks wastes tokens only at a request's end.
BLOCK_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Slice:
    """Contiguous tokens of one request, and so of one adapter, for one core.

    ``request``: index in the arguments. ``first_token``: counted from that request's first.
    ``core``: counted from 0; the slices of a core are computed in list order.
    """

    request: int
    first_token: int
    num_tokens: int
    core: int


class SliceJob(NamedTuple):
    """A slice for ``WorkerPool.submit``: of one (layer, input group) of one adapter."""

    arena_offset: int  # of the region
    num_tokens: int
    in_columns: int  # width of x in the ring, padded for the kernels
    out_columns: int  # width of y, all targets of the group together
    predicted_us: int


def split_tokens(
    request_tokens: Sequence[int], *, num_cores: int, tokens_per_core: int, block_tokens: int = BLOCK_TOKENS
) -> tuple[Slice, ...]:
    """Divide the tokens of all requests among cores: every token once, core by core.

    ``request_tokens`` [requests]: tokens of each in this step, in order; 0 gives no slice. Slices
    start at multiples of ``block_tokens`` and have at most ``tokens_per_core`` (c, rounded to whole
    blocks, at least one). With L tokens, ceil(L / c) cores get work if there are as many, otherwise
    all; their shares differ by at most one block. If slices must wait, each core has equally many
    shares of at most c tokens. A share that spans several requests gives a slice of each.
    """
    assert num_cores > 0 and tokens_per_core > 0 and block_tokens > 0
    assert all(tokens >= 0 for tokens in request_tokens), request_tokens
    request_blocks = [-(-tokens // block_tokens) for tokens in request_tokens]
    num_blocks = sum(request_blocks)
    num_shares = -(-num_blocks // max(1, tokens_per_core // block_tokens))
    shares_per_core = max(1, -(-num_shares // num_cores))
    if num_shares > num_cores:
        num_shares = shares_per_core * num_cores

    slices = []
    first_block = 0  # of this request, in the concatenated blocks
    for request, (tokens, blocks) in enumerate(zip(request_tokens, request_blocks, strict=True)):
        last_block = first_block + blocks
        for start, end, share in _cut(first_block, last_block, num_blocks, num_shares):
            first_token = (start - first_block) * block_tokens
            end_token = min(tokens, (end - first_block) * block_tokens)
            core = share // shares_per_core
            slices.append(Slice(request, first_token, end_token - first_token, core))
        first_block = last_block
    return tuple(slices)


def max_tokens(
    *,
    num_cores: int,
    tokens_per_core: int,
    max_requests: int,
    max_slices_per_core: int,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """The most tokens of up to ``max_requests`` requests that give no core too many slices.

    Holds for any division among the requests. 0 = one token each may be too much.
    """
    blocks_per_share = max(1, tokens_per_core // block_tokens)
    # A share of one block belongs to one request; others may be cut at each end of a request, all
    # of them on one core.
    num_cuts = max_requests - 1 if blocks_per_share > 1 else 0
    num_blocks = num_cores * blocks_per_share * max(0, max_slices_per_core - num_cuts)
    # All requests but one may fill their last block with one token.
    return max(0, num_blocks * block_tokens - (max_requests - 1) * (block_tokens - 1))


def _cut(first_block: int, last_block: int, num_blocks: int, num_shares: int) -> list[tuple[int, int, int]]:
    """Parts of [first_block, last_block) that belong to one share each: start, end, share.

    Share k is [k * num_blocks // num_shares, (k + 1) * num_blocks // num_shares).
    """
    if first_block == last_block:
        return []
    # The last share that starts at the block or before it.
    first_share = ((first_block + 1) * num_shares - 1) // num_blocks
    last_share = (last_block * num_shares - 1) // num_blocks
    inner = [share * num_blocks // num_shares for share in range(first_share + 1, last_share + 1)]
    bounds = itertools.pairwise([first_block, *inner, last_block])
    # Rounded up to a multiple of the cores, there may be more shares than blocks: some are empty.
    return [(start, end, first_share + index) for index, (start, end) in enumerate(bounds) if start < end]
