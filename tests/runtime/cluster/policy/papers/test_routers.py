"""Routing by shares: shares are kept, and sessions stay at one server."""

import random
from collections import Counter

import pytest
from corun.runtime.cluster.policy.papers.routers import LoraServeRouter
from corun.runtime.cluster.policy.reports import ServerId
from support.routing import request_of, server_report, servers_of

_S0, _S1, _S2 = (ServerId(f"s{index}") for index in range(3))


def _router(shares: dict[ServerId, float], *, is_as_printed: bool = False) -> LoraServeRouter:
    router = LoraServeRouter(is_as_printed=is_as_printed)
    router.on_placed({"r8": shares})
    return router


def _homes(router: LoraServeRouter, number: int) -> list[ServerId]:
    """Return the server of each session's request."""
    servers, rng = servers_of(*(server_report() for _ in range(4))), random.Random(0)
    return [
        router.rank(request_of(8, session=f"session {index}"), servers, 0.0, rng)[0]
        for index in range(number)
    ]


@pytest.mark.parametrize("is_as_printed", [False, True])
def test_each_server_gets_its_share(is_as_printed: bool) -> None:
    homes: Counter[str] = Counter(_homes(_router({_S0: 0.7, _S1: 0.3}, is_as_printed=is_as_printed), 1000))
    assert set(homes) == {"s0", "s1"}
    assert homes["s0"] == pytest.approx(700, abs=50)


def test_a_session_stays_where_it_is_but_not_as_printed() -> None:
    """A request that is drawn for another server loses its cached prefix."""
    shares = {_S0: 0.5, _S1: 0.5}
    router, printed = _router(shares), _router(shares, is_as_printed=True)
    servers, rng = servers_of(*(server_report() for _ in range(3))), random.Random(0)
    request = request_of(8, session="one")
    assert len({router.rank(request, servers, 0.0, rng)[0] for _ in range(20)}) == 1
    assert len({printed.rank(request, servers, 0.0, rng)[0] for _ in range(20)}) == 2


def test_only_as_many_sessions_move_as_shares_do() -> None:
    before = _homes(_router({_S0: 0.5, _S1: 0.5}), 1000)
    after = _homes(_router({_S0: 0.4, _S1: 0.4, _S2: 0.2}), 1000)
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {"s2"}
    assert len(moved) == pytest.approx(200, abs=40)


def test_servers_without_a_share_come_last() -> None:
    reports = (server_report(), server_report(is_ready=False), server_report(), server_report())
    servers, rng = servers_of(*reports), random.Random(0)
    router = _router({_S1: 0.6, _S2: 0.4, _S0: 0.0})
    assert router.rank(request_of(8), servers, 0.0, rng)[0] == "s2"
    # An adapter without a row always goes to the same server.
    orders = {tuple(router.rank(request_of(16), servers, 0.0, rng)) for _ in range(5)}
    assert len(orders) == 1
    servers[2].assign(request_of(), 0.0)
    assert router.rank(request_of(), servers, 0.0, rng)[2] == "s2"
