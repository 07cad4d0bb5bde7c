"""Chameleon's own: queues that do not wait for each other, loans, bypass, squash and refresh."""

from collections.abc import Callable

import pytest
from corun.runtime.memory.grant import Verdict
from corun.runtime.plan import AdapterId
from corun.runtime.request import Request
from corun.runtime.scheduler.papers.chameleon.policy import ChameleonPolicy
from support.invariants import check_invariants
from support.policy_room import PolicyRoom, facts_for
from support.scheduling import make_request

SMALL, LARGE = 5, 60  # tokens of prompts


class Scripted:
    """Gives a policy the verdicts of a test."""

    def __init__(self, *, is_as_printed: bool = False, **facts: float) -> None:
        settings = {"capacity_tokens": 200, **facts}
        self.policy = ChameleonPolicy(facts_for(**settings), refresh_s=1000.0, is_as_printed=is_as_printed)
        self.now_s = 0.0
        self.num_arrived = 0
        self.running: list[Request] = []

    def arrive(self, *, prompt: int = SMALL, predicted: int = 5, adapter: int = 0) -> Request:
        """A request, a second after the last. The adapter takes ten tokens times its number."""
        self.now_s += 1.0
        self.num_arrived += 1
        request = make_request(
            self.num_arrived,
            prompt=prompt,
            arrival_s=self.now_s,
            adapter_id=AdapterId(adapter),
            adapter_bytes=100 * adapter,
        )
        request.num_predicted_output_tokens = predicted
        self.policy.add(request, self.now_s)
        return request

    def end(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        self.policy.ended(request, self.now_s)

    def admit(self, verdict_of: Callable[[Request], Verdict] | None = None) -> list[Request]:
        """Admit; return the candidates. Without verdicts all requests are admitted."""
        offered: list[Request] = []
        candidates = self.policy.candidates(self.now_s)
        request = next(candidates, None)
        while request is not None:
            assert request not in offered
            offered.append(request)
            verdict = verdict_of(request) if verdict_of else Verdict.ADMITTED
            if verdict is Verdict.ADMITTED:
                self.running.append(request)
            try:
                request = candidates.send(verdict)
            except StopIteration:
                request = None
        check_invariants(self.policy)
        return offered

    def have_queues(self) -> None:
        """Serve equally many requests of two sizes, so that there are two queues."""
        for index in range(64):
            self.arrive(prompt=LARGE if index % 2 else SMALL)
        while len(self.policy):
            for request in self.admit():
                self.end(request)
        assert self.policy.counts()["num_queues"] == 2


def no_adapter_for(*heads: Request) -> Callable[[Request], Verdict]:
    return lambda one: Verdict.NO_ADAPTER if one in heads else Verdict.ADMITTED


def no_kv_but_for(*admitted: Request) -> Callable[[Request], Verdict]:
    return lambda one: Verdict.ADMITTED if one in admitted else Verdict.NO_KV


def quotas_of(policy: ChameleonPolicy) -> list[float]:
    return [value for name, value in policy.counts().items() if name.endswith("_quota_tokens")]


def test_before_the_first_refresh_there_is_one_queue() -> None:
    room = Scripted()
    for index in range(63):
        room.arrive(prompt=LARGE if index % 2 else SMALL)
        room.end(room.admit()[0])
    assert quotas_of(room.policy) == [200]
    room.arrive()
    room.admit()
    assert len(quotas_of(room.policy)) == 2
    assert sum(quotas_of(room.policy)) == 200


def test_short_requests_do_not_wait_behind_long_ones() -> None:
    room = Scripted()
    room.have_queues()
    large = [room.arrive(prompt=LARGE + 10) for _ in range(4)]
    short = room.arrive()
    assert room.admit() == [short, *large[:2]]  # three are more than there is
    assert room.admit() == []
    room.end(large[0])
    assert room.admit() == [large[2]]


def test_a_queue_borrows_from_those_where_nobody_waits_beside_what_is_its_own() -> None:
    """Half of five predicted tokens count: each of the short ones takes 8, of the large ones 63."""
    room = Scripted()
    room.have_queues()
    small_quota, large_quota = quotas_of(room.policy)
    shorts = [room.arrive() for _ in range(6)]
    assert small_quota < len(shorts) * 8
    assert 126 < large_quota < 189
    assert room.admit() == shorts  # the first by its quota, then by loans
    large = [room.arrive(prompt=LARGE), room.arrive(prompt=LARGE)]
    assert room.admit() == large  # 152 are left for them
    third = room.arrive(prompt=LARGE)
    assert room.admit() == []
    for short in shorts:  # which gives the loans back
        room.end(short)
    assert room.admit() == [third]


def test_who_needs_more_than_the_quota_overdraws_an_idle_queue() -> None:
    room = Scripted()
    room.have_queues()
    shorts = [room.arrive()]
    assert room.admit() == shorts
    waiting = room.arrive()  # so that its queue lends nothing
    huge = room.arrive(prompt=190)
    assert room.admit() == [waiting, huge]
    printed = Scripted(is_as_printed=True)
    printed.have_queues()
    printed.arrive()
    printed.admit()
    huge = printed.arrive(prompt=190)
    assert printed.admit() == []
    printed.end(printed.running[0])
    assert printed.admit() == [huge]  # no request is running


def test_who_ends_in_time_passes_a_head_that_finds_no_room_for_its_adapter() -> None:
    """A token takes a second. The running request ends in 20 s, and only then there is room."""
    room = Scripted(capacity_tokens=300)
    running = room.arrive(prompt=100, predicted=20)
    assert room.admit() == [running]
    head = room.arrive(adapter=9)
    long, short, loading = room.arrive(predicted=30), room.arrive(predicted=5), room.arrive()
    verdicts = {head: Verdict.NO_ADAPTER, short: Verdict.ADMITTED, loading: Verdict.LOADING}
    assert room.admit(verdicts.__getitem__) == [head, short, loading]
    assert room.policy.upcoming(9) == [head, long, loading]


def test_nobody_passes_a_head_that_lacks_quota_or_kv() -> None:
    room = Scripted()
    running = room.arrive(prompt=100, predicted=50)
    assert room.admit() == [running]
    head, short = room.arrive(prompt=40), room.arrive()
    assert room.admit(lambda request: Verdict.NO_KV) == [head]
    room.policy.remove(head)
    room.end(head)
    room.policy.remove(short)
    room.end(short)
    room.arrive(prompt=80)
    room.arrive()
    assert room.admit() == []


def squashing_room(*, prompt: int = 90, is_as_printed: bool = False) -> tuple[Scripted, Request, Request]:
    """A request predicted to end in 5 s has passed a head that waits for 90 tokens."""
    room = Scripted(is_as_printed=is_as_printed, capacity_tokens=400)
    running = room.arrive(prompt=80, predicted=20)
    room.admit()
    head, passing = room.arrive(adapter=9), room.arrive(prompt=prompt, predicted=5)
    assert room.admit(no_adapter_for(head)) == [head, passing]
    assert room.policy.squash([running, passing], room.now_s) == []
    return room, head, passing


def test_who_overruns_is_squashed_if_that_lets_the_head_in_and_never_passes_again() -> None:
    room, head, passing = squashing_room()
    assert room.policy.wake_at_s() == pytest.approx(room.now_s + 5, abs=0.1)
    room.now_s += 5.1
    passing.output_token_ids += [7, 7]
    passing.num_known_tokens += 2
    assert room.policy.squash([passing], room.now_s) == [passing]
    room.policy.add(passing, room.now_s)
    assert passing.num_output_tokens == 2
    assert room.policy.wake_at_s() is None
    assert room.policy.counts()["num_squashed"] == 1
    assert room.admit(no_adapter_for(head)) == [head]
    assert not room.policy.squash([], room.now_s)


def test_nobody_is_squashed_where_that_would_not_let_the_head_in() -> None:
    """Or if the head may fit anyway, or no longer waits."""
    room, head, passing = squashing_room(prompt=80)
    room.now_s += 5.1
    assert not room.policy.squash([passing], room.now_s)
    assert room.policy.wake_at_s() is None, "it would be asked for ever"

    room, head, passing = squashing_room()
    room.end(room.running[0])
    room.now_s += 5.1
    assert not room.policy.squash([passing], room.now_s)
    assert room.admit(no_adapter_for(head)) == [head]
    assert room.policy.squash([passing], room.now_s) == [passing]

    room, head, passing = squashing_room()
    room.policy.remove(head)
    room.end(head)
    room.now_s += 5.1
    assert not room.policy.squash([passing], room.now_s)


def test_as_printed_who_overruns_is_squashed_whether_that_helps_or_not() -> None:
    room, _, passing = squashing_room(is_as_printed=True, prompt=80)
    room.now_s += 5.1
    assert room.policy.squash([passing], room.now_s) == [passing]


def test_who_is_refused_memory_is_passed_up_to_the_bound_then_nobody_is_admitted() -> None:
    """Also if only the other queue continues."""
    room = Scripted(max_overtaking_tokens=12)
    room.have_queues()
    room.arrive()
    room.admit()
    large = room.arrive(prompt=LARGE)
    for _ in range(4):  # it is refused after the first one
        short = room.arrive()
        offered = room.admit(no_adapter_for(large))
        assert offered[0] is short
        room.end(short)
    late = room.arrive()
    assert room.admit(no_adapter_for(large)) == [large]
    assert room.admit() == [large, late]


def test_where_nobody_runs_the_earliest_is_not_kept_out_by_others_adapters() -> None:
    """Each head would evict the other's adapter, for ever."""
    room = Scripted()
    room.have_queues()
    large, short = room.arrive(prompt=LARGE, adapter=2), room.arrive()
    verdicts = {large: Verdict.NO_ADAPTER, short: Verdict.LOADING}
    assert room.admit(verdicts.__getitem__) == [short, large]
    for verdict in (Verdict.NO_ADAPTER, Verdict.LOADING, Verdict.LOADING):
        assert room.admit({large: verdict}.__getitem__) == [large]
    assert room.admit() == [large, short]


def test_heads_that_memory_never_comes_to_count_what_passes_them() -> None:
    """The first queue takes all memory, and the second is never offered."""
    room = Scripted(max_overtaking_tokens=12)
    room.have_queues()
    room.arrive()
    room.admit()
    large = room.arrive(prompt=LARGE)
    num_admitted = 0
    for _ in range(20):
        first, second = room.arrive(), room.arrive()
        offered = room.admit(no_kv_but_for(first, large))
        if large in offered:
            break
        num_admitted += first in offered
        for request in (first, second):
            if request in room.policy.upcoming(99):
                room.policy.remove(request)
            room.end(request)
    assert large in offered
    assert num_admitted <= 4


def test_a_refresh_moves_those_who_wait_and_charges_those_who_run() -> None:
    """More requests wait than a step moves."""
    facts = facts_for(capacity_tokens=200)
    room = PolicyRoom(ChameleonPolicy(facts, refresh_s=20.0), facts)
    policy = room.policy
    assert isinstance(policy, ChameleonPolicy)
    room.after_act = lambda: check_invariants(policy)
    requests = []
    for index in range(1500):
        prompt = 40 if index % 3 == 0 else 2
        requests.append(make_request(index, prompt=prompt, arrival_s=index / 100))
        room.arrive(requests[-1], predicted=3, output=3)
    room.turn()
    assert policy.counts()["num_queues"] == 2
    while room.waiting or room.running:
        room.turn()
    admitted = [request for request, _ in room.admitted]
    assert len(admitted) == 1500
    for prompt in (2, 40):  # within a queue in order of arrival
        of_queue = [one.request_id for one in admitted if one.num_prompt_tokens == prompt]
        assert of_queue == sorted(of_queue)
