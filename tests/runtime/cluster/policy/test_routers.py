"""The contract of all routers."""

import random
import warnings
from collections.abc import Sequence

import pytest
from corun.runtime.cluster.policy.registry import ROUTERS, RouterFacts, make_router
from corun.runtime.cluster.policy.reports import ServerId
from corun.runtime.cluster.policy.router import Router
from corun.runtime.cluster.policy.views import ServerView
from corun.runtime.errors import ConfigError
from support.routing import random_report, request_of, server_costs, server_report, servers_of

_FACTS = (RouterFacts(slo_tpot_s=0.05), RouterFacts(slo_tpot_s=0.05, num_routers=4))
_INFINITE = float("inf")


def _routers(name: str) -> list[Router]:
    return [make_router(name, facts) for facts in _FACTS]


def _send(router: Router, servers: Sequence[ServerView], number: int) -> list[Sequence[ServerId]]:
    """Send requests of all kinds to the best server; return the server of each."""
    rng, draws = random.Random(1), random.Random(2)
    views = {view.server_id: view for view in servers}
    orders = []
    for index in range(number):
        session = f"session {draws.randrange(5)}" if draws.random() < 0.5 else None
        request = request_of(
            draws.choice((0, 8, 16, 128)),
            session=session,
            num_prompt_tokens=draws.choice((1, 100, 5000)),
            predicted_output_tokens=draws.choice((0.0, 1.0, 300.0)),
        )
        now_s = 0.01 * index
        order = router.rank(request, servers, now_s, rng)
        orders.append(order)
        if order:
            views[order[0]].assign(request, now_s)
            router.on_assigned(request, order[0])
    return orders


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_exactly_the_ready_servers_are_ranked_once(name: str, is_padded: bool) -> None:
    reports_rng = random.Random(3)
    reports = [random_report(reports_rng) for _ in range(12)]
    for router in _routers(name):
        router.on_placed({"r8": {ServerId("s1"): 0.5, ServerId("s2"): 0.5}})
        servers = servers_of(*reports, costs=server_costs(is_padded=is_padded))
        ready = sorted(view.server_id for view in servers if view.report.is_ready)
        assert 0 < len(ready) < len(servers)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for order in _send(router, servers, 40):
                assert sorted(order) == ready


@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_requests_and_draws_go_the_same_way(name: str) -> None:
    orders = []
    for _ in range(2):
        rng = random.Random(4)
        servers = servers_of(*(random_report(rng) for _ in range(8)))
        orders.append([_send(router, servers, 30) for router in _routers(name)])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", ROUTERS)
def test_without_a_ready_server_none_is_ranked(name: str) -> None:
    for router in _routers(name):
        assert list(router.rank(request_of(8), [], 0.0, random.Random(0))) == []
        servers = servers_of(server_report(is_ready=False))
        assert list(router.rank(request_of(8), servers, 0.0, random.Random(0))) == []


@pytest.mark.parametrize("name", ROUTERS)
def test_servers_come_and_go_between_requests(name: str) -> None:
    for router in _routers(name):
        servers = servers_of(*(server_report() for _ in range(4)))
        assert len(_send(router, servers, 3)[-1]) == 4
        servers[1].apply(server_report(is_ready=False, reported_s=1.0))
        assert sorted(_send(router, servers, 1)[-1]) == ["s0", "s2", "s3"]
        assert sorted(_send(router, servers[2:], 1)[-1]) == ["s2", "s3"]
        assert list(router.rank(request_of(8), [], 0.0, random.Random(0))) == []
        servers[1].apply(server_report(reported_s=2.0))
        assert len(_send(router, servers, 1)[-1]) == 4


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("is_padded", [False, True])
def test_zero_full_and_infinite_servers_are_no_error(name: str, is_padded: bool) -> None:
    costs = server_costs(is_padded=is_padded, file_bytes_per_s=_INFINITE, peer_bytes_per_s=_INFINITE)
    for router in _routers(name):
        servers = servers_of(
            server_report(free_kv_tokens=0, total_kv_tokens=0),
            server_report(
                num_running_by_rank={128: 32},
                num_waiting_by_rank={8: 1000, 0: 0},
                queued_prefill_tokens=10**9,
                running_context_tokens=10**6,
                free_kv_tokens=0,
            ),
            server_report(measured_over_predicted=_INFINITE),
            server_report(measured_over_predicted=0.0),
            costs=costs,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for order in _send(router, servers, 20):
                assert sorted(order) == ["s0", "s1", "s2", "s3"]


# Routers without load, by a table, or that prefer the first server on purpose.
_BLIND = {"random", "loraserve", "loraserve-paper", "first-fit", "affinity", "toppings-paper"}


@pytest.mark.parametrize("name", sorted(set(ROUTERS) - _BLIND))
def test_equal_servers_get_equal_shares(name: str) -> None:
    """Two servers without ends of requests: sent requests count at once, so servers alternate."""
    for router in _routers(name):
        servers = servers_of(server_report(), server_report())
        rng = random.Random(5)
        for index in range(20):
            request = request_of()
            best = router.rank(request, servers, 0.1, rng)[0]
            servers[["s0", "s1"].index(best)].assign(request, 0.1)
            router.on_assigned(request, best)
            loads = [view.load.num_requests for view in servers]
            assert abs(loads[0] - loads[1]) <= (index + 1) % 2


def test_an_unknown_router_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(ConfigError, match=r"--router is .predict., .*did you mean .predicted."):
        make_router("predict", _FACTS[0])
