"""Policies with keys: the key of each, and its other orders."""

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.memory.grant import Verdict
from corun.runtime.request import Request
from corun.runtime.scheduler.corun import CorunPolicy
from corun.runtime.scheduler.keyed import MAX_PASSED_REQUESTS
from corun.runtime.scheduler.policy import SchedulerPolicy
from corun.runtime.scheduler.registry import make_policy
from support.policy_room import facts_for
from support.scheduling import make_request


def add_all(policy: SchedulerPolicy, requests: list[Request]) -> None:
    for request in requests:
        policy.add(request, request.arrival_s)


def order_of(policy: SchedulerPolicy) -> list[int]:
    return [request.request_id for request in policy.upcoming(100)]


def predicting(request_id: int, num_tokens: int, arrival_s: float) -> Request:
    request = make_request(request_id, arrival_s=arrival_s)
    request.num_predicted_output_tokens = num_tokens
    return request


def test_sjf_goes_by_predicted_output_and_a_token_is_worth_20_ms_of_waiting() -> None:
    policy = make_policy("sjf", facts_for())
    add_all(policy, [predicting(1, 100, 0.0), predicting(2, 10, 0.0), predicting(3, 10, 1.7)])
    add_all(policy, [predicting(4, 10, 1.9)])
    assert order_of(policy) == [2, 3, 1, 4]


def test_corun_lets_short_prompts_pass_within_8_slos() -> None:
    """Means of prompts as they arrive: 100, 60, 73 1/3, 60; W = 16 s."""
    policy = CorunPolicy(facts_for(slo_ttft_s=2.0))
    long, short = make_request(1, prompt=100, arrival_s=0.0), make_request(2, prompt=20)
    add_all(policy, [long, short])
    assert order_of(policy) == [2, 1]  # 16 and 2 + 16 / 3
    add_all(policy, [make_request(3, prompt=100, arrival_s=3.0)])
    add_all(policy, [make_request(4, prompt=20, arrival_s=12.0)])
    assert order_of(policy) == [2, 1, 4, 3]  # 16 and 12 + 16 / 3, then 3 + 16


def test_corun_takes_its_slo_from_what_prompts_take_on_an_idle_engine() -> None:
    """A millisecond per token: the mean is 0.1 s and W is 4 s."""
    policy = CorunPolicy(facts_for())
    add_all(policy, [make_request(1, prompt=100, arrival_s=0.0)])
    add_all(policy, [make_request(2, prompt=1, arrival_s=3.95)])
    add_all(policy, [make_request(3, prompt=1, arrival_s=4.05)])
    assert order_of(policy) == [2, 1, 3]


def test_a_key_is_kept_when_its_request_is_preempted() -> None:
    policy = CorunPolicy(facts_for(slo_ttft_s=2.0))
    first = make_request(1, prompt=50, arrival_s=0.0)
    add_all(policy, [first, make_request(2, prompt=50, arrival_s=1.0)])
    policy.remove(first)
    for request_id in range(3, 30):  # the mean falls, and by it the first would come last
        add_all(policy, [make_request(request_id, prompt=10, arrival_s=100.0)])
    policy.add(first, 101.0)
    assert order_of(policy)[:2] == [1, 2]


def test_corun_computes_short_remainders_first_and_lets_long_ones_age() -> None:
    policy = CorunPolicy(facts_for())
    long, short = make_request(1, prompt=500, arrival_s=0.0), make_request(2, prompt=20)
    late = make_request(3, prompt=20, arrival_s=2.6)
    add_all(policy, [long, short, late])  # 1.5 mean prompts take 0.27 s, and the long one 0.5 s
    assert list(policy.prefill_order([long, short, late], 9.0)) == [short, long, late]
    long.num_computed_tokens = 480  # a chunk of it has been computed
    assert list(policy.prefill_order([short, long, late], 9.0)) == [long, short, late]


@pytest.mark.parametrize("name", ["sjf", "corun"])
def test_the_latest_admitted_gives_way(name: str) -> None:
    policy = make_policy(name, facts_for())
    running = {index: make_request(index) for index in (3, 1, 2)}
    assert policy.victim(running.values()) is running[2]


@pytest.mark.parametrize("name", ["fcfs", "sjf", "corun"])
def test_no_more_than_64_are_passed_in_a_step(name: str) -> None:
    policy = make_policy(name, facts_for())
    add_all(policy, [make_request(index) for index in range(200)])
    candidates = policy.candidates(0.0)
    num_offered = 0
    request = next(candidates, None)
    while request is not None:
        num_offered += 1
        try:
            request = candidates.send(Verdict.LOADING)
        except StopIteration:
            break
    assert num_offered == MAX_PASSED_REQUESTS


def test_bad_facts_name_their_flags() -> None:
    for name, value, message in [("slo_ttft_s", -1.0, "--slo-ttft-s is -1, must be above 0")]:
        with pytest.raises(ConfigError, match=message):
            facts_for(**{name: value})


def test_unknown_names_are_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lifo', must be one of: fcfs, sjf, corun, chameleon, "):
        make_policy("lifo", facts_for())
