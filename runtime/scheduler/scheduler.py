"""Plans steps, and applies their results.

Pure policy: no clock, no randomness, no I/O, no tensors. ``schedule`` may be called again before
the results of earlier steps have returned. The ``SchedulerPolicy`` chooses which requests are
admitted and preempted. The ``DeviceMemory`` keeps account of room on the device.
"""

import math
from collections.abc import Iterable, Mapping

from ..errors import RequestError
from ..limits import check_queue, overdue_error
from ..memory.device_memory import DeviceMemory
from ..memory.transfers import OpenLoad
from ..plan import (
    AdapterId,
    RequestId,
    Result,
    StepId,
    StepPlan,
    TransferProgress,
    TransferRead,
    TransferResult,
    WorkersChanged,
)
from ..request import Request, RequestStatus
from .admission import Admission
from .cold import ColdStarts
from .continuation import Continuation
from .decode_gap import DecodeGap
from .events import FinishReason, RequestUpdate, SchedulerCounters
from .limits import SchedulerConfig, check_pin, max_total_tokens
from .policy import PolicyWithLimits, SchedulerPolicy
from .predictor import HistoryPredictor, OutputPredictor
from .recovery import Recovery
from .results import ResultReader
from .running_set import RunningSet
from .step_draft import InFlightStep, StepDraft
from .step_times import StepPace, StepTimes
from .timeline import Timelines
from .waiting_queue import QueueTime, WaitingWork


class Scheduler:
    """Continuous batching with chunked prefill over one memory budget."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulerPolicy,
        memory: DeviceMemory,
        eos_token_ids: Iterable[int],
        cold_starts: ColdStarts | None = None,
        *,
        predictor: OutputPredictor | None = None,
        times: StepTimes | None = None,
        pace: StepPace | None = None,
    ) -> None:
        """Assemble a scheduler.

        Args:
            config: Limits.
            policy: Orders requests.
            memory: Changed by this scheduler alone.
            eos_token_ids: End a request, unless it ignores them.
            cold_starts: None = every request waits until its adapter is on the device.
            predictor: Predicts output lengths; None = by history.
            times: Predicts steps, as in ``PolicyFacts``; gets the duration of each step.
            pace: Corrects predictions by durations of steps; None = no correction.
        """
        self.config = config
        self.memory = memory
        self.counters = SchedulerCounters()
        self._policy = policy
        self._predictor = HistoryPredictor() if predictor is None else predictor
        self.times = times
        self.pace = pace
        self.decode_gap = DecodeGap(config, times, pace)
        self._last_end_s = -math.inf  # of a step
        self.timelines = Timelines(times)
        self._running = RunningSet(memory, config, self.timelines)
        self.running = self._running.requests  # a live view
        self.cold_starts = ColdStarts() if cold_starts is None else cold_starts
        self._continuation = Continuation(
            config, policy, self._running, self.cold_starts, self.counters, self._enqueue
        )
        self.waiting = WaitingWork(memory.cache)
        self._limits = policy if isinstance(policy, PolicyWithLimits) else None
        self._admission = Admission(
            config, policy, self._limits, memory, self._running, self.cold_starts, self.counters, self.waiting
        )
        self._queue_time = QueueTime(config.max_queue_s)
        self._recovery = Recovery(config.max_num_batched_tokens)
        self._results = ResultReader(frozenset(eos_token_ids), self._running, self._recovery, self.counters)
        self._requests: dict[RequestId, Request] = {}  # those that have not ended
        self._in_flight: dict[StepId, InFlightStep] = {}  # oldest first
        self._ended_requests: list[RequestId] = []  # for the next plan
        self._next_step_id = 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Waiting requests, preempted ones included."""
        return len(self._policy)

    @property
    def num_in_flight(self) -> int:
        """Steps without a result yet."""
        return len(self._in_flight)

    @property
    def oldest_step_in_flight(self) -> StepId | None:
        """The step with the next result."""
        return next(iter(self._in_flight), None)

    def policy_counts(self) -> Mapping[str, float]:
        """Return the gauges of a policy with limits of its own, by name."""
        return {} if self._limits is None else self._limits.counts()

    @property
    def requests(self) -> Iterable[Request]:
        """All requests that have not ended."""
        return self._requests.values()

    def has_work(self) -> bool:
        """Whether anything is waiting, running, in flight, or still to be evicted."""
        return bool(self._requests or self._in_flight or self.memory.has_work)

    def add_request(self, request: Request, now_s: float) -> None:
        """Add a request, which waits from now on.

        Raises ``OverloadedError`` if too many wait, ``RequestError`` if it can never be served.
        """
        request_id = request.request_id
        if request_id in self._requests or self._running.is_draining(request_id):
            raise RequestError(f"request id {request_id} is in use", param="request_id")
        check_queue(self.num_waiting, self.config.max_num_waiting)
        request.max_total_tokens = max_total_tokens(request, self.config, self.memory)
        self._predict(request)
        self._admission.arrived(request, now_s)
        self._requests[request_id] = request
        self._queue_time.arrived(request)
        self._enqueue(request, now_s)

    def abort(self, request_id: RequestId, now_s: float) -> RequestUpdate | None:
        """Abort a request. Return its last event; None if the request is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        event = RequestUpdate(request_id, finish_reason=FinishReason.ABORT)
        return self._finish_events([event], now_s)[0]

    def end_overdue(self, now_s: float) -> list[RequestUpdate]:
        """End requests that have waited longer than ``max_queue_s`` to begin."""
        overdue = list(self._queue_time.take_overdue(now_s))
        if not overdue:
            return []
        assert self.config.max_queue_s is not None
        error = overdue_error(self.config.max_queue_s)
        return self._finish_events(
            [_error_event(request.request_id, error.kind, str(error)) for request in overdue], now_s
        )

    def check_pin(self, num_bytes: int, other_bytes: int = 0, replaced: AdapterId | None = None) -> None:
        """Raise ``RequestError`` unless an adapter of ``num_bytes`` may be pinned.

        ``other_bytes``: size of the largest adapter that a request may need at the same time.
        ``replaced``: a version that will be unpinned.
        """
        pinned_bytes = self.memory.pins.num_bytes(without=replaced)
        check_pin(num_bytes, pinned_bytes, other_bytes, self._requests.values(), self.config, self.memory)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed or transferred now.

        Growth comes first, then decode rows, prefill chunks of running requests and new requests.
        """
        draft = StepDraft(self.config, self._recovery, self.decode_gap)
        self.memory.begin_plan(self.num_running, now_s)
        self._continuation.reset_outgrown(draft, now_s)
        if not self.cold_starts.blocks_all_requests():
            self._continuation.squash(draft, now_s)
            may_admit = self._continuation.continue_requests(draft, now_s)
            # If the only running request was preempted, admit it again: no result will come that
            # would lead to another ``schedule``.
            if may_admit or not (self.num_running or self._in_flight):
                self._admission.admit(draft, now_s)
        step_id = StepId(self._next_step_id)
        self.cold_starts.step_closed(step_id, draft.rows, now_s)
        commands = self.memory.commands(now_s)
        step = draft.build(step_id, now_s, commands, tuple(self._ended_requests))
        self.timelines.planned(draft.rows, now_s)
        if step is None:
            return None
        self._next_step_id += 1
        self._ended_requests.clear()
        self._in_flight[step.plan.step_id] = step
        return step.plan

    def update(self, result: Result, now_s: float) -> list[RequestUpdate]:
        """Apply a result. Return events of new tokens and ended requests."""
        if isinstance(result, TransferResult):
            return self._end_transfer(result, now_s)
        if isinstance(result, TransferProgress):
            self.memory.transfers.arrived(result, now_s)
            return []
        if isinstance(result, TransferRead):
            self.cold_starts.files_read(*self.memory.transfers.read(result, now_s))
            return []
        if isinstance(result, WorkersChanged):
            self.cold_starts.workers_changed(result.num_ready)
            return []
        step = self._in_flight.pop(result.step_id, None)
        if step is None:
            return []  # after ``fail_step``
        self.cold_starts.step_ended(result.step_id, now_s)
        if step.plan.sub_batches:
            self._record_duration(step, now_s)
        self._last_end_s = now_s
        self.timelines.computed(result.cpu_wait_s)
        events = self._results.apply(step, result.rows, self._in_flight.values(), now_s)
        return self._finish_events(events, now_s)

    def fail_step(self, step_id: StepId, error: str, now_s: float) -> list[RequestUpdate]:
        """Abandon a step that will not return. Its requests end with ``error``."""
        step = self._in_flight.pop(step_id, None)
        if step is None:
            return []
        self.counters.num_failed_steps += 1
        events = self._results.fail(step, error)
        failed = {event.request_id for event in events}
        for update in step.plan.block_updates:  # also of requests without a row
            request = self._requests.get(update.request_id)
            if request is not None and request.request_id not in failed:
                events.append(_error_event(request.request_id, "StepFailedError", error))
        events = self._finish_events(events, now_s)
        self._ended_requests.extend(step.plan.ended_requests)
        for transfer in step.plan.transfers:
            events += self._end_transfer(TransferResult(transfer.transfer_id, error), now_s)
        self.memory.repeat(step.plan)
        return events

    def wake_at_s(self) -> float | None:
        """Return when ``schedule`` may decide differently without an event; None = never."""
        times_s = [self._policy.wake_at_s(), self._queue_time.wake_at_s(), self.memory.wake_at_s]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _record_duration(self, step: InFlightStep, now_s: float) -> None:
        """Record the time of a step, from its plan or from the end of the step before it."""
        duration_s = now_s - max(step.scheduled_at_s, self._last_end_s)
        if self.times is not None:
            self.times.step_ended(step.plan.num_tokens, duration_s)
        if self.pace is not None:
            self.pace.step_ended(step.plan, step.rows, duration_s)

    def _predict(self, request: Request) -> None:
        """Set the predicted output length, within the request's limit."""
        if request.num_predicted_output_tokens < 1:  # else the client gave one
            request.num_predicted_output_tokens = self._predictor.predict(request)
        most_tokens = request.max_total_tokens - request.num_prompt_tokens
        request.num_predicted_output_tokens = min(max(1, request.num_predicted_output_tokens), most_tokens)

    def _enqueue(self, request: Request, now_s: float) -> None:
        self.waiting.add(request)
        self._policy.add(request, now_s)

    def _finish_events(self, events: list[RequestUpdate], now_s: float) -> list[RequestUpdate]:
        for index, event in enumerate(events):
            if event.finish_reason is None and event.request_id not in self.timelines.open_ids:
                continue  # neither its first token nor its end
            events[index] = self._complete(event, now_s)
            if event.finish_reason is not None:
                request = self._requests[event.request_id]
                if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self._predictor.ended(request)
                self._end(request, now_s)
        return events

    def _end(self, request: Request, now_s: float) -> None:
        del self._requests[request.request_id]
        if request.status is RequestStatus.WAITING:
            self._policy.remove(request)
            self.waiting.remove(request)
            request.status = RequestStatus.ENDED
        else:
            self._running.stop(request, RequestStatus.ENDED)
        self._policy.ended(request, now_s)
        self.cold_starts.discard(request.request_id)
        self._recovery.discard(request.request_id)
        if request.is_announced:
            self._ended_requests.append(request.request_id)

    def _complete(self, event: RequestUpdate, now_s: float) -> RequestUpdate:
        """Add timing and cache hits to events with the first token, and totals to final events."""
        request = self._requests[event.request_id]
        # All of its output tokens are in this event.
        is_first = 0 < request.num_output_tokens == len(event.token_ids)
        event = event._replace(timing=self.timelines.end(event.request_id, now_s))
        if event.finish_reason is not None:
            event = event._replace(
                num_preemptions=request.tally.num_preemptions, num_squashes=request.tally.num_squashes
            )
        if not is_first:
            return event
        return event._replace(
            num_cached_tokens=request.found.num_cached_tokens or 0,
            num_host_cached_tokens=request.found.num_host_cached_tokens,
            cold_start=self.cold_starts.on_first_token(event.request_id, now_s),
        )

    def _end_transfer(self, result: TransferResult, now_s: float) -> list[RequestUpdate]:
        """Apply the end of a transfer. A failed load fails all requests of the adapter."""
        transfer = self.memory.end_transfer(result, now_s)
        if not isinstance(transfer, OpenLoad):
            return []
        adapter_id = transfer.command.adapter_id
        for request in self._running.requests:
            if request.adapter_id == adapter_id:
                request.is_cold = False
        if result.error is None:
            return []
        error = f"the adapter could not be loaded onto the device: {result.error}"
        kind = result.error_kind or "AdapterUnavailableError"
        events = [
            _error_event(request.request_id, kind, error)
            for request in self._requests.values()
            if request.adapter_id == adapter_id
        ]
        return self._finish_events(events, now_s)


def _error_event(request_id: RequestId, kind: str, error: str) -> RequestUpdate:
    """Return the final event of a request that failed."""
    return RequestUpdate(request_id, finish_reason=FinishReason.ERROR, error_kind=kind, error=error)
