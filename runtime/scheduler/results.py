"""Applies step results to requests: tokens, retries and failures, row by row."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ..plan import Outcome, RequestId, RetryCause, RowResult
from ..request import Request, RequestStatus
from .events import FinishReason, RequestUpdate, SchedulerCounters
from .recovery import Recovery
from .running_set import RunningSet
from .step_draft import InFlightStep

# With its start position, tokens, whether it sampled, whether its sub-batch had no other row.
_Row = tuple[Request, int, int, bool, bool]


@dataclass(frozen=True, slots=True)
class ResultReader:
    """Applies results, and returns events. The caller ends the requests of final events.

    Results are dropped if the request has ended, or if the row follows one that is retried.
    """

    _eos_token_ids: frozenset[int]
    _running: RunningSet  # records returned rows
    _recovery: Recovery  # records rows without a result
    _counters: SchedulerCounters

    def apply(
        self,
        step: InFlightStep,
        results: Iterable[RowResult],
        later_steps: Collection[InFlightStep],
        now_s: float,
    ) -> list[RequestUpdate]:
        """Apply the results of one step. Return its events.

        ``later_steps``: steps that are still in flight.
        """
        result_of = {result.request_id: result for result in results}
        events: list[RequestUpdate] = []
        ended, tokens, voided = RequestStatus.ENDED, Outcome.TOKENS, step.voided  # looked up once
        is_recovering, kept_size = bool(self._recovery), self._running.kept_size
        self._running.end_step(step.rows)
        for request, start, num_tokens, has_sample, was_alone in _rows(step):
            request_id = request.request_id
            if request.status is ended or request_id in voided:
                continue
            result = result_of.get(request_id)
            if result is None or result.outcome is tokens:
                if is_recovering:
                    self._recovery.discard(request_id)
                end = start + num_tokens
                if start < len(request.prompt_token_ids):
                    self._count_prompt(request, end)
                if end >= request.num_kept_tokens + kept_size:
                    self._running.computed(request, end, now_s)
                if has_sample:
                    events.append(self._take_tokens(request, result))
            elif result.outcome is Outcome.RETRY and self._recovery.may_retry(
                request, start, result.cause, was_alone=was_alone
            ):
                self._counters.num_retried_rows += 1
                if result.cause is RetryCause.MEMORY:
                    self._recovery.lower_limit(_sub_batch_tokens(step, request_id))
                _roll_back(request, start, later_steps)
            else:
                error = result.error or "the step gave no reason"
                events.append(_failure(request, error, result.error_kind))
        return events

    def fail(self, step: InFlightStep, error: str) -> list[RequestUpdate]:
        """Fail all requests of a step that never returns. Return their events."""
        events: list[RequestUpdate] = []
        self._running.end_step(step.rows)
        for request, *_ in _rows(step):
            if request.status is not RequestStatus.ENDED:
                events.append(_failure(request, error))
        return events

    def _take_tokens(self, request: Request, result: RowResult | None) -> RequestUpdate:
        """Append the sampled token and forced ones, up to one that ends the request.

        The event is final if one does.
        """
        if result is None or not result.token_ids:
            return _failure(request, "the executor returned no token for a row that samples")
        request.num_in_flight_samples -= 1
        token_ids, output, sampling = result.token_ids, request.output_token_ids, request.sampling
        ends = frozenset[int]() if sampling.ignore_eos else self._eos_token_ids
        stops, reason = sampling.stop_token_ids, None
        num_left = request.max_total_tokens - len(request.prompt_token_ids) - len(output)
        for num_tokens, token_id in enumerate(token_ids, start=1):
            output.append(token_id)
            # End tokens among the first ``min_tokens`` do not count. The sampler draws none there.
            if (token_id in ends or token_id in stops) and len(output) > sampling.min_tokens:
                reason = FinishReason.STOP
                break
            if num_tokens >= num_left:
                reason = FinishReason.LENGTH
                break
        if num_tokens > 1:
            request.num_known_tokens += num_tokens - 1  # the sampled one counts already
        self._counters.generated_tokens += num_tokens
        if result.is_last and num_tokens == len(token_ids):
            reason = FinishReason.STOP
        is_end = reason is not None and (token_id in self._eos_token_ids or token_id in stops)
        stop_token_id = token_id if is_end and reason is FinishReason.STOP else None
        event = RequestUpdate(
            request.request_id, token_ids[:num_tokens], result.logprobs, reason, stop_token_id
        )
        if result.prompt_logprobs is None:
            return event
        return event._replace(prompt_logprobs=result.prompt_logprobs)

    def _count_prompt(self, request: Request, end: int) -> None:
        """Count prompt tokens before position ``end``, each once."""
        num_counted = request.tally.num_counted_prompt_tokens
        end = min(end, len(request.prompt_token_ids))
        if num_counted < end:
            request.tally.num_counted_prompt_tokens = end
            self._counters.prompt_tokens_computed += end - num_counted


def _rows(step: InFlightStep) -> Iterator[_Row]:
    for batch, requests in zip(step.plan.sub_batches, step.rows, strict=True):
        yield from zip(
            requests,
            batch.start_positions,
            batch.num_tokens,
            batch.samples,
            (len(requests) == 1,) * len(requests),
            strict=True,
        )


def _sub_batch_tokens(step: InFlightStep, request_id: RequestId) -> int:
    (batch,) = (one for one in step.plan.sub_batches if request_id in one.request_ids)
    return sum(batch.num_tokens)


def _roll_back(request: Request, start: int, later_steps: Iterable[InFlightStep]) -> None:
    """Compute ``request`` again from position ``start``, once no step in flight uses it.

    Its rows in ``later_steps`` were computed from invalid values, so their results are void.
    """
    request.num_known_tokens -= request.num_in_flight_samples
    request.num_in_flight_samples = 0
    if request.num_in_flight_steps:
        request.is_held = True
        for step in later_steps:
            step.voided.add(request.request_id)
    request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
    request.num_computed_tokens = start  # a preempted one starts from 0 when it runs again


def _failure(request: Request, error: str, kind: str | None = None) -> RequestUpdate:
    """Return the final event of a request with a failed row."""
    return RequestUpdate(
        request.request_id,
        finish_reason=FinishReason.ERROR,
        error_kind=kind or "StepFailedError",
        error=error,
    )
