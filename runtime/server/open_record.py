"""A request while it is answered, and its record when it has ended.

It has ended when its answer has ended and the engine has ended each of its prompts: if the client
leaves, a prompt is computed for a moment longer.
"""

import time
from collections.abc import Callable

from ..errors import CorunError
from ..frontend.outputs import CompletionOutput, RequestOutput
from .errors import ClientGoneError
from .generation_request import ParsedRequest
from .metrics import ServerMetrics
from .request_records import ABORT, ERROR, FINISHED, REFUSED, ChoiceRecord, HttpRequestRecord, PromptRecord

_CLIENT_GONE = "client_gone"  # error code of a request that its client left
_MAX_NAME_CHARS = 256  # of the model's name as the request gives it
_MIN_SERVER_STATUS = 500

OnRecord = Callable[[HttpRequestRecord], None]


class PromptRun:
    """One prompt of an HTTP request: its latest output, and the times of its outputs."""

    def __init__(self, metrics: ServerMetrics, adapter_name: str | None, on_end: Callable[[], None]) -> None:
        """``on_end`` is called when it has ended in the engine."""
        self._metrics = metrics
        self._adapter = metrics.adapters.of(adapter_name)
        self._on_end = on_end
        self._latest: RequestOutput | None = None
        self._end: RequestOutput | None = None  # the engine's final output
        self._end_s = 0.0
        self._is_open = False
        self.started_s = metrics.clock()
        self.first_token_s: float | None = None  # since the start
        self._last_s = self.started_s

    @property
    def latest(self) -> RequestOutput:
        """The last output of a prompt that has ended."""
        assert self._latest is not None
        return self._latest

    @property
    def is_open(self) -> bool:
        """Whether it was sent to the engine and has not ended there."""
        return self._is_open

    def opened(self) -> None:
        """It is sent to the engine."""
        self._is_open = True

    def ended(self, output: RequestOutput) -> None:
        """It has ended in the engine, with ``output``."""
        self._is_open, self._end, self._end_s = False, output, self._metrics.clock()
        self._on_end()

    def observe(self, output: RequestOutput) -> None:
        """Count the next output."""
        self._latest = output
        metrics = self._metrics
        now_s = metrics.clock()
        most_new = 0
        for choice in output.outputs:
            num_new = len(choice.new_token_ids)
            metrics.generation_tokens += num_new
            if self._adapter is not None:
                self._adapter.generation_tokens += num_new
            most_new = max(most_new, num_new)
        since_last_s, self._last_s = now_s - self._last_s, now_s
        if self.first_token_s is None:
            self.first_token_s = since_last_s
            metrics.first_token_s.observe(since_last_s)
            metrics.prompt_tokens += len(output.prompt_token_ids)
            if self._adapter is not None:
                self._adapter.first_token_s.observe(since_last_s)
                self._adapter.prompt_tokens += len(output.prompt_token_ids)
        elif most_new:
            # Outputs that were merged on the way hold several tokens per choice.
            metrics.inter_token_s.observe(since_last_s / most_new, weight=most_new)

    def record(self, outcome: str) -> PromptRecord | None:
        """Return its record, or None if it was never sent to the engine."""
        end = self._end
        if end is None:
            return None
        timings = [choice.timing for choice in end.outputs if choice.timing is not None]
        is_answered = self._latest is not None and self._latest.finished
        versions = [timing.adapter_version for timing in timings if timing.adapter_version]
        return PromptRecord(
            prompt_tokens=len(end.prompt_token_ids),
            cached_tokens=min(choice.num_cached_tokens for choice in end.outputs),
            host_cached_tokens=min((one.num_host_cached_tokens for one in timings), default=0),
            adapter_version=versions[0] if versions else None,
            first_token_s=self.first_token_s,
            total_s=(self._last_s if is_answered else self._end_s) - self.started_s,
            choices=[_choice_record(choice, outcome) for choice in end.outputs],
        )


def _choice_record(choice: CompletionOutput, outcome: str) -> ChoiceRecord:
    timing, start = choice.timing, choice.adapter_start
    reason = choice.finish_reason
    assert reason is not None, "it has ended"
    return ChoiceRecord(
        finish_reason=REFUSED if (reason, outcome) == (ERROR, REFUSED) else reason,
        output_tokens=choice.num_tokens,
        predicted_output_tokens=None if timing is None else timing.num_predicted_output_tokens,
        parts_s={} if timing is None else timing.parts,
        start_strategy=None if start is None else start.strategy,
        start_reason=None if start is None else start.reason,
        preemptions=0 if timing is None else timing.num_preemptions,
        squashes=0 if timing is None else timing.num_squashes,
    )


class OpenRecord:
    """The record of a request that is being answered."""

    def __init__(self, request_id: str, route: str, metrics: ServerMetrics, on_record: OnRecord) -> None:
        self.request_id = request_id
        self._record = HttpRequestRecord(arrived_at=time.time(), id=request_id, route=route)
        self._metrics = metrics
        self._on_record = on_record
        self._started_s = metrics.clock()
        self._runs: list[PromptRun] = []
        self._has_ended = False

    def read(self, model: str | None, *, stream: bool) -> None:
        """Its body has been read, with these fields."""
        self._record.model = None if model is None else model[:_MAX_NAME_CHARS]
        self._record.stream = stream

    def begin(self, request: ParsedRequest) -> list[PromptRun]:
        """Return a run for each of its prompts, which will be sent next."""
        adapter = self._record.adapter = request.adapter_name
        self._runs = [PromptRun(self._metrics, adapter, self._publish) for _ in request.prompts]
        return self._runs

    def end(self, status: int | None, error: BaseException | None) -> None:
        """Its answer has ended; ``error``: the reason, if it failed."""
        record = self._record
        record.status, record.outcome, record.error = status, _outcome_of(error), _code_of(error)
        record.total_s = self._metrics.clock() - self._started_s
        self._has_ended = True
        self._publish()

    def _publish(self) -> None:
        """Publish the record once the request has ended."""
        if not self._has_ended or any(run.is_open for run in self._runs):
            return
        prompts = [run.record(self._record.outcome) for run in self._runs]
        self._record.prompts = [one for one in prompts if one is not None]
        self._runs = []
        self._on_record(self._record)


def _outcome_of(error: BaseException | None) -> str:
    match error:
        case None:
            return FINISHED
        case CorunError():
            return REFUSED if error.status < _MIN_SERVER_STATUS else ERROR
        case ClientGoneError():
            return ABORT
        case Exception():  # a bug of corun
            return ERROR
        case _:  # cancelled because the server ends
            return ABORT


def _code_of(error: BaseException | None) -> str | None:
    match error:
        case None:
            return None
        case CorunError():
            return error.code
        case ClientGoneError():
            return _CLIENT_GONE
        case _:
            return CorunError.code
