"""The scheduler's side of a policy's conversation, with memory counted in tokens and no steps.

In a turn every running request outputs a token. Adapters take turns to load, and are evicted at
once when no running request uses them and room is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from corun.runtime.memory.grant import Verdict
from corun.runtime.plan import BASE_ADAPTER, AdapterId
from corun.runtime.request import Request, RequestStatus
from corun.runtime.scheduler.policy import PolicyFacts, SchedulerPolicy

BYTES_PER_TOKEN = 10
_LOAD_TURNS = 3


@dataclass(frozen=True)
class LinearTimes:
    """A millisecond per token of a prompt; decode steps take as long as a turn."""

    turn_s: float = 1.0

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        return num_tokens / 1000

    def decode_step_s(self, num_rows: int) -> float:
        return self.turn_s

    def step_ended(self, num_tokens: int, duration_s: float) -> None:
        """Nothing is learned."""


def facts_for(**facts: Any) -> PolicyFacts:
    """``facts``: fields that matter to a test."""
    settings: dict[str, Any] = {
        "times": LinearTimes(),
        "capacity_tokens": 200,
        "bytes_per_token": BYTES_PER_TOKEN,
        "max_overtaking_tokens": 100,
    }
    return PolicyFacts(**settings | facts)


class PolicyRoom:
    """Runs requests in as much room as ``facts`` say, and holds the policy to its interface."""

    def __init__(self, policy: SchedulerPolicy, facts: PolicyFacts, *, max_num_seqs: int = 16) -> None:
        self.policy = policy
        self.capacity_tokens = facts.capacity_tokens
        self.max_num_seqs = max_num_seqs
        self.now_s = 0.0
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.held_tokens: dict[int, int] = {}  # by running request
        self.output_tokens: dict[int, int] = {}  # that requests will come to
        self.adapter_turns: dict[AdapterId, int] = {}  # until it is here
        self.adapter_tokens: dict[AdapterId, int] = {}
        self.admitted: list[tuple[Request, int]] = []  # with tokens; again after a preemption
        self.num_preempted = 0
        self.after_act: Callable[[], None] = lambda: None  # is called whenever something happened

    @property
    def num_free_tokens(self) -> int:
        loaded = sum(self.adapter_tokens[adapter_id] for adapter_id in self.adapter_turns)
        return self.capacity_tokens - sum(self.held_tokens.values()) - loaded

    def arrive(self, request: Request, *, predicted: int, output: int) -> None:
        """Let a request wait that will put out ``output`` tokens."""
        request.num_predicted_output_tokens = predicted
        self.output_tokens[request.request_id] = output
        tokens = -(-request.adapter_bytes // BYTES_PER_TOKEN)
        self.adapter_tokens[request.adapter_id] = tokens
        assert request.num_prompt_tokens + max(predicted, output) + tokens <= self.capacity_tokens
        self._wait(request)

    def end(self, request: Request) -> None:
        """End a request, wherever it is."""
        if self.waiting.pop(request.request_id, None):
            self.policy.remove(request)
        else:
            self._stop(request)
        request.status = RequestStatus.ENDED
        self.policy.ended(request, self.now_s)
        self.after_act()

    def preempt(self, request: Request) -> None:
        """Take a running request's room; it waits again."""
        self._stop(request)
        self.num_preempted += 1
        self._wait(request)

    def turn(self, turn_s: float = 1.0) -> None:
        """Squash, grow, admit, load ahead; then every running request outputs a token."""
        self.now_s += turn_s
        for request in list(self.policy.squash(self.running.values(), self.now_s)):
            self.preempt(request)
        has_room = True
        for request in list(self.running.values()):
            has_room &= self._grow(request)
        self.after_act()
        if has_room:
            self._admit()
        assert len(self.policy) == len(self.waiting)
        for adapter_id, turns in self.adapter_turns.items():
            self.adapter_turns[adapter_id] = max(0, turns - 1)
        for request in list(self.running.values()):
            request.output_token_ids.append(7)
            request.num_known_tokens += 1
            if request.num_output_tokens >= self.output_tokens[request.request_id]:
                self.end(request)

    def _wait(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.waiting[request.request_id] = request
        self.policy.add(request, self.now_s)
        self.after_act()

    def _stop(self, request: Request) -> None:
        del self.running[request.request_id]
        del self.held_tokens[request.request_id]
        request.num_computed_tokens = 0

    def _grow(self, request: Request) -> bool:
        """Make room for one more token; False if a request was preempted."""
        chosen: set[int] = set()
        while request.request_id in self.running:
            held = self.held_tokens[request.request_id]
            if request.num_known_tokens <= held:
                break
            if self._make_room(1, BASE_ADAPTER, is_first=True):
                self.held_tokens[request.request_id] = held + 1
                break
            victim = self.policy.victim(self.running.values())
            assert victim.request_id in self.running and victim.request_id not in chosen
            chosen.add(victim.request_id)
            self.preempt(victim)
        return not chosen

    def _admit(self) -> None:
        if not len(self.policy):
            return
        candidates = self.policy.candidates(self.now_s)
        offered: set[int] = set()
        request = next(candidates, None)
        while request is not None and len(self.running) < self.max_num_seqs:
            assert request.request_id in self.waiting, "offered although it does not wait"
            assert request.request_id not in offered, "offered twice in a step"
            offered.add(request.request_id)
            try:
                request = candidates.send(self._try(request, is_first=len(offered) == 1))
            except StopIteration:
                request = None
            self.after_act()
        candidates.close()
        new = [request for request in self.running.values() if not request.num_computed_tokens]
        order = self.policy.prefill_order(new, self.now_s)
        assert sorted(map(id, order)) == sorted(map(id, new))
        for request in new:
            request.num_computed_tokens = request.num_known_tokens
        for request in self.policy.upcoming(3):
            assert request.request_id in self.waiting
            if request.adapter_id not in self.adapter_turns:
                self._load(request.adapter_id, is_first=False)

    def _try(self, request: Request, *, is_first: bool) -> Verdict:
        if request.adapter_id != BASE_ADAPTER:
            turns = self.adapter_turns.get(request.adapter_id)
            if turns is None and not self._load(request.adapter_id, is_first=is_first):
                return Verdict.NO_ADAPTER
            if turns != 0:
                return Verdict.LOADING
        expected = request.num_prompt_tokens + request.num_predicted_output_tokens
        num_tokens = max(expected, request.num_known_tokens)
        if not self._make_room(num_tokens, request.adapter_id, is_first=is_first):
            return Verdict.NO_KV
        del self.waiting[request.request_id]
        self.running[request.request_id] = request
        self.held_tokens[request.request_id] = num_tokens
        request.status = RequestStatus.RUNNING
        self.admitted.append((request, request.num_known_tokens))
        return Verdict.ADMITTED

    def _load(self, adapter_id: AdapterId, *, is_first: bool) -> bool:
        num_tokens = self.adapter_tokens[adapter_id]
        if not self._make_room(num_tokens, adapter_id, is_first=is_first):
            return False
        self.adapter_turns[adapter_id] = _LOAD_TURNS
        return True

    def _make_room(self, num_tokens: int, keep: AdapterId, *, is_first: bool) -> bool:
        """Let go idle adapters, if that is enough; say whether it was.

        As in the scheduler only the first candidate displaces those of other waiting requests.
        """
        used = {request.adapter_id for request in self.running.values()} | {keep}
        if not is_first:
            used |= {request.adapter_id for request in self.waiting.values()}
        idle = [one for one, turns in self.adapter_turns.items() if not turns and one not in used]
        spare = sum(self.adapter_tokens[adapter_id] for adapter_id in idle)
        if num_tokens > self.num_free_tokens + spare:
            return False
        for adapter_id in idle:
            if num_tokens > self.num_free_tokens:
                del self.adapter_turns[adapter_id]
        return True
