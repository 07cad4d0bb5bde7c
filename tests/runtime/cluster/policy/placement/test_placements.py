"""The contract of all placements."""

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
from corun.runtime.cluster.policy.papers.loraserve import least_copied
from corun.runtime.cluster.policy.placement.capacity_table import CapacityTable
from corun.runtime.cluster.policy.placement.plan import (
    AdapterDemand,
    PlacementPlan,
    PlacementPolicy,
    StoreServer,
)
from corun.runtime.cluster.policy.placement.registry import (
    PLACEMENTS,
    PlacementFacts,
    check_live_placement,
    make_placement,
)
from corun.runtime.cluster.policy.reports import ServerId
from corun.runtime.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st

CAPACITY = CapacityTable({8: 4000.0, 64: 2000.0, 128: 1000.0})
AS_PRINTED = "loraserve-paper"
OURS = [name for name in PLACEMENTS if name != AS_PRINTED]


def make(name: str) -> PlacementPolicy:
    return make_placement(name, PlacementFacts(capacity=CAPACITY, seed=3))


def servers_of(*store_bytes: int) -> list[StoreServer]:
    return [StoreServer(ServerId(f"s{i:02}"), size) for i, size in enumerate(store_bytes)]


@st.composite
def demands(draw: st.DrawFn) -> list[AdapterDemand]:
    ranks = draw(st.lists(st.sampled_from([4, 8, 64, 100, 128, 256]), min_size=1, max_size=20))
    rates = st.sampled_from([0.0, 1e-9, 1.0, 300.0, 5000.0]) | st.floats(0.0, 1e4)
    return [
        AdapterDemand(name=f"a{i:02}", rank=rank, num_bytes=rank, tokens_per_s=draw(rates))
        for i, rank in enumerate(ranks)
    ]


def held_bytes(plan: PlacementPlan, demand: Sequence[AdapterDemand]) -> dict[str, int]:
    sizes = {one.name: one.num_bytes for one in demand}
    held: dict[str, int] = {}
    for name, row in plan.shares.items():
        for server_id in row:
            held[server_id] = held.get(server_id, 0) + sizes[name]
    return held


def check(
    plan: PlacementPlan,
    demand: Sequence[AdapterDemand],
    servers: Sequence[StoreServer],
    previous: Mapping[str, Mapping[ServerId, float]],
) -> None:
    stores = {server.server_id: server.store_bytes for server in servers}
    assert plan.shares.keys() == {one.name for one in demand}
    for row in plan.shares.values():
        assert row and row.keys() <= stores.keys()
        assert math.fsum(row.values()) == pytest.approx(1.0)
        assert all(0.0 < share <= 1.0 + 1e-9 for share in row.values())
    for server_id, size in held_bytes(plan, demand).items():
        assert size <= stores[ServerId(server_id)]
    copied = {(one.adapter_name, one.server_id) for one in plan.copies}
    dropped = {(one.adapter_name, one.server_id) for one in plan.drops}
    had = {(name, one) for name, row in previous.items() for one in row if one in stores}
    has = {(name, one) for name, row in plan.shares.items() for one in row}
    assert copied == has - had and dropped == had - has


@pytest.mark.parametrize("name", OURS)
@given(demand=demands(), later=demands(), num_servers=st.integers(1, 6), data=st.data())
def test_contract(
    name: str, demand: list[AdapterDemand], later: list[AdapterDemand], num_servers: int, data: st.DataObject
) -> None:
    """Each adapter has a server, stores are not exceeded, and equal demand moves nothing."""
    room = 6000 if name != "everywhere" else 20_000
    servers = servers_of(*(room + 100 * i for i in range(num_servers)))
    placement = make(name)
    first = placement.plan(demand, servers, {})
    check(first, demand, servers, {})
    again = placement.plan(demand, servers, first.shares)
    check(again, demand, servers, first.shares)
    assert again.copies == again.drops == ()
    assert make(name).plan(demand, servers, {}) == first
    # Other adapters, other demand, and a server less.
    alive = servers[data.draw(st.integers(0, num_servers - 1)) :]
    before = {name: row for name, row in first.shares.items() if name in {one.name for one in later}}
    check(placement.plan(later, alive, before), later, alive, before)


@pytest.mark.parametrize("name", OURS)
def test_more_than_there_is_room_for(name: str) -> None:
    demand = [AdapterDemand(name=f"a{i}", rank=8, num_bytes=60, tokens_per_s=float(i)) for i in range(3)]
    with pytest.raises(ConfigError, match=r"60 bytes, and no server's store has so much room"):
        make(name).plan(demand, servers_of(100, 100), {})


@pytest.mark.parametrize("name", OURS)
def test_a_small_server_gets_what_it_can_hold(name: str) -> None:
    demand = [AdapterDemand(name=f"a{i}", rank=8, num_bytes=50, tokens_per_s=100.0) for i in range(4)]
    plan = make(name).plan(demand, servers_of(60, 1000), {})
    check(plan, demand, servers_of(60, 1000), {})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--placement is 'stick'.*did you mean 'sticky'"):
        make("stick")
    with pytest.raises(ConfigError, match="--placement loraserve needs --operating-points FILE"):
        check_live_placement("loraserve", has_points=False)
    check_live_placement("loraserve", has_points=True)
    with pytest.raises(ConfigError, match="operating capacities must be above 0"):
        CapacityTable({8: 0.0})


@given(
    parts=st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.5, 1.0]), max_size=4),
        min_size=1,
        max_size=4,
    ),
    previous=st.dictionaries(
        st.sampled_from("abcdef"),
        st.dictionaries(st.sampled_from(["s00", "s01", "s02", "s03"]), st.just(1.0), max_size=3),
    ),
)
def test_the_least_is_copied(
    parts: list[dict[str, float]], previous: dict[str, dict[ServerId, float]]
) -> None:
    """Compare with all permutations."""
    sizes = {name: 10 ** (i % 3) for i, name in enumerate("abcdef")}
    servers = servers_of(*([10**6] * len(parts)))

    def copied(homes: Sequence[ServerId]) -> int:
        return sum(
            sizes[name]
            for part, home in zip(parts, homes, strict=True)
            for name in part
            if home not in previous.get(name, {})
        )

    homes = least_copied(parts, servers, previous, sizes)
    ids = [server.server_id for server in servers]
    assert sorted(homes) == ids
    assert copied(homes) == min(copied(order) for order in itertools.permutations(ids))
