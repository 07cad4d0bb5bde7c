"""Queues divided by recent requests: their number, cutoffs and quotas."""

import math

import numpy as np
import pytest
from corun.runtime.plan import AdapterId, RequestId
from corun.runtime.request import Request
from corun.runtime.scheduler.papers.chameleon.cuts import (
    OUTPUT_ONLY_WEIGHTS,
    PAPER_WEIGHTS,
    Floats,
    QueueCutter,
    SizeWeights,
)
from corun.runtime.scheduler.papers.chameleon.recent import Column, RecentRequests
from support.scheduling import make_request

Sizes = tuple[int, int, int]  # prompt, predicted output, adapter bytes
SMALL, LARGE, HUGE = (10, 10, 100), (100, 100, 1000), (200, 200, 2000)


def request_of(sizes: Sizes, request_id: int = 1) -> Request:
    prompt, output, num_bytes = sizes
    request = make_request(request_id, prompt=prompt, adapter_id=AdapterId(1), adapter_bytes=num_bytes)
    request.num_predicted_output_tokens = output
    return request


def rows_of(sizes: list[Sizes], *, duration_s: float = math.nan) -> Floats:
    """Requests arrive one a second, and take a second on an idle engine."""
    return np.array(
        [
            (prompt, output, num_bytes, prompt + output + num_bytes // 10, index, 1.0, duration_s)
            for index, (prompt, output, num_bytes) in enumerate(sizes)
        ]
    )


def make_cutter(
    num_queues: int | None = None,
    *,
    total: int = 10_000,
    weights: SizeWeights = PAPER_WEIGHTS,
    is_as_printed: bool = False,
) -> QueueCutter:
    return QueueCutter(total, weights, num_queues, is_as_printed=is_as_printed)


def test_sizes_are_weighted_by_99th_percentiles_and_terms_end_at_one() -> None:
    """HUGE is one in a thousand: it is as large as LARGE. A base request has no adapter term."""
    queues = make_cutter().cut(rows_of([SMALL] * 500 + [LARGE] * 499 + [HUGE]))
    assert queues.factors == pytest.approx((1 / 100, 1 / 100, 1 / 1000))
    small, large = 0.3 * 0.1 + 0.5 * 0.1 + 0.2 * 0.1, 1.0
    assert queues.cutoffs == pytest.approx([(small + large) / 2], rel=1e-3)
    assert [queues.queue_of(request_of(one)) for one in (SMALL, LARGE, HUGE)] == [0, 1, 1]
    assert queues.queue_of(request_of((100, 10, 0))) == 0  # 0.3 + 0.05
    assert queues.queue_of(request_of((10, 100, 0))) == 0  # 0.03 + 0.5
    assert queues.queue_of(request_of((100, 100, 0))) == 1


def test_output_only_looks_at_nothing_else() -> None:
    queues = make_cutter(weights=OUTPUT_ONLY_WEIGHTS).cut(rows_of([SMALL] * 50 + [LARGE] * 50))
    assert queues.queue_of(request_of((100, 10, 1000))) == 0
    assert queues.queue_of(request_of((10, 100, 0))) == 1


def test_a_number_of_queues_has_to_win_twice() -> None:
    cutter = make_cutter()
    same, different = rows_of([SMALL] * 100), rows_of([SMALL] * 50 + [LARGE] * 50)
    assert [len(cutter.cut(rows).cutoffs) for rows in (same, different, same)] == [0, 0, 0]
    assert [len(cutter.cut(rows).cutoffs) for rows in (different, different)] == [0, 1]


@pytest.mark.parametrize("num_queues", [1, 2, 3, 4])
def test_a_fixed_number_is_kept_where_sizes_allow_it(num_queues: int) -> None:
    spread = rows_of([(size, size, 10 * size) for size in range(1, 101)])
    assert len(make_cutter(num_queues).cut(spread).cutoffs) == num_queues - 1
    two = rows_of([SMALL, LARGE] * 50)
    assert len(make_cutter(num_queues).cut(two).cutoffs) == min(2, num_queues) - 1


def test_as_printed_there_are_as_many_queues_as_may_be() -> None:
    rows = rows_of([SMALL] * 50 + [LARGE] * 50 + [HUGE] * 50 + [(11, 10, 100)])
    assert len(make_cutter(is_as_printed=True).cut(rows).cutoffs) == 3
    assert len(make_cutter().cut(rows).cutoffs) < 3


def test_queues_that_cannot_hold_their_largest_together_are_fewer() -> None:
    """SMALL needs 30 tokens and LARGE 300."""
    rows = rows_of([SMALL] * 50 + [LARGE] * 50)
    assert len(make_cutter(total=330).cut(rows).cutoffs) == 1
    assert make_cutter(total=329).cut(rows).quotas.tokens == (329,)
    assert len(make_cutter(total=329, is_as_printed=True).cut(rows).cutoffs) == 1


def test_quotas_follow_arrivals_sizes_and_times() -> None:
    """Tok_min = S D (1/SLO + lambda), and the rest in proportion.

    Of 100 requests in 99 s half are of either size, S is 30 and 300, D = 2 s where all took twice
    as long as on an idle engine, SLO = 5 s.
    """
    rows = rows_of([SMALL, LARGE] * 50, duration_s=2.0)
    needs = [size * 2.0 * (1 / 5 + 50 / 99) for size in (30, 300)]
    quotas = make_cutter(total=10_000).cut(rows).quotas
    assert quotas.tokens == pytest.approx([10_000 * need / sum(needs) for need in needs], abs=1)
    assert quotas.is_feasible
    assert not make_cutter(total=400).cut(rows).quotas.is_feasible


@pytest.mark.parametrize(("duration_s", "believed_s"), [(0.2, 1.0), (2.0, 2.0), (50.0, 3.0)])
def test_times_under_load_are_believed_within_bounds(duration_s: float, believed_s: float) -> None:
    """The queue of LARGE has too few ended requests, so the factor of all queues counts."""
    rows = rows_of([SMALL] * 60 + [LARGE] * 40)
    rows[:60, Column.DURATION_S] = duration_s
    rows[:, Column.ARRIVAL_S] /= 10
    need = 300 * believed_s * (1 / 5 + 40 / 9.9) + 30 * believed_s * (1 / 5 + 60 / 9.9)
    for total, is_feasible in ((math.ceil(need) + 1, True), (math.floor(need) - 1, False)):
        assert make_cutter(total=total).cut(rows).quotas.is_feasible == is_feasible


def test_the_window_is_the_last_minutes_but_never_few_requests() -> None:
    recent = RecentRequests()
    for index in range(1000):
        request = request_of(SMALL, index)
        recent.arrived(request, size_tokens=30, unloaded_s=1.0, now_s=float(index))
        if index % 2:
            recent.ended(RequestId(index), 2.0)
    assert recent.window(500.0)[:, Column.ARRIVAL_S].tolist() == list(range(500, 1000))
    few = recent.window(990.0)
    assert few[:, Column.ARRIVAL_S].tolist() == list(range(744, 1000))
    assert np.isnan(few[::2, Column.DURATION_S]).all()
    assert (few[1::2, Column.DURATION_S] == 2.0).all()


def test_the_window_forgets_the_oldest_and_late_ends_of_theirs() -> None:
    recent = RecentRequests()
    for index in range(5000):
        recent.arrived(request_of(SMALL, index), size_tokens=30, unloaded_s=1.0, now_s=float(index))
    recent.ended(RequestId(3), 2.0)
    recent.ended(RequestId(4000), None)  # it was not running
    rows = recent.window(0.0)
    assert rows[:, Column.ARRIVAL_S].tolist() == list(range(904, 5000))
    assert np.isnan(rows[:, Column.DURATION_S]).all()
