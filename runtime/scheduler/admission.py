"""Admits waiting requests as far as the device has room, and loads adapters."""

from dataclasses import dataclass

from ..memory.adapter_cache import AdapterState
from ..memory.device_memory import DeviceMemory
from ..memory.grant import Grant, Need, Verdict
from ..request import Request
from .cold import ColdStarts
from .events import SchedulerCounters, TimePart
from .limits import SchedulerConfig, blocks_for
from .policy import NO_ROOM, PolicyWithLimits, SchedulerPolicy
from .running_set import RunningSet
from .step_draft import StepDraft
from .waiting_queue import WaitingWork


@dataclass(frozen=True, slots=True)
class Admission:
    """Admits the candidates of a policy for which the device has room."""

    _config: SchedulerConfig
    _policy: SchedulerPolicy
    _limits: PolicyWithLimits | None  # the policy, if it has limits of its own
    _memory: DeviceMemory
    _running: RunningSet
    _cold_starts: ColdStarts
    _counters: SchedulerCounters
    _waiting: WaitingWork

    def admit(self, draft: StepDraft, now_s: float) -> None:
        """Admit until no slot is left or the policy stops. Put rows into ``draft`` if it has room.

        Pinned adapters load first: otherwise waiting requests would take all memory that becomes
        free. Prefetches come last, and only if no request lacked memory.
        """
        self._memory.loads.begin_pinned(self._running, now_s)
        verdict = Verdict.ADMITTED
        if len(self._policy):
            verdict = self._admit(draft, now_s)
        if verdict not in NO_ROOM:
            self._prefetch(now_s)

    def _admit(self, draft: StepDraft, now_s: float) -> Verdict:
        """Offer memory to the policy's candidates. Return the verdict on the last one."""
        candidates = self._policy.candidates(now_s)
        request = next(candidates, None)
        is_first, verdict = True, Verdict.ADMITTED
        while request is not None and self._has_slot():
            verdict = self._try(request, draft, now_s, is_first=is_first)
            is_first = False
            if verdict is not Verdict.ADMITTED:
                self._record_wait(request, self._wait_reason(request, verdict), now_s)
            try:
                request = candidates.send(verdict)
            except StopIteration:
                request = None
        candidates.close()
        if self._limits is not None:
            for request in self._limits.held_back():
                self._record_wait(request, TimePart.POLICY_LIMIT, now_s)
        return verdict

    def _record_wait(self, request: Request, part: TimePart, now_s: float) -> None:
        self._running.timelines.waits(request, part, len(self._running), now_s)

    def _wait_reason(self, request: Request, verdict: Verdict) -> TimePart:
        if verdict is Verdict.NO_KV:
            return TimePart.KV_MEMORY
        if verdict is Verdict.NO_ADAPTER:
            return TimePart.ADAPTER_MEMORY
        load = self._memory.transfers.load_of(request.adapter_id)
        if load is None:
            return TimePart.KV_SWAP_IN
        return TimePart.ADAPTER_LOAD if load.is_on_host else TimePart.DISK_READ

    def arrived(self, request: Request, now_s: float) -> None:
        """Record a new request, which begins to wait."""
        self._running.timelines.arrived(request, now_s)
        self._mark_short_kv(request)
        num_blocks = len(self._memory.find(request))
        request.found.num_known_prefix_tokens = num_blocks * self._config.block_size

    def _has_slot(self) -> bool:
        """Whether one more request may run.

        It may run even if the step is full: an admitted request takes part in the order of prefill,
        in which a short prompt goes before the rest of a long one.
        """
        return len(self._running) < self._config.max_num_seqs

    def _try(self, request: Request, draft: StepDraft, now_s: float, *, is_first: bool) -> Verdict:
        """Admit ``request`` if memory has room for it and the predicted growth of all requests.

        Only the first candidate may displace adapters that other waiting requests name. Otherwise
        two requests could displace each other's adapter for ever.
        """
        if request.num_in_flight_steps:
            return Verdict.NO_KV  # preempted just now; a step in flight still uses its memory
        self._mark_short_kv(request)
        num_blocks = blocks_for(request.num_known_tokens, self._config.block_size)
        need = Need(
            request=request,
            kv_bytes=num_blocks * self._memory.block_bytes,
            adapter_bytes=request.adapter_bytes,
            running=self._running,
            may_displace=is_first,
            may_start_cold=lambda: self._may_start_cold(request, draft, now_s),
        )
        grant = self._memory.admit(need, now_s)
        if not isinstance(grant, Grant):
            return grant
        self._start(request, grant, draft, now_s)
        return Verdict.ADMITTED

    def _may_start_cold(self, request: Request, draft: StepDraft, now_s: float) -> bool:
        """Whether a request starts now, while its adapter is loading."""
        if not draft.max_cold_tokens:
            self._cold_starts.waits(request)
            return False
        return self._cold_starts.may_start(request, len(self._running), draft.rows, now_s)

    def _mark_short_kv(self, request: Request) -> None:
        """Record whether KV that a request finds or computes from now on is of a short context."""
        threshold = self._config.recompute_at_tokens
        request.has_short_kv = threshold is not None and request.num_known_tokens < threshold

    def _start(self, request: Request, grant: Grant, draft: StepDraft, now_s: float) -> None:
        self._waiting.remove(request)
        self._running.start(request, grant)
        num_found, num_copied = request.begin(request.num_kept_tokens)
        self._counters.prompt_tokens_cached += num_found
        self._counters.prompt_tokens_host_cached += num_copied
        request.is_cold = self._memory.adapter_state(request.adapter_id) is AdapterState.LOADING
        draft.announce(request)
        draft.append_blocks(request, 0)
        if not request.is_cold:
            if draft.num_free_tokens:
                draft.add_chunk(request)
            return
        draft.add_cold(request, self._cold_starts, len(self._running) - 1, now_s)

    def _prefetch(self, now_s: float) -> None:
        """Load adapters of requests that wait for a slot."""
        memory, running = self._memory, self._running
        for request in self._policy.upcoming(self._config.max_prefetch_requests):
            if not memory.loads.begin_ahead(request.adapter_id, request.adapter, running, now_s):
                return
