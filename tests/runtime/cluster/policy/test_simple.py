"""Routers without predictions."""

import math
import random
from collections import Counter

from corun.runtime.cluster.policy.papers.routers import DloraRouter
from corun.runtime.cluster.policy.reports import ServerId
from corun.runtime.cluster.policy.simple import (
    AffinityRouter,
    FirstFitRouter,
    LeastTokensRouter,
    RandomRouter,
    TwoChoicesRouter,
)
from support.routing import request_of, server_costs, server_report, servers_of


def test_random_sends_everywhere() -> None:
    servers, rng = servers_of(*(server_report() for _ in range(4))), random.Random(0)
    counts: Counter[str] = Counter(
        RandomRouter().rank(request_of(), servers, 0.0, rng)[0] for _ in range(400)
    )
    assert all(70 <= counts[f"s{index}"] <= 130 for index in range(4))


def test_of_two_choices_the_one_with_fewer_requests() -> None:
    """The most loaded of three is chosen never, the least in two of three draws."""
    servers = servers_of(*(server_report(num_running_by_rank={0: n}) for n in (5, 1, 9)))
    rng = random.Random(0)
    counts: Counter[str] = Counter(
        TwoChoicesRouter().rank(request_of(), servers, 0.0, rng)[0] for _ in range(300)
    )
    assert counts["s2"] == 0
    assert 170 <= counts["s1"] <= 230


def test_least_tokens_counts_what_waits_and_what_is_kept() -> None:
    servers = servers_of(
        server_report(running_context_tokens=500),
        server_report(running_context_tokens=300, queued_prefill_tokens=300),
        server_report(running_context_tokens=100, queued_prefill_tokens=300),
    )
    assert LeastTokensRouter().rank(request_of(), servers, 0.0, random.Random(0)) == ["s2", "s0", "s1"]


def test_first_fit_fills_one_server_after_the_other() -> None:
    servers = servers_of(*(server_report() for _ in range(3)), costs=server_costs(max_num_seqs=2))
    router, rng, chosen = FirstFitRouter(), random.Random(0), []
    for _ in range(7):
        best = router.rank(request_of(), servers, 0.0, rng)[0]
        chosen.append(best)
        servers[int(best[1:])].assign(request_of(), 1.0)
    assert chosen == ["s0", "s0", "s1", "s1", "s2", "s2", "s0"]
    roomy = servers_of(server_report(free_kv_tokens=149), server_report(free_kv_tokens=150))
    assert router.rank(request_of(), roomy, 0.0, rng)[0] == "s1"


def test_affinity_is_left_at_a_quarter_over_the_mean() -> None:
    servers = servers_of(*(server_report() for _ in range(4)))
    router, rng = AffinityRouter(), random.Random(0)
    home = router.rank(request_of(8), servers, 0.0, rng)[0]
    for number in range(1, 41):
        best = router.rank(request_of(8), servers, 0.0, rng)[0]
        servers[int(best[1:])].assign(request_of(8), 1.0)
        loads = {view.server_id: view.load.num_requests for view in servers}
        assert max(loads.values()) <= math.ceil(1.25 * number / 4)
    assert loads[home] == max(loads.values())
    idle = servers_of(*(server_report() for _ in range(4)))
    assert {router.rank(request_of(8), idle, 0.0, rng)[0] for _ in range(9)} == {home}
    firsts = {router.rank(request_of(rank), idle, 0.0, rng)[0] for rank in range(1, 40)}
    assert firsts == {"s0", "s1", "s2", "s3"}


def test_dlora_moves_what_came_last_from_the_longest_queue_to_the_shortest() -> None:
    servers = servers_of(*(server_report() for _ in range(3)), server_report(is_ready=False))
    long, other = [request_of(num_prompt_tokens=100 + n) for n in range(5)], request_of()
    s0, s1, s2, s3 = (ServerId(f"s{index}") for index in range(4))
    moves = DloraRouter().moves({s0: long, s1: [other], s3: [other]}, servers)
    # 510, 100 and 0 tokens; then 406, 100, 104; then 303, 203, 104; then 201, 203, 206.
    assert [(move.request, move.source, move.target) for move in moves] == [
        (long[4], "s0", "s2"),
        (long[3], "s0", "s1"),
        (long[2], "s0", "s2"),
    ]
    assert not DloraRouter().moves({s0: [other], s1: [other], s2: [other]}, servers)
    assert not DloraRouter().moves({s0: [request_of(num_prompt_tokens=10**6)]}, servers[:1])
    assert not DloraRouter().moves({}, [])
