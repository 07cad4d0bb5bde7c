"""Many servers on one clock: one equals a replay, two are computed by hand, no request is lost."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from corun.runtime.cluster.policy.registry import ROUTERS, RouterFacts
from corun.runtime.cluster.policy.reports import RouteRequest, ServerId, ServerReport
from corun.runtime.cluster.policy.router import Router
from corun.runtime.cluster.policy.views import ServerView
from corun.runtime.errors import ConfigError
from corun.runtime.sim.cluster import replay_cluster
from corun.runtime.sim.cluster_log import ClusterReplayed
from corun.runtime.sim.cluster_server import ClusterServer
from corun.runtime.sim.cluster_spec import ClusterSpec, ServerLife
from corun.runtime.sim.engine import SimulationOptions, simulate
from corun.runtime.sim.figures import figures_of
from corun.runtime.sim.machines import Factors, SimulatedMachine
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.workloads import Workload, WorkloadRequest, make_workload

A40 = MACHINES["a40-llama7b"]
LIFE = ServerLife()
# Of rank 8: 12 MiB, for which the first layer waits.
FILE_BYTES = 12 * 2**20
LOAD_S = FILE_BYTES / 12e9 + 1e-3


def workload(*requests: tuple[float, int, int, int]) -> Workload:
    """Of (arrival, adapter, prompt, output)."""
    return Workload(tuple(WorkloadRequest(*one) for one in requests), (8, 8, 8), 50)


def prefill_s(num_tokens: int) -> float:
    """A step with one prompt of at most 512 tokens."""
    keys_s = 7e-9 * num_tokens * (num_tokens + 1) / 2
    return 12e-3 + 0.05e-3 + num_tokens * (0.2e-3 + 1.2e-6 * 8) + keys_s


def cluster(
    requests: Workload, num_servers: int = 2, machine: SimulatedMachine = A40, **changes: object
) -> ClusterReplayed:
    values: dict[str, object] = {"servers": (LIFE,) * num_servers, "router": "least-tokens"}
    spec = ClusterSpec(**(values | changes))  # type: ignore[arg-type]
    return replay_cluster(machine, requests, SimulationOptions(), spec)


class ByAdapter(Router):
    """To the server with the adapter's index, and else to the next one."""

    def __init__(self) -> None:
        self.reported_s: list[tuple[float, float]] = []

    def rank(
        self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
    ) -> Sequence[ServerId]:
        self.reported_s += [(now_s, view.report.reported_s) for view in servers[:1]]
        index = int((request.adapter_name or "0")[-4:])
        ids = [view.server_id for view in servers]
        return [*ids[index % len(ids) :], *ids[: index % len(ids)]]


def by_adapter(facts: RouterFacts) -> Router:
    return ByAdapter()


@pytest.mark.parametrize(
    ("machine", "name", "rate_rps", "policy"),
    [
        ("a40-llama7b", "S1", 1.5, "fcfs"),
        ("a40-llama8b-workers", "S1", 1.5, "chameleon:refresh=10"),
        ("tp4-llama7b-padded", "prod50", 8.0, "corun"),
    ],
)
def test_one_server_gives_what_a_replay_gives(machine: str, name: str, rate_rps: float, policy: str) -> None:
    requests = make_workload(name, rate_rps=rate_rps, num_requests=60, seed=3, traces=None)
    options = SimulationOptions(
        scheduling_policy=policy, prefix_cache=True, host_bytes=6 * 2**30, slo_ttft_s=4.0
    )
    spec = ClusterSpec(servers=(LIFE,), router="random")
    for horizon_s in (2.0, float("inf")):
        alone = simulate(MACHINES[machine], requests, options, horizon_s=horizon_s)
        many = replay_cluster(MACHINES[machine], requests, options, spec, horizon_s=horizon_s)
        assert msgspec.json.encode(many.servers[0]) == msgspec.json.encode(alone)
        assert many.records == alone.records and many.duration_s == alone.duration_s
    expected = figures_of(alone, requests, MACHINES[machine])
    assert figures_of(many, requests, MACHINES[machine]) == expected


def test_two_servers_compute_side_by_side() -> None:
    requests = workload((1.0, 0, 500, 3), (1.0, 1, 400, 3), (20.0, 2, 300, 1))
    replayed = cluster(requests, router=by_adapter)
    first, second, third = replayed.records
    assert first.first_token_s == pytest.approx(1.0 + LOAD_S + prefill_s(500))
    assert second.first_token_s == pytest.approx(1.0 + LOAD_S + prefill_s(400))
    assert third.first_token_s == pytest.approx(20.0 + LOAD_S + prefill_s(300))
    # Two more tokens, which look at 501 and 502 keys; the weights are read for each.
    decode_s = 2 * (12e-3 + 23e-3 + 0.05e-3 + 4e-6 * 8) + 1e-6 * (501 + 502)
    assert first.end_s == pytest.approx(1.0 + LOAD_S + prefill_s(500) + decode_s)
    assert replayed.num_routed == (2, 1)
    assert [len(one.records) for one in replayed.servers] == [2, 1]
    assert replayed.duration_s == third.end_s


def test_a_slow_server_takes_as_many_times_as_long() -> None:
    slow = replace(LIFE, factors=Factors(step=3.0))
    replayed = cluster(workload((0.0, 0, 500, 2), (0.0, 1, 500, 2)), router=by_adapter, servers=(LIFE, slow))
    for record, factor in zip(replayed.records, (1.0, 3.0), strict=True):
        assert record.first_token_s == pytest.approx(LOAD_S + factor * prefill_s(500))


def test_routers_learn_from_reports_who_is_slow() -> None:
    requests = workload(*((0.2 * index, index % 3, 200, 20) for index in range(60)))
    slow = replace(LIFE, factors=Factors(step=4.0))
    replayed = cluster(requests, servers=(slow, LIFE), router="predicted")
    assert replayed.num_routed[1] > 3 * replayed.num_routed[0] > 0


def test_a_request_waits_for_its_adapters_files() -> None:
    """Stores have room for two of three adapters; the third evicts one of them."""
    requests = workload((0.0, 0, 500, 2), (0.0, 2, 500, 2), (9.0, 1, 500, 2))
    rate = FILE_BYTES / 0.5
    replayed = cluster(
        requests,
        1,
        router=by_adapter,
        servers=(LIFE, replace(LIFE, joins_s=8.0)),
        store_bytes=4 * FILE_BYTES,
        peer_bytes_per_s=rate,
    )
    here, also_here, there = replayed.records
    assert here.first_token_s is not None and here.first_token_s < 0.5
    assert also_here.first_token_s is not None and also_here.first_token_s < 0.5
    # The file first, then the load and the step, as seen from its arrival.
    assert there.first_token_s == pytest.approx(9.0 + 0.5 + LOAD_S + prefill_s(500))
    assert replayed.stores[1].fetched_bytes == FILE_BYTES
    assert replayed.stores[0].most_files == 3


def test_a_store_stays_within_its_bytes() -> None:
    requests = make_workload("prod50", rate_rps=12.0, num_requests=80, seed=1, traces=None)
    machine = MACHINES["tp4-llama7b-light"]
    total = sum(requests.ranks) * machine.adapter_bytes_per_rank
    replayed = cluster(
        requests, 3, machine, router="least-tokens", store_bytes=int(0.7 * total), peer_bytes_per_s=2e9
    )
    assert all(0 < one.largest_bytes <= 0.7 * total for one in replayed.stores)
    assert any(one.fetched_bytes > 0 for one in replayed.stores)
    assert all(record.finish_reason in ("stop", "length") for record in replayed.records)


@pytest.mark.parametrize(
    "router",
    [
        pytest.param(name, marks=() if name in ("predicted", "dlora") else pytest.mark.full)
        for name in ROUTERS
    ],
)
def test_the_same_cluster_gives_the_same_bytes(router: str) -> None:
    requests = make_workload("prod50", rate_rps=20.0, num_requests=50, seed=2, traces=None)

    def run() -> bytes:
        replayed = cluster(
            requests,
            3,
            MACHINES["tp4-llama7b-padded"],
            router=router,
            num_routers=2,
            state_age_s=0.3,
            placement="loraserve",
            placement_every_s=1.0,
            capacity=((128, 5000.0),),
        )
        assert len(replayed.records) == 50
        return msgspec.json.encode(replayed)

    assert run() == run()


def test_states_are_as_old_as_told() -> None:
    requests = workload(*((0.05 * index, 0, 100, 30) for index in range(40)))
    for age_s in (0.0, 0.3):
        routers: list[ByAdapter] = []

        def make(facts: RouterFacts, made: list[ByAdapter] = routers) -> Router:
            made.append(ByAdapter())
            return made[-1]

        cluster(requests, router=make, state_age_s=age_s, num_routers=2)
        assert len(routers) == 2  # they take turns
        ages_s = [now_s - reported_s for now_s, reported_s in routers[0].reported_s if now_s > 0.6]
        assert age_s - 1e-9 <= min(ages_s) and max(ages_s) <= age_s + 0.1 + 1e-9


@pytest.mark.parametrize("dies_s", [0.3, 1.0, 2.5])
def test_death_loses_no_request(dies_s: float) -> None:
    requests = workload(*((0.1 * index, index % 3, 300, 20) for index in range(40)))
    replayed = cluster(requests, servers=(replace(LIFE, dies_s=dies_s), LIFE))
    assert [record.request_id for record in replayed.records] == list(range(1, 41))
    assert {record.num_output_tokens for record in replayed.records} == {20}
    assert replayed.num_lost > 0
    assert sum(len(one.records) for one in replayed.servers) == 40
    assert sum(replayed.num_routed) == 40 + replayed.num_lost
    late = [one for one in replayed.servers[0].records if (one.end_s or 0.0) > dies_s]
    assert not late


def test_nothing_is_sent_where_nobody_is_yet_or_any_more() -> None:
    requests = workload(*((0.5 * index, index % 3, 300, 20) for index in range(20)))
    lives = (replace(LIFE, leaves_s=3.1), replace(LIFE, joins_s=6.0), replace(LIFE, dies_s=2.0))
    replayed = cluster(requests, servers=lives)
    assert len(replayed.records) == 20
    assert {record.num_output_tokens for record in replayed.records} == {20}
    # A leaving server completes its requests; requests wait while there is no server.
    assert all(record.arrival_s <= 3.1 for record in replayed.servers[0].records)
    between = [one for one in replayed.records if 3.1 < one.arrival_s < 6.0]
    assert between and all((one.first_token_s or 0.0) > 6.0 for one in between)


def test_who_leaves_hands_over_what_only_it_has() -> None:
    requests = workload((0.0, 0, 100, 2), (6.0, 0, 100, 2), (6.0, 1, 100, 2), (6.0, 2, 100, 2))
    lives = (replace(LIFE, leaves_s=1.0), LIFE)
    replayed = cluster(requests, servers=lives, store_bytes=4 * FILE_BYTES, peer_bytes_per_s=FILE_BYTES / 0.5)
    assert replayed.stores[1].most_files == 3
    assert {2, 3, 4} <= {one.request_id for one in replayed.servers[1].records}
    assert all((one.first_token_s or 99.0) < 7.0 for one in replayed.records)


def test_without_any_server_requests_stay_unfinished() -> None:
    requests = workload(*((1.0 * index, 0, 100, 5) for index in range(5)))
    replayed = cluster(requests, servers=(replace(LIFE, dies_s=1.5),))
    assert [one.end_s is None for one in replayed.records] == [False, False, True, True, True]


def test_what_waits_is_moved_and_keeps_its_arrival() -> None:
    """All requests go to one server at first, before the other one joins."""
    requests = workload(*((0.01 * index, index % 3, 500, 40) for index in range(60)))
    machine = replace(A40, max_num_seqs=4)
    lives = (LIFE, replace(LIFE, joins_s=2.0))
    moved = cluster(requests, machine=machine, servers=lives, router="dlora")
    stayed = cluster(requests, machine=machine, servers=lives, router="least-tokens")
    assert moved.num_moved > 0 == stayed.num_moved
    assert len(moved.records) == 60 and moved.duration_s < 0.7 * stayed.duration_s
    assert {record.num_output_tokens for record in moved.records} == {40}
    assert [one.arrival_s for one in moved.records] == [one.arrival_s for one in stayed.records]
    assert {one.finish_reason for one in moved.records} == {"stop"}


def test_what_can_never_fit_is_counted_once() -> None:
    replayed = cluster(workload((0.0, 0, 5, 2), (1.0, 1, 60_000, 2), (2.0, 1, 5, 2)))
    assert replayed.refused == {"prompt": 1}
    assert [record.request_id for record in replayed.records] == [1, 3]


def test_overload_is_cut() -> None:
    requests = workload(*((0.0, index % 3, 500, 50) for index in range(40)))
    spec = ClusterSpec(servers=(LIFE, LIFE))
    replayed = replay_cluster(A40, requests, SimulationOptions(), spec, horizon_s=1.0)
    assert any(one.end_s is None for one in replayed.records)
    assert 1.0 <= replayed.duration_s < 1.2


def test_somebody_may_watch() -> None:
    seen: list[tuple[float, list[int]]] = []

    def look(now_s: float, servers: Sequence[ClusterServer]) -> None:
        seen.append((now_s, [one.num_requests for one in servers]))

    requests = workload(*((0.1 * index, index % 3, 300, 20) for index in range(20)))
    replay_cluster(
        A40, requests, SimulationOptions(), ClusterSpec(servers=(LIFE, LIFE)), look=look, look_every_s=0.5
    )
    assert [at_s for at_s, _ in seen] == pytest.approx([0.5 * index for index in range(len(seen))])
    assert max(sum(loads) for _, loads in seen) > 2


def test_reports_say_what_there_is() -> None:
    reports: list[ServerReport] = []

    class Reader(ByAdapter):
        def rank(
            self, request: RouteRequest, servers: Sequence[ServerView], now_s: float, rng: random.Random
        ) -> Sequence[ServerId]:
            reports.extend(view.report for view in servers)
            return super().rank(request, servers, now_s, rng)

    make: Callable[[RouterFacts], Router] = lambda facts: Reader()  # noqa: E731
    slow = replace(LIFE, factors=Factors(step=2.0))
    cluster(workload((0.0, 0, 500, 50), (1.05, 0, 400, 5)), servers=(slow,), router=make)
    before, after = reports
    names = {f"adapter-{index:04d}" for index in range(3)}
    assert before.disk_adapters == before.host_adapters == names and not before.gpu_adapters
    assert before.free_kv_tokens == before.total_kv_tokens > 50_000
    assert (before.reported_s, before.measured_over_predicted) == (0.0, 1.0)
    assert after.reported_s == pytest.approx(1.0)
    assert after.gpu_adapters == {"adapter-0000"} and after.num_running_by_rank == {8: 1}
    assert 500 < after.running_context_tokens < 550 and after.queued_prefill_tokens == 0
    assert after.measured_over_predicted == 2.0
    assert after.free_kv_tokens < before.free_kv_tokens


def test_unknown_routers_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'predicted'"):
        cluster(workload((0.0, 0, 5, 2)), router="predictd")
