"""What every scheduling policy keeps to, alone: progress, bounds, and the same again."""

import itertools
import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from corun.runtime.plan import AdapterId
from corun.runtime.request import Request
from corun.runtime.scheduler.policy import PolicyFacts
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES, make_policy
from hypothesis import given, settings
from support.policy_room import PolicyRoom, facts_for
from support.scheduling import make_request

NAMES = sorted(SCHEDULER_POLICIES)
SLO_TTFT_S = 0.5
# Seconds after its arrival from which on whoever arrives has to let a request pass.
HEAD_STARTS_S: dict[str, Callable[[Request], float]] = {
    "fcfs": lambda request: 0.0,
    "sjf": lambda request: 0.02 * request.num_predicted_output_tokens,
    "corun": lambda request: 8 * SLO_TTFT_S,
}

every_policy = pytest.mark.parametrize("name", NAMES)


def make_room(name: str, *, num_seqs: int = 16, **options: object) -> PolicyRoom:
    facts: PolicyFacts = facts_for(slo_ttft_s=SLO_TTFT_S, refresh_s=20.0, **options)
    return PolicyRoom(make_policy(name, facts), facts, max_num_seqs=num_seqs)


class Source:
    """Makes requests of random sizes for a few adapters."""

    def __init__(self, room: PolicyRoom, seed: int) -> None:
        self._room = room
        self.rng = random.Random(seed)
        self.requests: list[Request] = []

    def arrive(self, *, is_small: bool = False) -> None:
        rng = self.rng
        output = rng.randint(1, 6 if is_small else 25)
        predicted = max(1, output + rng.randint(-5, 5))
        prompt = rng.randint(1, 10) if is_small else rng.choice([3, 10, 60])
        self.arrive_with(prompt, predicted, output, adapter=rng.choice([0, 0, 1, 2, 3]))

    def arrive_with(self, prompt: int, predicted: int, output: int, *, adapter: int) -> Request:
        request = make_request(
            len(self.requests),
            prompt=prompt,
            arrival_s=self._room.now_s,
            adapter_id=AdapterId(adapter),
            adapter_bytes=100 + 100 * adapter,
        )
        self.requests.append(request)
        self._room.arrive(request, predicted=predicted, output=output)
        return request


def live_through(name: str, seed: int) -> list[tuple[int, int]]:
    """Let anything happen in any order, then all requests end; return who was admitted when."""
    room = make_room(name, num_seqs=seed % 7 + 2, num_queues=(None, 1, 2, 4)[seed % 4])
    source = Source(room, seed)
    rng = source.rng
    for _ in range(150):
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            source.arrive()
        if rng.random() < 0.1 and room.running:
            room.preempt(rng.choice(list(room.running.values())))
        if rng.random() < 0.1 and (living := [*room.running.values(), *room.waiting.values()]):
            room.end(rng.choice(living))
        room.turn()
    for _ in range(5000):
        if not (room.running or room.waiting):
            break
        room.turn()
    assert not (room.running or room.waiting), "somebody is never admitted"
    return [(request.request_id, num_tokens) for request, num_tokens in room.admitted]


@every_policy
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_in_any_order_everything_ends_and_the_same_comes_again(name: str, seed: int) -> None:
    admitted = live_through(name, seed)
    assert live_through(name, seed) == admitted


@every_policy
def test_who_is_alone_is_admitted_however_large(name: str) -> None:
    """Also after many small ones, which are what lanes are cut by."""
    room = make_room(name)
    source = Source(room, 1)
    for _ in range(120):
        source.arrive(is_small=True)
        room.turn()
    while room.running or room.waiting:
        room.turn()
    whole = source.arrive_with(120, 10, 10, adapter=3)
    for _ in range(20):
        room.turn()
    assert whole.num_output_tokens == 10


@every_policy
@pytest.mark.parametrize("adapter", [0, 9])
def test_a_large_request_is_passed_by_no_more_than_the_bound(name: str, adapter: int) -> None:
    """Small ones keep coming, more than can be served; that they arrive is not held against it."""
    room = make_room(name)
    source = Source(room, 2)
    for _ in range(60):
        source.arrive(is_small=True)
        source.arrive(is_small=True)
        room.turn()
    large = source.arrive_with(60, 20, 20, adapter=9 if adapter else 0)
    entitled_s = large.arrival_s + HEAD_STARTS_S[name](large)
    for _ in range(400):
        if large.num_output_tokens:
            break
        for _ in range(4):
            source.arrive(is_small=True)
        room.turn()
    assert large.num_output_tokens, "it is never admitted"
    before = itertools.takewhile(lambda entry: entry[0] is not large, room.admitted)
    passing = sum(num_tokens for one, num_tokens in before if one.arrival_s > entitled_s)
    assert passing <= 100 + 16


@every_policy
def test_victims_make_progress(name: str) -> None:
    """All predict too little: room runs out again and again, and still everybody ends."""
    room = make_room(name, capacity_tokens=60)
    source = Source(room, 3)
    for _ in range(12):
        source.arrive_with(5, 1, 40, adapter=0)
    for _ in range(12 * 45):
        room.turn()
    assert room.num_preempted > 5
    assert not (room.running or room.waiting)
