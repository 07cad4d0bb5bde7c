"""From any start, the search ends at a load that is sustained, near one that is not."""

import pytest
from corun.runtime.sim.planning import NoLimitError, largest_rate
from corun.runtime.sim.workload_spec import MAX_RPS
from hypothesis import given
from hypothesis import strategies as st


@given(start_rps=st.floats(0.01, 100.0), limit=st.floats(0.01, 100.0), precision=st.floats(1.01, 1.3))
def test_it_finds_the_limit(start_rps: float, limit: float, precision: float) -> None:
    limit_rps = start_rps * limit
    search = largest_rate(start_rps, precision)
    rate_rps, tried = next(search), list[float]()
    while True:
        tried.append(rate_rps)
        try:
            rate_rps = search.send(rate_rps <= limit_rps)
        except StopIteration as end:
            found = end.value
            break
    assert found in tried and found <= limit_rps
    # Rates have four digits.
    assert min(one for one in tried if one > limit_rps) <= found * precision * 1.002
    assert len(tried) < 60


@pytest.mark.parametrize("is_held", [True, False])
def test_without_a_limit_it_ends(is_held: bool) -> None:
    search = largest_rate(1.0)
    next(search)
    with pytest.raises(NoLimitError, match="no limit"):  # noqa: PT012
        while True:
            search.send(is_held)


@pytest.mark.parametrize("start_rps", [0.7 * MAX_RPS, MAX_RPS, 1e4 * MAX_RPS, 1e3])
@pytest.mark.parametrize("limit_rps", [0.8 * MAX_RPS, 2 * MAX_RPS])
def test_no_rate_is_tried_that_a_workload_may_not_have(start_rps: float, limit_rps: float) -> None:
    search = largest_rate(start_rps)
    tried = [next(search)]
    try:
        while True:
            tried.append(search.send(tried[-1] <= limit_rps))
    except StopIteration as end:
        assert limit_rps < MAX_RPS and limit_rps / 1.03 < end.value <= limit_rps
    except NoLimitError:
        assert limit_rps > MAX_RPS and MAX_RPS in tried
    assert max(tried) <= MAX_RPS
