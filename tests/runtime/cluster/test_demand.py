"""Steps of a placement, with minimum copies."""

from collections.abc import Sequence

import pytest
from corun.runtime.cluster.demand import PlacementSteps, names_at
from corun.runtime.cluster.policy.placement.plan import (
    AdapterDemand,
    PlacementPlan,
    PlacementPolicy,
    StoreServer,
)
from corun.runtime.cluster.policy.reports import ServerId, Shares
from corun.runtime.errors import ConfigError

_SERVERS = [StoreServer(ServerId(name), 10) for name in "xyz"]


class OnOne(PlacementPolicy):
    """Puts all adapters on one server, and records the expected demand."""

    def __init__(self) -> None:
        self.expected: list[float] = []

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        self.expected = [one.tokens_per_s for one in demand]
        return PlacementPlan({one.name: {ServerId("y"): 1.0} for one in demand})


def test_tokens_of_a_step_are_expected_of_the_next() -> None:
    policy = OnOne()
    steps = PlacementSteps(policy)
    steps.record("a", 60, 40)
    steps.end_step(10.0)
    steps.plan([steps.demand_of(name, 8, 1) for name in "ab"], _SERVERS)
    assert policy.expected == [10.0, 0.0]
    steps.remove("a")
    assert steps.demand_of("a", 8, 1).tokens_per_s == 0.0


def test_as_many_copies_as_were_asked_for_stay_where_they_are() -> None:
    steps = PlacementSteps(OnOne(), min_copies={"a": 2, "gone": 3}, shares={"a": {ServerId("z"): 1.0}})
    demand = [steps.demand_of(name, 8, 1) for name in "ab"]
    shares = steps.plan(demand, _SERVERS)
    assert shares == {"a": {"y": 0.5, "z": 0.5}, "b": {"y": 1.0}}
    assert names_at(shares) == {"y": {"a", "b"}, "z": {"a"}}
    assert steps.plan(demand, _SERVERS) == shares


def test_more_copies_than_engines_are_refused() -> None:
    steps = PlacementSteps(OnOne(), min_copies={"a": 4})
    with pytest.raises(ConfigError, match="--min-copies a=4 is more than the 3 engines"):
        steps.plan([steps.demand_of("a", 8, 1)], _SERVERS)
