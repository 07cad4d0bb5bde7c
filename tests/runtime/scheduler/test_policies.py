"""Rules for all scheduling policies: progress, bounds, and determinism."""

import contextlib
import itertools
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from corun.runtime.memory.grant import Verdict
from corun.runtime.plan import AdapterId
from corun.runtime.request import Request
from corun.runtime.scheduler.papers.chameleon.policy import ChameleonPolicy
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES, make_policy
from hypothesis import given, settings
from support.invariants import check_invariants
from support.policy_room import PolicyRoom, facts_for
from support.scheduling import make_request

NAMES = sorted(SCHEDULER_POLICIES)
SLO_TTFT_S = 0.5
CAPACITY_TOKENS = 200
MAX_OVERTAKING_TOKENS = 100
SMALL_TOKENS, SMALL_TURNS = 16, 6  # of what keeps coming: the largest, the longest
# While a queue lacks quota, other queues may admit until the running requests end.
_QUOTA_TOKENS = SMALL_TURNS * CAPACITY_TOKENS
# Seconds after a request's arrival in which later ones may pass it, and tokens that may pass
# it in any case.
BOUNDS: dict[str, Callable[[Request], tuple[float, int]]] = {
    "fcfs": lambda request: (0.0, 0),
    "sjf": lambda request: (0.02 * request.num_predicted_output_tokens, 0),
    "corun": lambda request: (8 * SLO_TTFT_S, 0),
    "chameleon": lambda request: (0.0, _QUOTA_TOKENS),
    "output-only": lambda request: (0.0, _QUOTA_TOKENS),
}
# Its quotas can be smaller than a request. A request that is larger than its quota and the loans of
# other queues waits while these are busy. The test below shows this.
UNBOUNDED = {"chameleon-paper"}

every_policy = pytest.mark.parametrize("name", NAMES)


def make_room(
    name: str, *, num_seqs: int = 16, refresh_s: float = 20.0, queues: int | None = None, **options: Any
) -> PolicyRoom:
    facts = facts_for(
        **{
            "capacity_tokens": CAPACITY_TOKENS,
            "max_overtaking_tokens": MAX_OVERTAKING_TOKENS,
            "slo_ttft_s": SLO_TTFT_S,
            **options,
        }
    )
    if name.startswith(("chameleon", "output")):
        name += f":refresh={refresh_s}" + (f",queues={queues}" if queues else "")
    policy = make_policy(name, facts)
    room = PolicyRoom(policy, facts, max_num_seqs=num_seqs)
    if isinstance(policy, ChameleonPolicy):
        room.after_act = lambda: check_invariants(policy)
    return room


class Source:
    """Makes requests of random sizes for a few adapters."""

    def __init__(self, room: PolicyRoom, seed: int) -> None:
        self._room = room
        self.rng = random.Random(seed)
        self.requests: list[Request] = []

    def arrive(self, *, is_small: bool = False) -> None:
        rng = self.rng
        output = rng.randint(1, SMALL_TURNS if is_small else 25)
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
    """Run random actions, then end all requests. Return the admissions and their times."""
    room = make_room(name, num_seqs=seed % 7 + 2, queues=(None, 1, 2, 4)[seed % 4])
    source = Source(room, seed)
    rng = source.rng
    for _ in range(110):
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
    assert not (room.running or room.waiting), "a request is never admitted"
    return [(request.request_id, num_tokens) for request, num_tokens in room.admitted]


@every_policy
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_in_any_order_everything_ends_and_the_same_comes_again(name: str, seed: int) -> None:
    admitted = live_through(name, seed)
    assert live_through(name, seed) == admitted


@every_policy
def test_who_is_alone_is_admitted_however_large(name: str) -> None:
    """Also after many small requests, by which the queues were divided."""
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


def let_small_ones_come(room: PolicyRoom, source: Source, large: Request) -> None:
    """Overload the room until ``large`` runs, or for long."""
    for _ in range(400):
        if large.num_output_tokens:
            break
        for _ in range(4):
            source.arrive(is_small=True)
        room.turn()


def with_a_large_one(name: str, adapter: int) -> tuple[PolicyRoom, Source, Request]:
    """Return a room that serves small requests, in which a large one arrives."""
    room = make_room(name)
    source = Source(room, 2)
    for _ in range(60):
        source.arrive(is_small=True)
        source.arrive(is_small=True)
        room.turn()
    assert not room.waiting
    return room, source, source.arrive_with(60, 20, 20, adapter=adapter)


@pytest.mark.parametrize("name", sorted(set(NAMES) - UNBOUNDED))
@pytest.mark.parametrize("adapter", [0, 9])
def test_a_large_request_is_passed_by_no_more_than_the_bound(name: str, adapter: int) -> None:
    room, source, large = with_a_large_one(name, adapter)
    head_start_s, more_tokens = BOUNDS[name](large)
    let_small_ones_come(room, source, large)
    assert large.num_output_tokens, "it is never admitted"
    before = itertools.takewhile(lambda entry: entry[0] is not large, room.admitted)
    entitled_s = large.arrival_s + head_start_s
    passing = sum(num_tokens for one, num_tokens in before if one.arrival_s > entitled_s)
    assert passing <= MAX_OVERTAKING_TOKENS + SMALL_TOKENS + more_tokens


@pytest.mark.parametrize("name", sorted(UNBOUNDED))
def test_a_large_request_can_starve_until_the_others_stop(name: str) -> None:
    room, source, large = with_a_large_one(name, adapter=9)
    let_small_ones_come(room, source, large)
    assert large.request_id in room.waiting
    while room.running or room.waiting:
        room.turn()
    assert large.num_output_tokens == 20


@every_policy
def test_victims_make_progress(name: str) -> None:
    """All predictions are too low: memory runs out again and again, but all requests end."""
    room = make_room(name, capacity_tokens=60)
    source = Source(room, 3)
    for _ in range(12):
        source.arrive_with(5, 1, 40, adapter=0)
    for _ in range(12 * 45):
        room.turn()
    assert room.num_preempted > 5
    assert not (room.running or room.waiting)


def num_calls_of_a_turn(room: PolicyRoom, *, admits: bool) -> int:
    """Count the function calls of a policy in a turn, with or without an admission."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    policy = room.policy
    sys.setprofile(count)
    try:
        policy.squash((), room.now_s)
        candidates = policy.candidates(room.now_s)
        request = next(candidates)
        with contextlib.suppress(StopIteration):
            candidates.send(Verdict.ADMITTED if admits else Verdict.NO_KV)
        candidates.close()
        policy.upcoming(16)
        policy.wake_at_s()
        if admits:
            policy.ended(request, room.now_s)
    finally:
        sys.setprofile(None)
    return num_calls


@every_policy
def test_what_a_step_costs_does_not_depend_on_how_many_wait(name: str) -> None:
    costs = []
    for num_waiting in (300, 6000):
        room = make_room(name, refresh_s=10_000.0)
        policy = room.policy
        for index in range(num_waiting):
            request = make_request(index, prompt=2 + index % 3, arrival_s=index / 1000)
            request.num_predicted_output_tokens = 1
            policy.add(request, 0.0)
        for _ in range(30):  # requests of before the first refresh move to their queues
            num_calls_of_a_turn(room, admits=False)
        turns = [num_calls_of_a_turn(room, admits=index % 2 == 0) for index in range(20)]
        costs.append(statistics.median(turns))
    assert costs[1] <= 1.5 * costs[0]
