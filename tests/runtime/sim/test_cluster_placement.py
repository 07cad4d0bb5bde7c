"""Files follow a plan, and plans follow demand."""

from collections.abc import Sequence

from corun.runtime.cluster.policy.placement.plan import (
    AdapterDemand,
    PlacementPlan,
    PlacementPolicy,
    StoreServer,
)
from corun.runtime.cluster.policy.reports import ServerId, Shares
from corun.runtime.sim.cluster import SimulatedPlacement, replay_cluster
from corun.runtime.sim.cluster_spec import ClusterSpec, ServerLife
from corun.runtime.sim.engine import SimulationOptions
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.workloads import make_workload


class Noting(PlacementPolicy):
    """Puts all on the first server, and records its arguments."""

    def __init__(self) -> None:
        self.told: list[list[float]] = []

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        self.told.append([one.tokens_per_s for one in demand])
        return PlacementPlan({one.name: {servers[0].server_id: 1.0} for one in demand})


def test_it_plans_by_what_came_in_the_steps_before() -> None:
    policy = Noting()
    placement = SimulatedPlacement(
        policy, {"a": 8, "b": 8}, 1, {"a": 6.0, "b": 6.0}, store_bytes=10, every_s=2.0
    )
    ids = [ServerId("x"), ServerId("y")]
    assert placement.step(ids) == {"a": {"x": 1.0}, "b": {"x": 1.0}}
    placement.record("a", 10, 2)
    placement.step(ids)
    placement.step(ids)
    assert policy.told[0] == [6.0, 6.0]  # the expected demand before the first request
    (a, b), (later, _) = policy.told[1:]
    assert b < 6.0 and later < a


def test_with_a_placement_servers_keep_the_files_that_are_planned() -> None:
    requests = make_workload("prod50", rate_rps=20.0, num_requests=200, seed=2, traces=None)
    most = {}
    for name in ("everywhere", "contiguous", "sticky", None):
        spec = ClusterSpec(
            servers=(ServerLife(),) * 4,
            router="loraserve",
            placement=name,
            placement_every_s=2.0,
            capacity=((128, 4000.0),),
        )
        replayed = replay_cluster(MACHINES["tp4-llama7b-exact"], requests, SimulationOptions(), spec)
        assert all(record.finish_reason in ("stop", "length") for record in replayed.records)
        most[name] = max(one.most_files for one in replayed.stores)
    assert most[None] == most["everywhere"] == 50
    assert most["contiguous"] in (12, 13)
    assert 13 <= most["sticky"] <= 50
