import json

import pytest
from corun.cpu_workers.deltas.table import DeltaShape, DeltaTable, DeltaTime
from hypothesis import given
from hypothesis import strategies as st

SMALL, LARGE = 24, 192  # ranks of all targets
WIDTH = 6144


def _shape(num_tokens: int, rank_sum: int, width: int = WIDTH) -> DeltaShape:
    return DeltaShape(num_tokens, rank_sum, rank_sum * width)


def _table(**times_us: dict[tuple[int, int], float]) -> DeltaTable:
    return DeltaTable(
        tuple(
            DeltaTime(backend, _shape(*shape), time_us)
            for backend, points in times_us.items()
            for shape, time_us in points.items()
        )
    )


TABLE = _table(
    quick={(1, SMALL): 10.0, (64, SMALL): 136.0, (1, LARGE): 50.0, (64, LARGE): 2066.0},
    heavy={(1, SMALL): 90.0, (64, SMALL): 216.0, (1, LARGE): 100.0, (64, LARGE): 1108.0},
)


def test_the_fastest_is_chosen_by_shape() -> None:
    assert TABLE.best(_shape(64, SMALL)) == "quick"
    assert TABLE.best(_shape(1, LARGE)) == "quick"
    assert TABLE.best(_shape(64, LARGE)) == "heavy"
    # Between the measured tokens the lines cross where 32 (t - 1) + 50 = 16 (t - 1) + 100.
    assert TABLE.best(_shape(4, LARGE)) == "quick"
    assert TABLE.best(_shape(5, LARGE)) == "heavy"


def test_measured_shapes_take_what_was_measured() -> None:
    for point in TABLE.points:
        assert TABLE.predicted_us(point.backend, point.shape) == pytest.approx(point.time_us)


def test_times_between_and_beyond_the_measured_tokens() -> None:
    assert TABLE.predicted_us("quick", _shape(33, SMALL)) == pytest.approx(10 + 2 * 32)
    assert TABLE.predicted_us("quick", _shape(128, SMALL)) == pytest.approx(10 + 2 * 127)


def test_of_two_measured_shapes_that_are_equally_near_the_first_is_taken() -> None:
    low, high = {(1, 8): 10.0, (64, 8): 80.0}, {(1, 32): 20.0, (64, 32): 300.0}
    for first, second in ((low, high), (high, low)):
        table = _table(quick=first | second)
        (at_1_us, at_64_us), rank_sum = first.values(), next(iter(first))[1]
        for num_tokens, time_us in ((1, at_1_us), (64, at_64_us)):
            scaled_us = 10.0 + (time_us - 10.0) * 16 / rank_sum
            assert table.predicted_us("quick", _shape(num_tokens, 16)) == pytest.approx(scaled_us)
        assert table.best(_shape(1000, 16)) == "quick"
    # As near in their ranks as in their widths.
    wide = {DeltaShape(tokens, 8, 8 * 4 * WIDTH): 50.0 * tokens for tokens in (1, 64)}
    narrow = {DeltaShape(tokens, 32, 32 * WIDTH): 40.0 * tokens for tokens in (1, 64)}
    points = tuple(DeltaTime("quick", *point) for point in (wide | narrow).items())
    assert DeltaTable(points).predicted_us("quick", _shape(64, 16, 2 * WIDTH)) > 0.0


def test_times_grow_with_the_matrices() -> None:
    at_64 = TABLE.predicted_us("quick", _shape(64, LARGE))
    assert TABLE.predicted_us("quick", _shape(64, LARGE, 2 * WIDTH)) == pytest.approx(10 + 2 * (at_64 - 10))


def test_a_job_without_matrices_costs_a_call() -> None:
    assert TABLE.predicted_us("quick", DeltaShape(64, 0, 0)) == 10.0
    assert TABLE.best(DeltaShape(64, 0, 0)) == "quick"


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 768), st.integers(32, 60000))
def test_more_tokens_never_take_less_time(a: int, b: int, rank_sum: int, width: int) -> None:
    few, many = sorted((a, b))
    for backend in TABLE.backends:
        less = TABLE.predicted_us(backend, _shape(few, rank_sum, width))
        assert 0 < less <= TABLE.predicted_us(backend, _shape(many, rank_sum, width))


def test_noise_in_the_last_points_does_not_make_longer_jobs_shorter() -> None:
    table = _table(quick={(1, SMALL): 10.0, (16, SMALL): 60.0, (64, SMALL): 55.0})
    assert table.predicted_us("quick", _shape(1000, SMALL)) == 55.0


def test_a_table_survives_json() -> None:
    assert DeltaTable.from_json(json.loads(json.dumps(TABLE.to_json()))) == TABLE


def test_what_was_not_measured_has_no_time() -> None:
    with pytest.raises(KeyError, match="torch"):
        TABLE.predicted_us("torch", _shape(1, SMALL))


def test_back_ends_must_be_comparable() -> None:
    with pytest.raises(AssertionError):
        _table(quick={(1, SMALL): 10.0, (8, SMALL): 20.0}, heavy={(1, SMALL): 10.0})


def test_who_wins_nowhere_by_enough_is_left_out() -> None:
    assert TABLE.without_losers("quick", 0.1) == TABLE
    # 2066 / 1108 = 1.86: not twice as fast anywhere.
    assert TABLE.without_losers("quick", 1.0).backends == ("quick",)
