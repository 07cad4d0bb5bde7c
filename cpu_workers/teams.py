"""How many workers compute a job, and which part of it each one does. Pure.

A job is the rows of one (layer, input group) of one adapter. Its team may cut the tokens, at blocks
of 8: each part then reads all matrices. Members of one part of the tokens share the matrices: each
shrinks some ranks of all its tokens, they wait for each other, and each expands some columns. So
every value of A and B is read by one member of each part, and no output is a sum over workers: the
result does not depend on the team.

What cannot be cut: a tile of 8 ranks, as A is packed, and 16 columns, as B is; a part of fewer
than 64 columns is slow. An adapter of rank 8 on one target is shrunk by one member.

Source: Toppings, section 4.2, cuts tokens alone, with a budget per core.
"""

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..shm.region import RANKS_PER_TILE, Region

# Tokens that kernels compute at once. Cutting between blocks wastes tokens only at a job's end.
BLOCK_TOKENS = 8
_COLUMNS_PER_GROUP = 16
_GROUPS_AT_ONCE = 4
_STORE_RANKS = 8  # storing a column takes as long as so many ranks of it


class TeamPart(NamedTuple):
    """What one member computes: tokens; tiles of ranks and groups of columns of all targets."""

    first_token: int
    num_tokens: int
    tiles: tuple[int, int]  # [first, end)
    groups: tuple[int, int]


class TeamJob(NamedTuple):
    """A job for ``WorkerPool.submit``: the rows of one (layer, input group) of one adapter."""

    arena_offset: int  # of the region
    first_token: int  # of the input group's rows, which decides where x, y and h are
    num_tokens: int
    members: tuple[int, ...]  # workers, each once
    token_parts: int
    predicted_us: int
    is_crowded: bool = False  # other threads need the members' cores while these wait for x


class Team(NamedTuple):
    """``token_parts`` divides ``num_members``; ``seconds`` until all have finished."""

    num_members: int
    token_parts: int
    seconds: float


@dataclass(frozen=True, slots=True)
class JobModel:
    """How long workers take for a job, in seconds, for planner, executor and simulator.

    A member takes ``call_s``, the larger of reading its values of A and B and multiplying them with
    its tokens, and the time of x and y. A *width* is the number of values of A and B for each rank.
    """

    s_per_value: float = 0.0  # of A and B, read once
    s_per_product: float = 0.0  # of a value and a token
    s_per_row_value: float = 0.0  # of x and y: tokens times the width
    call_s: float = 0.0  # to begin and to finish
    member_s: float = 0.0  # for each further member: it has to see x, and to be seen
    share_s: float = 0.0  # if members share matrices: the wait between shrink and expand

    def part_s(self, ranks: int, width: float, num_tokens: int, sharers: int = 1) -> float:
        """Of the slowest member of ``sharers``, without waiting for others.

        ``ranks``: of all targets, in whole tiles. Each sharer reads all of x, and writes its y.
        """
        values = ranks * width * share_of(-(-ranks // RANKS_PER_TILE), sharers)
        values_s = values * max(self.s_per_value, self.s_per_product * num_tokens)
        return self.call_s + values_s + self.s_per_row_value * num_tokens * width * (1 + 1 / sharers) / 2

    def slowed(self, factor: float) -> "JobModel":
        """The same with times multiplied by ``factor``."""
        return JobModel(*(getattr(self, one.name) * factor for one in fields(self)))

    def team(self, ranks: int, width: float, num_tokens: int, num_workers: int) -> Team:
        """The team that finishes first; among equals the smallest. Arguments as ``part_s``."""
        assert ranks > 0 and num_tokens > 0 and num_workers > 0
        blocks = -(-num_tokens // BLOCK_TOKENS)
        best = Team(1, 1, self.part_s(ranks, width, num_tokens))
        for token_parts in range(1, min(num_workers, blocks) + 1):
            tokens = min(num_tokens, -(-blocks // token_parts) * BLOCK_TOKENS)
            for sharers in range(1, num_workers // token_parts + 1):
                members = token_parts * sharers
                seconds = self.part_s(ranks, width, tokens, sharers) + self.member_s * (members - 1)
                seconds += self.share_s if sharers > 1 else 0.0
                if seconds < best.seconds:
                    best = Team(members, token_parts, seconds)
        return best


def padded(rank: int) -> int:
    """A rank in whole tiles, as A is packed."""
    return -(-rank // RANKS_PER_TILE) * RANKS_PER_TILE


def share_of(num_tiles: int, sharers: int) -> float:
    """The part of the values of A and B, taken as equally many, that the slowest sharer reads."""
    return (-(-num_tiles // sharers) / num_tiles + 1 / sharers) / 2


def part_of(region: Region, num_tokens: int, num_members: int, token_parts: int, member: int) -> TeamPart:
    """The part of a member, counted from 0. A member may have no tokens, no ranks or no columns."""
    sharers = num_members // token_parts
    assert sharers * token_parts == num_members and 0 <= member < num_members
    token_part, sharer = divmod(member, sharers)
    blocks = -(-num_tokens // BLOCK_TOKENS)
    first, end = (
        min(num_tokens, blocks * part // token_parts * BLOCK_TOKENS) for part in (token_part, token_part + 1)
    )
    tiles = region.padded_ranks // RANKS_PER_TILE
    cuts = _group_cuts(region, sharers)
    return TeamPart(
        first,
        end - first,
        (tiles * sharer // sharers, tiles * (sharer + 1) // sharers),
        (cuts[sharer], cuts[sharer + 1]),
    )


def _group_cuts(region: Region, sharers: int) -> tuple[int, ...]:
    """Where the groups of columns are cut, so that all sharers take equally long."""
    ends, costs = [0], [0]
    for target in region.targets:
        left = target.padded_columns // _COLUMNS_PER_GROUP
        while left > 0:
            groups = min(left, _GROUPS_AT_ONCE)
            ends.append(ends[-1] + groups)
            costs.append(costs[-1] + groups * (target.rank + _STORE_RANKS))
            left -= groups
    return tuple(ends[bisect_left(costs, costs[-1] * cut / sharers)] for cut in range(sharers + 1))
