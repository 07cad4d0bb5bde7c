"""Teams: what members compute covers a job exactly, and the fastest team is chosen."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from corun.cpu_workers.deltas.numba_backend import NumbaDelta
from corun.cpu_workers.kernels.lora.regions import TargetShape, plan_packed
from corun.cpu_workers.kernels.simd.layout import BFLOAT16, COLUMNS_PER_GROUP
from corun.cpu_workers.teams import Team, TeamCosts, choose_team, part_of, tiles_of
from hypothesis import given
from hypothesis import strategies as st
from support.deltas import POISON, DeltaCase, Workplace

FREE = TeamCosts(0.0, 0.0)

targets = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 300)), min_size=1, max_size=4)


@given(targets, st.integers(1, 100), st.integers(1, 6), st.integers(1, 4))
def test_every_value_is_computed_by_one_member(
    shapes: list[tuple[int, int]], num_tokens: int, sharers: int, token_parts: int
) -> None:
    region = plan_packed(64, 2, [TargetShape(rank, columns, 1.0) for rank, columns in shapes])
    members = sharers * token_parts
    parts = [part_of(region, num_tokens, members, token_parts, member) for member in range(members)]
    tokens = [(part.first_token, part.first_token + part.num_tokens) for part in parts[::sharers]]
    assert tokens[0][0] == 0 and tokens[-1][1] == num_tokens
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(tokens))
    groups = region.y_columns // COLUMNS_PER_GROUP
    for start in range(0, members, sharers):
        sharing = parts[start : start + sharers]
        assert {part[:2] for part in sharing} == {sharing[0][:2]}
        tiles, columns = [part.tiles for part in sharing], [part.groups for part in sharing]
        for ranges, total in ((tiles, tiles_of(region.padded_ranks)), (columns, groups)):
            assert ranges[0][0] == 0 and ranges[-1][1] == total
            assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
            assert all(first <= end for first, end in ranges)


def test_sharers_get_equal_work() -> None:
    """Of gate and up with equal ranks; a target without a rank costs little."""
    region = plan_packed(4096, 2, [TargetShape(16, 14336, 1.0)] * 2)
    parts = [part_of(region, 8, 4, 1, member) for member in range(4)]
    assert {part.tiles[1] - part.tiles[0] for part in parts} == {1}
    assert {part.groups[1] - part.groups[0] for part in parts} == {448}
    region = plan_packed(64, 2, [TargetShape(64, 1024, 1.0), TargetShape(0, 1024, 1.0)])
    first, second = (part_of(region, 8, 2, 1, member) for member in range(2))
    assert 32 <= first.groups[1] < 48 and second.groups[1] == 128


CASES = [
    DeltaCase(1, 64, (48, 16), (8, 4)),
    DeltaCase(7, 48, (80, 48, 16), (5, 0, 70)),
    DeltaCase(33, 100, (200, 33), (64, 16)),
    DeltaCase(70, 512, (130,), (24,)),
]


@pytest.mark.parametrize("tag", [None, BFLOAT16])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("members", "token_parts"), [(2, 1), (3, 3), (4, 2), (5, 1)])
def test_results_do_not_depend_on_the_team(
    case: DeltaCase, members: int, token_parts: int, tag: np.generic | None
) -> None:
    place, backend = Workplace(case), NumbaDelta(tag=tag)
    backend.compute(place.job())
    place.check()
    alone = place.y.copy()
    place.y[:] = POISON
    _compute_by_team(place, backend, members, token_parts)
    assert (place.y == alone).all()


def _compute_by_team(place: Workplace, backend: NumbaDelta, members: int, token_parts: int) -> None:
    """One member after the other, all shrinks before the expands."""
    region, num_tokens = place.region, place.case.num_tokens
    h = np.full((num_tokens, region.padded_ranks), np.nan, np.float32)
    parts = [part_of(region, num_tokens, members, token_parts, member) for member in range(members)]
    for part in parts:
        job = place.slice(part.first_token, part.num_tokens)
        backend.shrink(job, h[part.first_token :].ctypes.data, part.tiles)
    assert not np.isnan(h).any()
    for part in parts:
        job = place.slice(part.first_token, part.num_tokens)
        backend.expand(job, h[part.first_token :].ctypes.data, part.groups)


def _seconds(tokens: int) -> float:
    return 1e-4 + 1e-5 * tokens


@pytest.mark.parametrize(
    ("num_tiles", "num_tokens", "num_workers", "costs", "expected"),
    [
        (24, 1, 4, FREE, (4, 1)),
        (24, 64, 4, FREE, (4, 1)),  # each reads a quarter; with the tokens cut, each reads everything
        (24, 1, 4, TeamCosts(1.0, 1.0), (1, 1)),  # a team costs more than it saves
        (1, 8, 4, TeamCosts(2e-5, 2e-5), (2, 1)),
        (8, 256, 2, TeamCosts(0.0, 1e-2), (2, 2)),  # waiting for each other is expensive: cut tokens
    ],
)
def test_the_fastest_team(
    num_tiles: int, num_tokens: int, num_workers: int, costs: TeamCosts, expected: tuple[int, int]
) -> None:
    team = choose_team(_seconds, num_tiles, num_tokens, num_workers, costs)
    assert (team.num_members, team.token_parts) == expected
    assert team.seconds <= _seconds(num_tokens)


def test_even_one_token_is_shared_by_many() -> None:
    team = choose_team(_seconds, 24, 1, 16, FREE)
    assert team.num_members == 16
    assert _seconds(1) / 16 < team.seconds < _seconds(1) / 12  # 24 tiles, two for the slowest


def test_only_tokens_are_cut_for_back_ends_that_share_nothing() -> None:
    team = choose_team(_seconds, 24, 40, 8, FREE, shares=False)
    assert team == Team(5, 5, _seconds(8))
    assert choose_team(_seconds, 24, 8, 8, FREE, shares=False) == Team(1, 1, _seconds(8))


@given(
    st.integers(1, 100),
    st.integers(1, 300),
    st.integers(1, 20),
    st.floats(0, 1e-3),
    st.floats(0, 1e-3),
    st.booleans(),
)
def test_a_team_is_possible_and_more_workers_are_never_slower(
    num_tiles: int, num_tokens: int, num_workers: int, member_s: float, share_s: float, shares: bool
) -> None:
    costs = TeamCosts(member_s, share_s)
    teams: Sequence[Team] = [
        choose_team(_seconds, num_tiles, num_tokens, number, costs, shares=shares)
        for number in (num_workers, num_workers + 1)
    ]
    for team, number in zip(teams, (num_workers, num_workers + 1), strict=True):
        assert 1 <= team.num_members <= number and team.num_members % team.token_parts == 0
    assert teams[1].seconds <= teams[0].seconds <= _seconds(num_tokens)
