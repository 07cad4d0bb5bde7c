"""Copies are added at once, dropped late, and kept in place."""

from corun.runtime.cluster.policy.placement.capacity_table import CapacityTable
from corun.runtime.cluster.policy.placement.plan import AdapterDemand, StoreServer
from corun.runtime.cluster.policy.placement.sticky import StickyPlacement
from corun.runtime.cluster.policy.reports import ServerId

CAPACITY = CapacityTable({64: 100.0})
SERVERS = [StoreServer(ServerId(f"s{i}"), 10**6) for i in range(6)]


def adapter(name: str, load: float) -> AdapterDemand:
    return AdapterDemand(name=name, rank=64, num_bytes=64, tokens_per_s=100.0 * load)


def test_a_copy_for_each_part_of_a_server() -> None:
    demand = [adapter("a", 1.3), adapter("b", 0.6), adapter("c", 0.0), adapter("d", 99.0)]
    shares = StickyPlacement(CAPACITY).plan(demand, SERVERS, {}).shares
    assert [len(shares[name]) for name in "abcd"] == [3, 1, 1, 6]
    assert set(shares["a"].values()) == {1 / 3}


def test_fewer_copies_only_after_two_steps() -> None:
    placement = StickyPlacement(CAPACITY)
    shares = placement.plan([adapter("a", 1.3)], SERVERS, {}).shares
    homes = set(shares["a"])
    for load, number in ((0.1, 3), (1.3, 3), (0.1, 3), (0.1, 1), (1.0, 2)):
        shares = placement.plan([adapter("a", load)], SERVERS, shares).shares
        assert len(shares["a"]) == number, load
        if number <= 3 and load != 1.0:
            assert set(shares["a"]) <= homes


def test_a_lost_server_is_replaced_and_other_copies_stay() -> None:
    demand = [adapter(f"a{i}", 0.1 * i) for i in range(12)]
    placement = StickyPlacement(CAPACITY)
    before = placement.plan(demand, SERVERS, {}).shares
    after = placement.plan(demand, SERVERS[1:], before)
    lost = {name for name, row in before.items() if "s0" in row}
    assert {one.adapter_name for one in after.copies} == lost and not after.drops


def test_no_server_has_many_more_than_others() -> None:
    """Also if demand is very unequal."""
    demand = [adapter(f"a{i:03}", 3.0 / (i + 1)) for i in range(120)]
    shares = StickyPlacement(CAPACITY).plan(demand, SERVERS, {}).shares
    largest = max(sum(s.server_id in row for row in shares.values()) for s in SERVERS)
    assert largest <= 4 * len(demand) / len(SERVERS)
