"""Decides what each step computes, and learns from results what became of it.

Pure policy: no clock, no randomness, no I/O, no tensors. ``schedule`` may be called again before
the results of earlier steps have come back. Who is admitted and who is preempted is the
``SchedulerPolicy``'s choice; room on the device is the ``DeviceMemory``'s account.
"""

from collections.abc import Iterable, Mapping

from ..engine.request import Request, RequestStatus
from ..errors import RequestError
from ..memory.device_memory import DeviceMemory
from ..plan import (
    AdapterId,
    RequestId,
    Result,
    StepId,
    StepPlan,
    TransferKind,
    TransferProgress,
    TransferResult,
)
from .admission import Admission
from .cold import ColdStarts, WarmStarts
from .config import SchedulerConfig
from .events import FinishReason, RequestEvent, SchedulerCounters
from .limits import check_queue, max_total_tokens
from .policy import SchedulerPolicy
from .results import ResultReader
from .running_set import RunningSet
from .step_draft import InFlightStep, StepDraft


class Scheduler:
    """Continuous batching with chunked prefill over one memory budget."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulerPolicy,
        memory: DeviceMemory,
        eos_token_ids: Iterable[int],
        cold_starts: ColdStarts | None = None,
    ) -> None:
        """``memory`` is changed by this scheduler alone.

        Without ``cold_starts`` every request waits for its adapter.
        """
        self.config = config
        self.memory = memory
        self.counters = SchedulerCounters()
        self._policy = policy
        self._running = RunningSet(memory, config.block_size)
        self._cold_starts = WarmStarts() if cold_starts is None else cold_starts
        self._admission = Admission(config, policy, memory, self._running, self._cold_starts)
        self._results = ResultReader(frozenset(eos_token_ids), self._running, self.counters)
        self._requests: dict[RequestId, Request] = {}  # those that have not ended
        self._in_flight: dict[StepId, InFlightStep] = {}  # oldest first
        self._forget: list[RequestId] = []  # ended, and the executor does not know yet
        self._next_step_id = 1

    @property
    def num_running(self) -> int:
        """Requests that hold memory and compute."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, preempted ones included."""
        return len(self._policy)

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and have not returned."""
        return len(self._in_flight)

    @property
    def oldest_step_in_flight(self) -> StepId | None:
        """The step whose result comes next."""
        return next(iter(self._in_flight), None)

    def cold_start_counts(self) -> Mapping[str, int]:
        """Requests so far whose adapter was not on the device, by how they were started."""
        return self._cold_starts.counts()

    @property
    def requests(self) -> Iterable[Request]:
        """All requests that have not ended."""
        return self._requests.values()

    def has_work(self) -> bool:
        """Whether anything is waiting, running, in flight, or still to be evicted."""
        return bool(
            self._requests
            or self._in_flight
            or self.memory.num_open_transfers
            or self.memory.has_dropped_adapters
        )

    def add_request(self, request: Request, now_s: float) -> None:
        """Let ``request`` wait.

        Raises ``OverloadedError`` if too many wait, ``RequestError`` if it can never be served.
        """
        request_id = request.request_id
        if request_id in self._requests or self._running.is_draining(request_id):
            raise RequestError(f"request id {request_id} is in use", param="request_id")
        check_queue(self.num_waiting, self.config)
        request.max_total_tokens = max_total_tokens(request, self.config, self.memory)
        self._requests[request_id] = request
        self._wait(request, now_s)

    def abort(self, request_id: RequestId, now_s: float) -> RequestEvent | None:
        """End a request; None if it is not known (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, now_s)
        return RequestEvent(request_id, finish_reason=FinishReason.ABORT)

    def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Evict an adapter version that no request will name any more."""
        self.memory.drop(adapter_id)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed or transferred now.

        Growth comes first, then decode rows, prefill chunks of running requests, new requests.
        """
        draft = StepDraft(self.config)
        if self.config.recompute_at_tokens is not None:
            self._reset_outgrown(self.config.recompute_at_tokens)
        if not self._cold_starts.stops_everybody():
            self._fill(draft, now_s)
        step = draft.build(
            StepId(self._next_step_id),
            mix_decode_with_prefill=self.config.mix_decode_with_prefill,
            transfers=self.memory.take_commands(),
            promoted_transfers=self.memory.take_promoted(),
            forget_requests=tuple(self._forget),
        )
        if step is None:
            return None
        self._next_step_id += 1
        self._forget.clear()
        self._in_flight[step.plan.step_id] = step
        return step.plan

    def update(self, result: Result, now_s: float) -> list[RequestEvent]:
        """Take in a result; return the new tokens and ends that come of it."""
        if isinstance(result, TransferResult):
            return self._end_transfer(result, now_s)
        if isinstance(result, TransferProgress):
            self._note_progress(result, now_s)
            return []
        step = self._in_flight.pop(result.step_id, None)
        if step is None:
            return []  # it was given up
        events = self._results.read(step, result.rows, self._in_flight.values())
        events = [self._with_cold_start(event, now_s) for event in events]
        self._end_finished(events, now_s)
        return events

    def fail_step(self, step_id: StepId, error: str, now_s: float) -> list[RequestEvent]:
        """Give up a step that will not return: its requests end with ``error``."""
        step = self._in_flight.pop(step_id, None)
        if step is None:
            return []
        self.counters.num_failed_steps += 1
        events = self._results.fail(step, error)
        failed = {event.request_id for event in events}
        for update in step.plan.block_updates:  # also those without a row: their table is lost
            request = self._requests.get(update.request_id)
            if request is not None and request.request_id not in failed:
                events.append(_error_event(request.request_id, "StepFailedError", error))
        self._end_finished(events, now_s)
        self._forget.extend(step.plan.forget_requests)
        for transfer in step.plan.transfers:
            events += self._end_transfer(TransferResult(transfer.transfer_id, error), now_s)
        return events

    def check_invariants(self) -> None:
        """Assert that all parts agree; for tests and idle moments."""
        self.memory.check_invariants()
        self._running.check_invariants()
        num_waiting = sum(r.status is RequestStatus.WAITING for r in self._requests.values())
        assert num_waiting == self.num_waiting, (num_waiting, self.num_waiting)
        assert num_waiting + self.num_running == len(self._requests)
        for request in self._requests.values():
            num_real_tokens = request.num_prompt_tokens + request.num_output_tokens
            assert request.num_known_tokens == num_real_tokens + request.num_in_flight_samples
            assert request.num_known_tokens <= request.max_total_tokens
        if not self.has_work():
            assert self.memory.pool.num_used_blocks == 0

    def _fill(self, draft: StepDraft, now_s: float) -> None:
        """Grow, continue and admit requests."""
        has_room = self._grow_running(draft, now_s)
        self._continue_running(draft, now_s)
        if has_room:
            self._admission.admit(draft, now_s)

    def _wait(self, request: Request, now_s: float) -> None:
        """Put a request into the policy's queue."""
        self.memory.cache.add_waiting(request.adapter_id)
        self._policy.add(request, now_s)

    def _reset_outgrown(self, threshold_tokens: int) -> None:
        """Recompute requests that have reached the length from which their KV is of no use."""
        for request in self._running.requests:
            if request.has_short_kv and request.num_known_tokens >= threshold_tokens:
                if request.num_in_flight_steps:
                    request.is_held = True
                else:
                    request.has_short_kv = False
                    request.num_computed_tokens = 0

    def _grow_running(self, draft: StepDraft, now_s: float) -> bool:
        """Give running requests the blocks that their known tokens need.

        Returns False if somebody has to wait for memory or was preempted: then nobody new is
        admitted, or those who grow could be starved.
        """
        short = [r for r in self._running.requests if r.num_known_tokens > r.num_allocated_tokens]
        has_room = True
        for request in short:
            if request.num_known_tokens < request.max_total_tokens:  # else it only ends
                has_room &= self._grow(request, draft, now_s)
        return has_room

    def _grow(self, request: Request, draft: StepDraft, now_s: float) -> bool:
        """Grow one request, preempting as many as it takes; False if memory was short."""
        has_preempted = False
        while request.status is RequestStatus.RUNNING:
            first_index = len(request.block_ids)
            if self._running.grow(request):
                draft.append_blocks(request, first_index)
                return not has_preempted
            if self._running.reclaim_for(request):
                return False
            self._preempt(self._policy.victim(self._running.requests), draft, now_s)
            has_preempted = True
        return False

    def _preempt(self, request: Request, draft: StepDraft, now_s: float) -> None:
        """Take a running request's memory; it waits, keeps its tokens and is recomputed."""
        draft.forget_blocks(request)
        self._running.stop(request, RequestStatus.WAITING)
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._wait(request, now_s)

    def _continue_running(self, draft: StepDraft, now_s: float) -> None:
        """Put decode rows, then prefill chunks of running requests into the step."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running.requests:
            num_known_tokens = request.num_known_tokens
            if (
                num_known_tokens > request.num_allocated_tokens
                or num_known_tokens >= request.max_total_tokens
                or request.is_held
            ):
                continue
            num_pending_tokens = num_known_tokens - request.num_computed_tokens
            if num_pending_tokens == 1 and not request.is_cold:
                decodes.append(request)
            elif num_pending_tokens:
                prefills.append(request)
        draft.add_decodes(decodes)
        for request in self._policy.prefill_order(prefills, now_s):
            if not draft.num_free_tokens:
                break
            if request.is_cold and draft.max_cold_tokens:
                self._continue_cold(request, draft, now_s)
            elif not request.is_cold:
                draft.add_chunk(request)

    def _continue_cold(self, request: Request, draft: StepDraft, now_s: float) -> None:
        """Put a chunk of a request into the step whose adapter is still being loaded."""
        chunk = self._cold_starts.next_chunk(
            request, draft.max_cold_tokens, len(self._running) - 1, now_s
        )
        if chunk is not None:
            draft.add_cold_chunk(request, chunk)

    def _end_finished(self, events: list[RequestEvent], now_s: float) -> None:
        """End the requests whose events are final."""
        for event in events:
            if event.finish_reason is not None:
                self._end(self._requests[event.request_id], now_s)

    def _end(self, request: Request, now_s: float) -> None:
        """Let go of a request in any state."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.WAITING:
            self._policy.remove(request)
            self.memory.cache.remove_waiting(request.adapter_id)
            request.status = RequestStatus.ENDED
        else:
            self._running.stop(request, RequestStatus.ENDED)
        self._policy.ended(request, now_s)
        self._cold_starts.forget(request.request_id)
        if request.is_announced:
            self._forget.append(request.request_id)

    def _with_cold_start(self, event: RequestEvent, now_s: float) -> RequestEvent:
        """Add to a first token how its request was started."""
        if not event.token_ids or self._requests[event.request_id].num_output_tokens != 1:
            return event
        return event._replace(cold_start=self._cold_starts.first_token(event.request_id, now_s))

    def _note_progress(self, progress: TransferProgress, now_s: float) -> None:
        """Layer groups of a load have arrived."""
        transfer = self.memory.open_transfer(progress.transfer_id)
        if transfer is not None:
            self._cold_starts.load_progressed(transfer.adapter_id, progress.num_groups, now_s)

    def _end_transfer(self, result: TransferResult, now_s: float) -> list[RequestEvent]:
        """Note a transfer's end; a failed load fails the requests that wait for it."""
        transfer = self.memory.settle(result)
        if transfer is None or transfer.kind is not TransferKind.LOAD_ADAPTER:
            return []
        self._cold_starts.load_ended(transfer.adapter_id, now_s)
        for request in self._running.requests:
            if request.adapter_id == transfer.adapter_id:
                request.is_cold = False
        if result.error is None:
            return []
        error = f"the adapter could not be loaded onto the device: {result.error}"
        events = [
            _error_event(request.request_id, "AdapterUnavailableError", error)
            for request in self._requests.values()
            if request.adapter_id == transfer.adapter_id
        ]
        self._end_finished(events, now_s)
        return events


def _error_event(request_id: RequestId, kind: str, error: str) -> RequestEvent:
    """Return the final event of a request that failed."""
    return RequestEvent(request_id, finish_reason=FinishReason.ERROR, error_kind=kind, error=error)
