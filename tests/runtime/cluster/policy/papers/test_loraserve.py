"""LoRAServe's placement, and its faults as printed."""

import math

import pytest
from corun.runtime.cluster.policy.papers.loraserve import (
    LoraServePaperPlacement,
    LoraServePlacement,
    server_budgets,
)
from corun.runtime.cluster.policy.placement.capacity_table import CapacityTable
from corun.runtime.cluster.policy.placement.plan import AdapterDemand, PlacementPlan, StoreServer
from corun.runtime.cluster.policy.reports import ServerId

# A server sustains 100 tokens/s of each rank, so load is demand / 100.
RANKS = (8, 16, 32, 64, 128)
CAPACITY = CapacityTable(dict.fromkeys(RANKS, 100.0))


def servers(number: int) -> list[StoreServer]:
    return [StoreServer(ServerId(f"s{i}"), 10**6) for i in range(number)]


def adapter(name: str, rank: int, load: float) -> AdapterDemand:
    return AdapterDemand(name=name, rank=rank, num_bytes=rank, tokens_per_s=100.0 * load)


def loads(plan: PlacementPlan, demand: list[AdapterDemand], number: int) -> list[float]:
    by_name = {one.name: one.tokens_per_s / 100.0 for one in demand}
    return [
        sum(by_name[name] * row.get(ServerId(f"s{i}"), 0.0) for name, row in plan.shares.items())
        for i in range(number)
    ]


@pytest.mark.parametrize(
    ("rank_loads", "number", "expected"),
    [
        ({8: 1.0, 128: 3.0}, 4, {8: 1, 128: 3}),
        (dict.fromkeys(RANKS, 0.8), 4, {8: 0, 16: 1, 32: 1, 64: 1, 128: 1}),
        (dict.fromkeys(RANKS, 1.0), 2, dict.fromkeys(RANKS, 0)),
        ({8: 0.1, 128: 0.9}, 1, {8: 0, 128: 1}),
    ],
)
def test_budgets(rank_loads: dict[int, float], number: int, expected: dict[int, int]) -> None:
    assert server_budgets(rank_loads, number) == expected


def test_ranks_are_apart_and_loads_even() -> None:
    demand = [
        *(adapter(f"large{i}", 128, 0.5) for i in range(4)),
        *(adapter(f"small{i}", 8, 0.25) for i in range(8)),
    ]
    plan = LoraServePlacement(CAPACITY).plan(demand, servers(4), {})
    assert loads(plan, demand, 4) == pytest.approx([1.0] * 4)
    ranks_at = {
        server_id: {one.rank for one in demand if server_id in plan.shares[one.name]}
        for server_id in ("s0", "s1", "s2", "s3")
    }
    assert sorted(map(len, ranks_at.values())) == [1, 1, 1, 1]


def test_an_adapter_with_much_demand_is_at_several_servers() -> None:
    demand = [adapter("hot", 64, 3.0), adapter("cold", 64, 1.0)]
    plan = LoraServePlacement(CAPACITY).plan(demand, servers(4), {})
    assert len(plan.shares["hot"]) == 3
    assert loads(plan, demand, 4) == pytest.approx([1.0] * 4)


def test_five_ranks_on_four_servers() -> None:
    """As printed there are five budgets of one, so that a rank has no server at all."""
    demand = [adapter(f"a{rank}", rank, 0.8) for rank in RANKS]
    ours = LoraServePlacement(CAPACITY).plan(demand, servers(4), {})
    assert max(loads(ours, demand, 4)) <= 1.6 + 1e-9
    assert all(math.fsum(row.values()) == pytest.approx(1.0) for row in ours.shares.values())
    # The smallest is a leftover. It goes to the largest rank, where the server has other adapters.
    printed = LoraServePaperPlacement(CAPACITY).plan(demand, servers(4), {})
    assert sorted(loads(printed, demand, 4)) == pytest.approx([0.8, 0.8, 0.8, 1.6])


def test_five_equal_ranks_on_two_servers() -> None:
    """As printed no rank has a budget, and all follow the largest rank to one server."""
    demand = [adapter(f"a{rank}", rank, 0.4) for rank in RANKS]
    ours = LoraServePlacement(CAPACITY).plan(demand, servers(2), {})
    assert max(loads(ours, demand, 2)) <= 1.2 + 1e-9
    printed = LoraServePaperPlacement(CAPACITY).plan(demand, servers(2), {})
    assert sorted(loads(printed, demand, 2)) == pytest.approx([0.0, 2.0])


def test_the_rest_of_a_share() -> None:
    """As printed it is lost where a budget was rounded down."""
    demand = [adapter("a", 128, 1.4), adapter("b", 8, 0.6)]
    ours = LoraServePlacement(CAPACITY).plan(demand, servers(2), {})
    assert math.fsum(ours.shares["a"].values()) == pytest.approx(1.0)
    assert loads(ours, demand, 2) == pytest.approx([1.0, 1.0])
    printed = LoraServePaperPlacement(CAPACITY).plan(demand, servers(2), {})
    assert math.fsum(printed.shares["a"].values()) == pytest.approx(1.0 / 1.4)


def test_without_any_demand_adapters_are_spread_by_bytes() -> None:
    demand = [adapter(f"a{i}", rank, 0.0) for i, rank in enumerate(RANKS * 4)]
    for placement in (LoraServePlacement(CAPACITY), LoraServePaperPlacement(CAPACITY)):
        plan = placement.plan(demand, servers(4), {})
        sizes = [sum(one.num_bytes for one in demand if f"s{i}" in plan.shares[one.name]) for i in range(4)]
        assert max(sizes) - min(sizes) <= 128
