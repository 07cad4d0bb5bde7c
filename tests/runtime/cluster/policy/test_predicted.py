"""Predicted latency, against figures worked out by hand: see ``support.routing`` for the costs."""

import random
from collections import Counter

import pytest
from corun.runtime.cluster.policy.predicted import PredictedRouter
from corun.runtime.cluster.policy.reports import RouteRequest, ServerId
from corun.runtime.cluster.policy.views import ServerView
from support.routing import request_of, server_costs, server_report, servers_of


def _best(
    servers: list[ServerView], request: RouteRequest, router: PredictedRouter | None = None
) -> ServerId:
    return (router or PredictedRouter()).rank(request, servers, 0.0, random.Random(0))[0]


@pytest.mark.parametrize(("queued_tokens", "best"), [(170, "s0"), (172, "s1")])
def test_a_queue_is_weighed_against_a_cold_adapter(queued_tokens: int, best: str) -> None:
    """Both compute the prompt in 10.8 ms, with 0.1 x 50 steps of 10.008 ms after it.

    s0 has the adapter, 10 ms for the step of the chunk and 0.11 ms of queue per token before it;
    s1 reads 8 MB in 24 ms, in which the step is hidden, and pays a fifth of that again: 28.8 ms.
    """
    servers = servers_of(
        server_report(queued_prefill_tokens=queued_tokens, gpu_adapters={"r8"}),
        server_report(disk_adapters={"r8"}),
    )
    assert _best(servers, request_of(8)) == best


@pytest.mark.parametrize(("tier", "cold_ms"), [("gpu", 0.0), ("loading", 8.0), ("host", 8.0), ("disk", 24.0)])
def test_the_nearest_copy_is_best(tier: str, cold_ms: float) -> None:
    """From a peer 8 MB take 104 ms. A queue of 1 token takes 0.11 ms."""
    # The load is hidden behind the queue and 10 ms of a step, and counts a fifth beside.
    queue_ms = 104.0 - 10.0 + 0.2 * (104.0 - cold_ms)
    for tokens, best in ((int(queue_ms / 0.11) - 1, "s0"), (int(queue_ms / 0.11) + 2, "s1")):
        near = server_report(queued_prefill_tokens=tokens, **{f"{tier}_adapters": {"r8"}})
        assert _best(servers_of(near, server_report()), request_of(8)) == best


def test_a_session_goes_where_its_prefix_is() -> None:
    router, servers = PredictedRouter(), servers_of(*(server_report() for _ in range(4)))
    router.on_assigned(request_of(session="a", num_prompt_tokens=1000), servers[2].server_id)
    follow_up = request_of(session="a", num_prompt_tokens=1200)
    assert _best(servers, follow_up, router) == "s2"
    # 65 whole blocks are kept: 104 ms, and 10 ms of a second chunk's step. 1,037 take as long.
    servers[2].apply(server_report(queued_prefill_tokens=1030))
    assert _best(servers, follow_up, router) == "s2"
    servers[2].apply(server_report(queued_prefill_tokens=1044))
    assert _best(servers, follow_up, router) != "s2"
    other_adapter = request_of(8, session="a", num_prompt_tokens=1200)
    servers = servers_of(*(server_report(gpu_adapters={"r8"}) for _ in range(4)))
    servers[2].apply(server_report(queued_prefill_tokens=1, gpu_adapters={"r8"}))
    assert _best(servers, other_adapter, router) != "s2"


def test_a_server_is_as_slow_as_it_measures() -> None:
    servers = servers_of(server_report(measured_over_predicted=4.0), server_report())
    assert _best(servers, request_of()) == "s1"
    # Alone it takes 4 x 70 ms there; a queue of 1,800 tokens takes 198 ms, of 2,000 tokens 220 ms.
    servers[1].apply(server_report(queued_prefill_tokens=1800))
    assert _best(servers, request_of()) == "s1"
    servers[1].apply(server_report(queued_prefill_tokens=2000))
    assert _best(servers, request_of()) == "s0"


def test_a_server_without_room_costs_a_wait() -> None:
    """Of 10 running requests one ends in 5 steps; a lack of a tenth of their KV is gone then."""
    full = server_report(num_running_by_rank={0: 10}, running_context_tokens=1500, free_kv_tokens=0)
    roomy = server_report(num_running_by_rank={0: 10}, running_context_tokens=1500)
    assert _best(servers_of(full, roomy), request_of()) == "s1"
    # 150 tokens lack of 1,500: 0.1 x 50 steps of 10 ms, as much as a queue of 455 tokens.
    for tokens, best in ((460, "s0"), (450, "s1")):
        queued = server_report(
            num_running_by_rank={0: 10}, running_context_tokens=1500, queued_prefill_tokens=tokens
        )
        assert _best(servers_of(full, queued), request_of()) == best


def test_a_server_without_a_free_row_costs_a_wait() -> None:
    """Servers of two kinds: with 32 rows s0 takes one more when one of them has ended."""
    report = server_report(num_running_by_rank={0: 32})
    kinds = (server_costs(), server_costs(max_num_seqs=33))
    servers = [ServerView(ServerId(f"s{index}"), costs, report) for index, costs in enumerate(kinds)]
    assert _best(servers, request_of()) == "s1"


@pytest.mark.parametrize("is_padded", [False, True])
def test_ranks_are_kept_apart_where_kernels_pad(is_padded: bool) -> None:
    """s0 has large adapters and more to do, s1 small ones; all have the adapter."""
    names = {"r8", "r128"}
    servers = servers_of(
        server_report(num_running_by_rank={128: 6}, queued_prefill_tokens=300, gpu_adapters=names),
        server_report(num_running_by_rank={8: 6}, gpu_adapters=names),
        costs=server_costs(is_padded=is_padded),
    )
    router = PredictedRouter()
    router.on_assigned(request_of(8, num_prompt_tokens=1000), servers[1].server_id)
    large = request_of(128, num_prompt_tokens=1000)
    assert _best(servers, large, router) == ("s0" if is_padded else "s1")
    assert _best(servers, request_of(8, num_prompt_tokens=1000), router) == "s1"


def test_routers_that_share_servers_do_not_all_choose_the_best() -> None:
    """It is among 3 of 12 in a quarter of all draws; where it is not drawn, the best that is."""
    servers = servers_of(*(server_report(queued_prefill_tokens=50 * i) for i in range(12)))
    rng = random.Random(0)
    shared, alone = PredictedRouter(num_routers=16), PredictedRouter()
    counts: Counter[str] = Counter(shared.rank(request_of(), servers, 0.0, rng)[0] for _ in range(400))
    assert counts["s0"] == pytest.approx(100, abs=30)
    assert not counts["s10"] and not counts["s11"]
    assert alone.rank(request_of(), servers, 0.0, rng)[0] == "s0"
    padded = servers_of(*(view.report for view in servers), costs=server_costs(is_padded=True))
    assert shared.rank(request_of(), padded, 0.0, rng)[0] == "s0"


def test_a_beginning_is_looked_for_wherever_it_was_sent() -> None:
    """600 of 1,000 tokens are saved by either of two servers, 200 more by one of them."""
    router, servers = PredictedRouter(), servers_of(*(server_report() for _ in range(4)))
    short, long = ((1, 300), (2, 600)), ((1, 300), (2, 600), (3, 800))
    for server, beginnings in ((1, short), (3, long)):
        sent = request_of(num_prompt_tokens=1000, beginnings=beginnings)
        router.on_assigned(sent, servers[server].server_id)
    asked = request_of(num_prompt_tokens=1000, session="other", beginnings=long)
    assert _best(servers, asked, router) == "s3"
    servers[3].apply(server_report(queued_prefill_tokens=400))
    assert _best(servers, asked, router) == "s1"
    other_adapter = request_of(8, num_prompt_tokens=1000, beginnings=long)
    servers = servers_of(*(server_report(gpu_adapters={"r8"}) for _ in range(4)))
    servers[3].apply(server_report(queued_prefill_tokens=1, gpu_adapters={"r8"}))
    assert _best(servers, other_adapter, router) != "s3"
