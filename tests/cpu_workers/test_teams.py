"""Teams: what members compute covers a job exactly, and the fastest team is chosen."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from corun.cpu_workers.deltas.numba_backend import NumbaDelta
from corun.cpu_workers.kernels.lora.regions import TargetShape, plan_packed
from corun.cpu_workers.kernels.simd.layout import BFLOAT16, COLUMNS_PER_GROUP, RANKS_PER_TILE
from corun.cpu_workers.teams import JobModel, Team, part_of
from hypothesis import given
from hypothesis import strategies as st
from support.deltas import POISON, DeltaCase, Workplace

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
        for ranges, total in ((tiles, region.padded_ranks // RANKS_PER_TILE), (columns, groups)):
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


MODEL = JobModel(s_per_value=1e-9, s_per_product=1e-10, s_per_row_value=1e-10, call_s=1e-6)
WIDTH = 8192.0


@pytest.mark.parametrize(
    ("num_tiles", "num_tokens", "num_workers", "costs", "expected"),
    [
        (24, 1, 4, {}, (4, 1)),
        (24, 8, 4, {}, (4, 1)),  # each reads a quarter; with the tokens cut, each reads everything
        (24, 1, 4, {"member_s": 1.0, "share_s": 1.0}, (1, 1)),  # a team costs more than it saves
        (1, 8, 4, {"member_s": 2e-5, "share_s": 1e-6}, (1, 1)),
        (8, 256, 2, {"share_s": 1e-2}, (2, 2)),  # waiting for each other is expensive: cut tokens
    ],
)
def test_the_fastest_team(
    num_tiles: int, num_tokens: int, num_workers: int, costs: dict[str, float], expected: tuple[int, int]
) -> None:
    model = replace(MODEL, **costs)
    team = model.team(8 * num_tiles, WIDTH, num_tokens, num_workers)
    assert (team.num_members, team.token_parts) == expected
    assert team.seconds <= model.part_s(8 * num_tiles, WIDTH, num_tokens)


def test_even_one_token_is_shared_by_many() -> None:
    team = MODEL.team(8 * 24, WIDTH, 1, 16)
    values_s = 8 * 24 * WIDTH * MODEL.s_per_value
    assert team.num_members == 16
    assert values_s / 16 < team.seconds < values_s / 12 + 1e-5  # 24 tiles, two for the slowest


def test_only_tokens_are_cut_if_matrices_cannot_be_shared() -> None:
    model = replace(MODEL, share_s=math.inf)
    assert model.team(8 * 24, WIDTH, 40, 8) == Team(5, 5, model.part_s(8 * 24, WIDTH, 8))
    assert model.team(8 * 24, WIDTH, 8, 8) == Team(1, 1, model.part_s(8 * 24, WIDTH, 8))


def test_a_part_takes_the_larger_of_reading_and_multiplying_and_the_time_of_its_rows() -> None:
    values, rows = 64 * WIDTH, WIDTH
    few, many = MODEL.part_s(64, WIDTH, 4), MODEL.part_s(64, WIDTH, 40)
    assert few == pytest.approx(1e-6 + values * 1e-9 + 4 * rows * 1e-10)
    assert many == pytest.approx(1e-6 + values * 40e-10 + 40 * rows * 1e-10)
    assert MODEL.part_s(64, WIDTH, 4, 8) == pytest.approx(1e-6 + values / 8 * 1e-9 + 4 * rows * 0.5625e-10)
    assert MODEL.part_s(60, WIDTH, 4, 8) > MODEL.part_s(60, WIDTH, 4, 9)


@given(
    st.integers(1, 100),
    st.integers(1, 300),
    st.integers(1, 20),
    st.floats(0, 1e-3),
    st.floats(0, 1e-3) | st.just(math.inf),
)
def test_a_team_is_possible_and_more_workers_are_never_slower(
    num_tiles: int, num_tokens: int, num_workers: int, member_s: float, share_s: float
) -> None:
    model = replace(MODEL, member_s=member_s, share_s=share_s)
    teams = [model.team(8 * num_tiles, WIDTH, num_tokens, n) for n in (num_workers, num_workers + 1)]
    for team, number in zip(teams, (num_workers, num_workers + 1), strict=True):
        assert 1 <= team.num_members <= number and team.num_members % team.token_parts == 0
    assert teams[1].seconds <= teams[0].seconds <= model.part_s(8 * num_tiles, WIDTH, num_tokens)
