"""Answers requests that generate: body, names, outputs, disconnects, errors.

Each subclass knows one body and one form of answer. An endpoint is an ASGI application, because
streams are written without a response object in between.

Each request has a record. It has ended when its answer has ended and the engine has ended each of
its prompts: if the client leaves, a prompt is computed for a moment longer.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

import msgspec
from starlette.types import Receive, Scope, Send

from ..errors import CorunError, RequestError
from ..frontend.outputs import CompletionOutput, RequestOutput
from ..frontend.tokenizer import begin_flow
from ..limits import check_num_output_tokens, check_num_sequences
from ..tasks import cancel_all
from .body import HeldBody, read_body
from .errors import ClientGoneError
from .generation_request import ParsedRequest
from .metrics import ServerMetrics
from .open_requests import GatewayRequest, answer_id, ended_by_disconnect
from .request_records import ABORT, ERROR, FINISHED, REFUSED, ChoiceRecord, HttpRequestRecord, PromptRecord
from .responses import Answer, ChoiceTiming, PromptLogprobs, PromptTokens, Timing, TokenIds, usage_of
from .sse import ResponseWriter, StreamEncoder
from .state import ServerState

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
        self.is_open = False  # whether it was sent to the engine and has not ended there
        self.started_s = metrics.clock()
        self.first_token_s: float | None = None  # since the start
        self._last_s = self.started_s

    @property
    def latest(self) -> RequestOutput:
        assert self._latest is not None
        return self._latest

    def opened(self) -> None:
        """It is sent to the engine."""
        self.is_open = True

    def ended(self, output: RequestOutput) -> None:
        self.is_open, self._end, self._end_s = False, output, self._metrics.clock()
        self._on_end()

    def observe(self, output: RequestOutput) -> None:
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


_COMMENT = b": keep-alive\n\n"


@contextmanager
def kept_alive(writer: ResponseWriter, interval_s: float) -> Iterator[None]:
    """Write a comment whenever ``writer`` has been silent for ``interval_s``; 0 = never."""
    if interval_s == 0:
        yield
        return
    task = asyncio.ensure_future(_keep_alive(writer, interval_s))
    try:
        yield
    finally:
        task.cancel()


async def _keep_alive(writer: ResponseWriter, interval_s: float) -> None:
    while True:
        rest_s = interval_s - writer.silent_s
        if rest_s > 0:
            await asyncio.sleep(rest_s)
        else:
            await writer.write_events(_COMMENT)


class GenerationEndpoint(ABC):
    """Answers ``POST`` requests by generating."""

    id_prefix: str
    prompt_field: str  # the field of the body that holds the prompt

    def __init__(self, state: ServerState) -> None:
        self.state = state

    @abstractmethod
    async def parse(self, body: bytes, record: OpenRecord) -> ParsedRequest:
        """Parse and check ``body``, and enter its fields into ``record``.

        Raises ``RequestError``.
        """

    @abstractmethod
    def stream_encoder(self, request: ParsedRequest) -> StreamEncoder:
        """Return an encoder for the stream that answers ``request``."""

    @abstractmethod
    def choices(
        self, request: ParsedRequest, prompt_index: int, output: RequestOutput
    ) -> list[msgspec.Struct]:
        """Return the finished choices of one prompt."""

    def prompt_token_ids(self, request: ParsedRequest, output: RequestOutput) -> TokenIds:
        """Return the prompt's tokens, if the answer has them beside its choices."""
        return msgspec.UNSET

    def prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs:
        """Return the prompt's log-probabilities, if the answer has them beside its choices."""
        return msgspec.UNSET

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        writer = ResponseWriter(scope, receive, send)
        request_id = answer_id(self.id_prefix, writer.request_id)
        writer.request_id = writer.request_id or request_id
        record = OpenRecord(request_id, scope["path"], self.state.metrics, self.state.on_record)
        origin: GatewayRequest | None = None
        error: BaseException | None = None
        try:
            origin = self.state.gateways.open(scope["headers"])
            self.state.check_accepting()
            with self.state.open_requests.track() as request:
                begin_flow()
                with HeldBody(self.state.body_room) as held:
                    max_bytes = self.state.settings.limits.max_body_bytes
                    body = await read_body(scope, receive, max_bytes, held)
                    with ended_by_disconnect(receive, request):
                        parsed = await self.parse(body, record)
                        body = b""  # an answer may take long
                        held.release()
                        await self._answer(parsed, writer, origin, record)
        except ClientGoneError as exc:
            error = exc
        except Exception as exc:
            error = exc
            await writer.write_error(exc)
        except BaseException as exc:
            error = exc
            raise
        finally:
            if origin is not None:
                origin.ended()
            record.end(writer.status, error)
            del error  # its traceback has this frame: a cycle would keep the body

    async def _answer(
        self,
        request: ParsedRequest,
        writer: ResponseWriter,
        origin: GatewayRequest | None,
        record: OpenRecord,
    ) -> None:
        if origin is not None:
            origin.expects([_prompt_id(request, index) for index in range(len(request.prompts))])
        writer.wants_timing = bool(request.body.return_timing)
        try:
            self._check_size(request)
            if request.body.stream:
                await self._answer_stream(request, writer, record)
            else:
                await self._answer_whole(request, writer, record)
        except RequestError as exc:
            if exc.param == "prompt":
                exc.param = self.prompt_field
            raise

    def check_num_sequences(self, num_prompts: int, num_choices: int) -> None:
        """Raise ``TooManySequencesError`` for more sequences than can ever run and wait.

        Subclasses call this before they look at each prompt.
        """
        check_num_sequences(
            num_prompts,
            num_choices,
            max_num_seqs=self.state.settings.max_num_seqs,
            max_num_waiting=self.state.engine.get_model_info().max_num_waiting,
        )

    def _check_size(self, request: ParsedRequest) -> None:
        max_model_len = self.state.engine.get_model_info().max_model_len
        max_tokens = request.sampling.max_tokens
        check_num_output_tokens(
            len(request.prompts),
            request.sampling.n,
            max_model_len if max_tokens is None else min(max_tokens, max_model_len),
            max_request_tokens=self.state.settings.limits.max_request_tokens,
        )

    async def _answer_stream(
        self, request: ParsedRequest, writer: ResponseWriter, record: OpenRecord
    ) -> None:
        encoder = self.stream_encoder(request)
        writer.error_event = encoder.error_event
        with kept_alive(writer, self.state.settings.sse_keep_alive_s):
            runs = record.begin(request)
            await self._generate(request, runs, encoder, writer)
        last = encoder.end(
            usage_of(run.latest for run in runs) if request.body.wants_stream_usage else None,
            self._timing_of(runs) if request.body.return_timing else None,
        )
        await writer.end_events(last)

    async def _answer_whole(self, request: ParsedRequest, writer: ResponseWriter, record: OpenRecord) -> None:
        runs = record.begin(request)
        await self._generate(request, runs, None, writer)
        await writer.write_json(msgspec.json.encode(self.answer(request, runs)))

    def answer(self, request: ParsedRequest, runs: Sequence[PromptRun]) -> msgspec.Struct:
        envelope = request.envelope
        return Answer(
            id=envelope.id,
            object=envelope.object,
            created=envelope.created,
            model=envelope.model,
            choices=[
                choice
                for index, run in enumerate(runs)
                for choice in self.choices(request, index, run.latest)
            ],
            usage=usage_of(run.latest for run in runs),
            timing=self._timing_of(runs) if request.body.return_timing else msgspec.UNSET,
            prompt_token_ids=self.prompt_token_ids(request, runs[0].latest),
            prompt_logprobs=self.prompt_logprobs(runs[0].latest),
        )

    async def _generate(
        self,
        request: ParsedRequest,
        runs: Sequence[PromptRun],
        encoder: StreamEncoder | None,
        writer: ResponseWriter,
    ) -> None:
        """Run all prompts to their end, and write the events of ``encoder``, if there is one.

        Cancellation aborts all prompts; so does the failure of one prompt, which is raised.
        """
        if len(runs) == 1:
            await self._run_prompt(request, 0, runs[0], encoder, writer)
            return
        tasks = [
            asyncio.ensure_future(self._run_prompt(request, index, run, encoder, writer))
            for index, run in enumerate(runs)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_all(*tasks)

    async def _run_prompt(
        self,
        request: ParsedRequest,
        index: int,
        run: PromptRun,
        encoder: StreamEncoder | None,
        writer: ResponseWriter,
    ) -> None:
        outputs = self.state.engine.generate(
            request.prompts[index],
            request.sampling,
            _prompt_id(request, index),
            lora_request=request.adapter,
            cache_salt=request.body.cache_salt or "",
            predicted_output_tokens=request.body.predicted_output_tokens,
            add_special_tokens=request.body.add_special_tokens is not False,
            watch=run,
        )
        async with aclosing(outputs):
            async for output in outputs:
                run.observe(output)
                if encoder is not None:
                    events = encoder.encode(index, output)
                    if events:  # outputs that arrive during the write are merged into one
                        await writer.write_events(events)

    def _timing_of(self, runs: Sequence[PromptRun]) -> Timing:
        """Return the timing of an HTTP request that ends now."""
        total_s = self.state.metrics.clock() - runs[0].started_s
        first_s = min((run.first_token_s for run in runs if run.first_token_s is not None), default=total_s)
        starts = [choice.adapter_start for run in runs for choice in run.latest.outputs]
        timings = [_choice_timing(run, choice) for run in runs for choice in run.latest.outputs]
        inside_s = min((one.time_to_first_token_s for one in timings if one), default=first_s)
        return Timing(first_s, total_s, max(0.0, first_s - inside_s), timings, starts)


def _prompt_id(request: ParsedRequest, index: int) -> str:
    return request.envelope.id if len(request.prompts) == 1 else f"{request.envelope.id}-{index}"


def _choice_timing(run: PromptRun, choice: CompletionOutput) -> ChoiceTiming | None:
    timing = choice.timing
    if timing is None:
        return None
    num_found, num_copied = choice.num_cached_tokens, timing.num_host_cached_tokens
    num_computed = len(run.latest.prompt_token_ids) - num_found
    prompt_tokens = PromptTokens(num_computed, num_found - num_copied, num_copied)
    return ChoiceTiming.of(timing, prompt_tokens, choice.num_tokens)
