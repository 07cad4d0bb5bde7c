"""The search ends at a load that is borne, near one that is not, wherever it begins."""

import pytest
from corun.runtime.sim.capacity import NoLimitError, largest_rate
from hypothesis import given
from hypothesis import strategies as st


@given(
    start_rps=st.floats(0.01, 100.0), limit=st.floats(0.01, 100.0), precision=st.floats(1.01, 1.3)
)
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
