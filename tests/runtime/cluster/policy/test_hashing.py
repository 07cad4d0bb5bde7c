"""A key's order of servers is the order of its numbers, however they are computed."""

import pytest
from corun.runtime.cluster.policy.hashing import hashed_order, units_of
from corun.runtime.cluster.policy.reports import ServerId


@pytest.mark.parametrize("number", [0, 1, 2, 60])
def test_all_at_once_are_as_one_by_one(number: int) -> None:
    servers = [ServerId(f"server-{index:03d}") for index in range(number)]
    for key in (f"adapter-{index}" for index in range(50)):
        units = units_of(key, servers)
        assert hashed_order(key, servers) == sorted(servers, key=units.__getitem__)


def test_a_server_that_leaves_does_not_change_the_order_of_others() -> None:
    servers = [ServerId(f"server-{index:03d}") for index in range(20)]
    order = hashed_order("a", servers)
    assert hashed_order("a", servers[1:]) == [one for one in order if one != servers[0]]
    assert hashed_order("b", servers) != order
