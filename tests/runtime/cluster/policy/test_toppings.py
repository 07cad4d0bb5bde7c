"""Toppings' cost, fixed, and its faults as printed (Algorithm 1)."""

import random
from collections.abc import Iterable

import pytest
from corun.runtime.cluster.policy.papers.routers import ToppingsPaperRouter
from corun.runtime.cluster.policy.reports import RouteRequest
from corun.runtime.cluster.policy.router import Router
from corun.runtime.cluster.policy.toppings import ToppingsRouter
from corun.runtime.cluster.policy.views import ServerView
from support.routing import request_of, server_costs, server_report, servers_of

_LOOSE, _TIGHT = 1.0, 1e-6  # s per output token: all are within it, none is


def _chosen(
    router: Router, servers: list[ServerView], request: RouteRequest, seeds: Iterable[int] = (0,)
) -> set[str]:
    return {router.rank(request, servers, 0.0, random.Random(seed))[0] for seed in seeds}


def test_as_printed_idle_servers_are_equal_at_any_cost() -> None:
    """Cost x requests is 0 where there is none: the first gets it, slower and cold as it is."""
    slow = server_report(measured_over_predicted=10.0)
    servers = servers_of(slow, server_report(gpu_adapters={"r64"}))
    assert _chosen(ToppingsPaperRouter(slo_tpot_s=_LOOSE), servers, request_of(64)) == {"s0"}
    assert _chosen(ToppingsRouter(slo_tpot_s=_LOOSE), servers, request_of(64)) == {"s1"}


def test_as_printed_a_penalty_times_no_requests_hangs_on_the_order() -> None:
    """inf x 0 is nan, which is less than nothing and nothing is less than it."""
    reports = (server_report(num_running_by_rank={8: 4}), server_report())
    printed, mended = (router(slo_tpot_s=_TIGHT) for router in (ToppingsPaperRouter, ToppingsRouter))
    servers = servers_of(*reports)
    assert _chosen(printed, servers, request_of()) == {"s0"}
    assert _chosen(printed, servers[::-1], request_of()) == {"s1"}
    assert _chosen(mended, servers, request_of()) == {"s1"}
    assert _chosen(mended, servers[::-1], request_of()) == {"s1"}


def test_as_printed_the_first_gets_all_when_all_are_beyond_the_slo() -> None:
    servers = servers_of(*(server_report(num_running_by_rank={8: n}) for n in (9, 3, 5)))
    assert _chosen(ToppingsPaperRouter(slo_tpot_s=_TIGHT), servers, request_of()) == {"s0"}
    assert _chosen(ToppingsRouter(slo_tpot_s=_TIGHT), servers, request_of()) == {"s1"}


def test_equal_servers_are_drawn_from() -> None:
    servers = servers_of(*(server_report() for _ in range(3)))
    mended, printed = ToppingsRouter(slo_tpot_s=_LOOSE), ToppingsPaperRouter(slo_tpot_s=_LOOSE)
    assert _chosen(mended, servers, request_of(), range(30)) == {"s0", "s1", "s2"}
    assert _chosen(printed, servers, request_of(), range(30)) == {"s0"}


@pytest.mark.parametrize("router", [ToppingsRouter, ToppingsPaperRouter])
def test_a_server_within_the_slo_comes_before_one_beyond_it(
    router: type[ToppingsRouter] | type[ToppingsPaperRouter],
) -> None:
    """A step of 8 rows of rank 64 takes 10.512 ms, with one more 10.576; of 20 it takes 11.28."""
    names = {"r64"}
    servers = servers_of(
        server_report(num_running_by_rank={64: 20}, gpu_adapters=names),
        server_report(num_running_by_rank={64: 8}, gpu_adapters=names),
    )
    assert _chosen(router(slo_tpot_s=10.6e-3), servers, request_of(64)) == {"s1"}


def test_small_adapters_stay_away_from_large_ones_where_kernels_pad() -> None:
    """With 6 rows each, s0's steps pay for the largest anyway; s1's would for all 7."""
    names = {"r8", "r128"}
    reports = [server_report(num_running_by_rank={rank: 6}, gpu_adapters=names) for rank in (128, 8)]
    router = ToppingsRouter(slo_tpot_s=_LOOSE)
    padded = servers_of(*reports, costs=server_costs(is_padded=True))
    assert _chosen(router, padded, request_of(128)) == {"s0"}
    assert _chosen(router, padded, request_of(8)) == {"s1"}
    exact = servers_of(*reports)
    assert _chosen(router, exact, request_of(8), range(30)) == {"s0", "s1"}


def test_a_server_without_memory_is_no_candidate() -> None:
    full = server_report(free_kv_tokens=100)
    servers = servers_of(full, server_report(num_running_by_rank={0: 5}))
    for router in (ToppingsRouter(slo_tpot_s=_LOOSE), ToppingsPaperRouter(slo_tpot_s=_LOOSE)):
        assert _chosen(router, servers, request_of()) == {"s1"}
        assert _chosen(router, servers_of(full, full), request_of()) <= {"s0", "s1"}
