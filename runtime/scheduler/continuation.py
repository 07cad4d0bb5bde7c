"""Continues running requests: allocates memory for their growth, and plans their rows."""

from collections.abc import Callable
from dataclasses import dataclass

from ..request import Request, RequestStatus
from .cold import ColdStarts
from .events import PreemptionCause, SchedulerCounters
from .limits import SchedulerConfig
from .policy import SchedulerPolicy
from .running_set import RunningSet
from .step_draft import StepDraft


@dataclass(frozen=True, slots=True)
class Continuation:
    """Fills a step with rows of running requests, and preempts if their growth lacks memory."""

    _config: SchedulerConfig
    _policy: SchedulerPolicy
    _running: RunningSet
    _cold_starts: ColdStarts
    _counters: SchedulerCounters
    _enqueue: Callable[[Request, float], None]  # into the policy's queue

    def reset_outgrown(self, draft: StepDraft, now_s: float) -> None:
        """Recompute requests that have reached the length at which their KV becomes useless.

        A request with blocks in the tree is preempted, because other requests may read them. The
        others are recomputed in place.
        """
        threshold_tokens = self._config.recompute_at_tokens
        if threshold_tokens is None:
            return
        for request in tuple(self._running.requests):
            if request.has_short_kv and request.num_known_tokens >= threshold_tokens:
                if request.num_in_flight_steps:
                    request.is_held = True
                elif request.num_kept_tokens:
                    self._preempt(request, PreemptionCause.ROPE, draft, now_s)
                else:
                    request.has_short_kv = False
                    request.num_lost_tokens = request.num_computed_tokens
                    request.num_computed_tokens = 0

    def continue_requests(self, draft: StepDraft, now_s: float) -> bool:
        """Put decode rows, then prefill chunks of running requests into the step.

        Returns False if a request waits for memory or was preempted. No request is admitted then,
        so that new requests do not take the memory that running ones need.
        """
        has_room = self._grow_running(draft, now_s)
        self._continue_running(draft, now_s)
        return has_room

    def squash(self, draft: StepDraft, now_s: float) -> None:
        for request in self._policy.squash(self._running.requests, now_s):
            self._preempt(request, PreemptionCause.SQUASH, draft, now_s)

    def _grow_running(self, draft: StepDraft, now_s: float) -> bool:
        """Allocate the blocks that known tokens need; False if memory was short."""
        short = [
            r
            for r in self._running.requests
            if r.num_allocated_tokens < r.num_known_tokens < r.max_total_tokens  # else it ends
        ]
        if len(short) > 1:
            self._running.reclaim_for(short)  # one by one takes twice as long
        has_room = True
        for request in short:
            has_room &= self._grow(request, draft, now_s)
        return has_room

    def _grow(self, request: Request, draft: StepDraft, now_s: float) -> bool:
        """Grow one request, preempting as many as necessary; False if memory was short.

        Memory is not short if reserved blocks are still draining: no other request can take them.
        """
        is_coming = has_preempted = False
        while request.status is RequestStatus.RUNNING:
            first_index = len(request.block_ids)
            if self._running.grow(request):
                draft.append_blocks(request, first_index)
                return not has_preempted
            if is_coming:
                return self._running.is_growth_reserved(request)
            is_coming = self._running.reclaim_for((request,))
            if not is_coming:
                victim = self._policy.victim(self._running.requests)
                self._preempt(victim, PreemptionCause.KV_MEMORY, draft, now_s)
                has_preempted = True
        return False

    def _preempt(self, request: Request, cause: PreemptionCause, draft: StepDraft, now_s: float) -> None:
        """Preempt a running request: it waits, keeps its tokens and is recomputed."""
        draft.drop_blocks(request)
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        self._running.stop(request, RequestStatus.WAITING)
        self._running.timelines.preempted(request, cause, len(self._running), now_s)
        request.tally.num_preemptions += 1
        request.tally.num_squashes += cause is PreemptionCause.SQUASH
        self._counters.preemptions[cause] += 1
        self._enqueue(request, now_s)

    def _continue_running(self, draft: StepDraft, now_s: float) -> None:
        """Put rows of running requests into the step: decode rows, forced tokens, prompts."""
        decodes: list[Request] = []
        forced: list[Request] = []  # with several output tokens, as a grammar forces them
        prefills: list[Request] = []
        for request in self._running.requests:
            num_known_tokens = request.num_known_tokens
            if (
                num_known_tokens > request.num_allocated_tokens
                or num_known_tokens >= request.max_total_tokens
                or request.is_held
                or (request.num_in_flight_samples and _may_be_forced(request))
            ):
                continue
            num_pending_tokens = num_known_tokens - request.num_computed_tokens
            if num_pending_tokens == 1 and not request.is_cold:
                decodes.append(request)
            elif num_pending_tokens:
                is_forced = request.num_computed_tokens >= len(request.prompt_token_ids)
                (forced if is_forced and not request.is_cold else prefills).append(request)
        draft.add_decodes(decodes)
        for request in (*forced, *self._policy.prefill_order(prefills, now_s)):
            if not draft.num_free_tokens:
                break
            if request.is_cold and draft.max_cold_tokens:
                draft.add_cold(request, self._cold_starts, len(self._running) - 1, now_s)
            elif not request.is_cold:
                draft.add_chunk(request)


def _may_be_forced(request: Request) -> bool:
    """Whether a sample in flight may bring more tokens than one."""
    sampling = request.sampling
    return sampling.structured_output is not None and sampling.structured_forced_tokens
