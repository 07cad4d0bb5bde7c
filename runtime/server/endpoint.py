"""How a request that generates is answered: body, names, outputs, disconnects, errors.

Subclasses know one body and one form of answer each. An endpoint is an ASGI application, because
streams are written without a response object in between.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from ..errors import RequestError
from ..frontend.outputs import CompletionOutput, RequestOutput
from ..limits import check_num_output_tokens, check_num_sequences
from ..tasks import cancel_all
from .body import read_body
from .errors import ClientGoneError
from .gateways import GatewayRequest
from .generation_request import ParsedRequest
from .keep_alive import kept_alive
from .metrics import ServerMetrics
from .open_requests import ended_by_disconnect
from .request_ids import answer_id
from .responses import (
    AdapterStartInfo,
    Answer,
    ChoiceTiming,
    PromptLogprobs,
    PromptTokens,
    Timing,
    TokenIds,
    usage_of,
)
from .sse import DONE_EVENT, ChunkEncoder, ResponseWriter
from .state import ServerState


class PromptRun:
    """One prompt of an HTTP request: its latest output, and when its outputs came."""

    __slots__ = ("_adapter", "_last_s", "_latest", "_metrics", "first_token_s", "started_s")

    def __init__(self, metrics: ServerMetrics, adapter_name: str | None) -> None:
        self._metrics = metrics
        self._adapter = metrics.adapters.of(adapter_name)
        self._latest: RequestOutput | None = None
        self.started_s = metrics.clock()
        self.first_token_s: float | None = None  # since the start
        self._last_s = self.started_s

    @property
    def latest(self) -> RequestOutput:
        """The last output of a prompt that has ended."""
        assert self._latest is not None
        return self._latest

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
        if output.finished:
            total_s = now_s - self.started_s
            metrics.request_s.observe(total_s)
            metrics.requests.ended(output, self.first_token_s, total_s)
            for choice in output.outputs:
                metrics.finished[choice.finish_reason or "abort"] += 1


class GenerationEndpoint(ABC):
    """Answers ``POST`` requests by generating."""

    id_prefix: str
    prompt_field: str  # the field of the body that holds the prompt

    def __init__(self, state: ServerState) -> None:
        self.state = state

    @abstractmethod
    async def parse(self, body: bytes, request_id: str) -> ParsedRequest:
        """Parse and check ``body``. Raises ``RequestError``."""

    @abstractmethod
    def chunk_encoder(self, request: ParsedRequest) -> ChunkEncoder:
        """Return an encoder for the stream that answers ``request``."""

    @abstractmethod
    def choices(
        self, request: ParsedRequest, prompt_index: int, output: RequestOutput
    ) -> list[msgspec.Struct]:
        """Return the finished choices of one prompt."""

    def prompt_token_ids(self, request: ParsedRequest, output: RequestOutput) -> TokenIds:
        """Return the prompt's tokens, if the answer shows them beside its choices."""
        return msgspec.UNSET

    def prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs:
        """Return the prompt's log-probabilities, if the answer shows them beside its choices."""
        return msgspec.UNSET

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        writer = ResponseWriter(scope, receive, send)
        origin: GatewayRequest | None = None
        try:
            origin = self.state.gateways.open(scope["headers"])
            self.state.check_accepting()
            with self.state.open_requests.track() as request:
                body = await read_body(scope, receive, self.state.settings.limits.max_body_bytes)
                with ended_by_disconnect(receive, request):
                    await self._answer(body, writer, origin)
        except ClientGoneError:
            return
        except Exception as exc:
            await writer.write_error(exc)
        finally:
            if origin is not None:
                origin.ended()

    async def _answer(
        self, body: bytes, writer: ResponseWriter, origin: GatewayRequest | None
    ) -> None:
        request_id = answer_id(self.id_prefix, writer.request_id)
        writer.request_id = writer.request_id or request_id
        request = await self.parse(body, request_id)
        if origin is not None:
            origin.expects([_prompt_id(request, index) for index in range(len(request.prompts))])
        writer.wants_timing = bool(request.body.return_timing)
        try:
            self._check_size(request)
            if request.body.stream:
                await self._answer_stream(request, writer)
            else:
                await self._answer_whole(request, writer)
        except RequestError as exc:
            if exc.param == "prompt":
                exc.param = self.prompt_field
            raise

    def check_num_sequences(self, num_prompts: int, num_choices: int) -> None:
        """Raise ``TooManySequencesError`` for more than can ever run and wait.

        Subclasses ask before they look at each prompt.
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

    async def _answer_stream(self, request: ParsedRequest, writer: ResponseWriter) -> None:
        encoder = self.chunk_encoder(request)
        with kept_alive(writer, self.state.settings.sse_keep_alive_s):
            runs = await self._generate(request, encoder, writer)
        last = encoder.last_event(
            usage_of(run.latest for run in runs) if request.body.wants_stream_usage else None,
            self._timing_of(runs) if request.body.return_timing else None,
        )
        await writer.end_events(last + DONE_EVENT)

    async def _answer_whole(self, request: ParsedRequest, writer: ResponseWriter) -> None:
        runs = await self._generate(request, None, writer)
        envelope = request.envelope
        answer = Answer(
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
        await writer.write_json(msgspec.json.encode(answer))

    async def _generate(
        self, request: ParsedRequest, encoder: ChunkEncoder | None, writer: ResponseWriter
    ) -> list[PromptRun]:
        """Run all prompts to their end, and write what ``encoder``, if any, makes of their outputs.

        Cancelling it aborts every prompt; so does the failure of one of them, which is raised.
        """
        runs = [PromptRun(self.state.metrics, request.adapter_name) for _ in request.prompts]
        if len(runs) == 1:
            await self._run_prompt(request, 0, runs[0], encoder, writer)
            return runs
        tasks = [
            asyncio.ensure_future(self._run_prompt(request, index, run, encoder, writer))
            for index, run in enumerate(runs)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_all(*tasks)
        return runs

    async def _run_prompt(
        self,
        request: ParsedRequest,
        index: int,
        run: PromptRun,
        encoder: ChunkEncoder | None,
        writer: ResponseWriter,
    ) -> None:
        outputs = self.state.engine.generate(
            request.prompts[index],
            request.sampling,
            _prompt_id(request, index),
            lora_request=request.adapter_name,
            cache_salt=request.body.cache_salt or "",
            predicted_output_tokens=request.body.predicted_output_tokens,
            add_special_tokens=request.body.add_special_tokens is not False,
        )
        async with aclosing(outputs):
            async for output in outputs:
                run.observe(output)
                if encoder is not None:
                    events = encoder.encode(index, output)
                    if events:  # while they are written, further outputs are merged into one
                        await writer.write_events(events)

    def _timing_of(self, runs: Sequence[PromptRun]) -> Timing:
        """Return when things happened in an HTTP request that ends now."""
        total_s = self.state.metrics.clock() - runs[0].started_s
        first_s = min(
            (run.first_token_s for run in runs if run.first_token_s is not None), default=total_s
        )
        starts = [
            None
            if choice.adapter_start is None
            else AdapterStartInfo(choice.adapter_start.strategy, choice.adapter_start.reason)
            for run in runs
            for choice in run.latest.outputs
        ]
        timings = [_choice_timing(run, choice) for run in runs for choice in run.latest.outputs]
        inside_s = min((one.time_to_first_token_s for one in timings if one), default=first_s)
        return Timing(first_s, total_s, max(0.0, first_s - inside_s), timings, starts)


def _prompt_id(request: ParsedRequest, index: int) -> str:
    """As which the engine knows one prompt of a request."""
    return request.envelope.id if len(request.prompts) == 1 else f"{request.envelope.id}-{index}"


def _choice_timing(run: PromptRun, choice: CompletionOutput) -> ChoiceTiming | None:
    timing = choice.timing
    if timing is None:
        return None
    num_found, num_copied = choice.num_cached_tokens, timing.num_host_cached_tokens
    num_computed = len(run.latest.prompt_token_ids) - num_found
    prompt_tokens = PromptTokens(num_computed, num_found - num_copied, num_copied)
    return ChoiceTiming.of(timing, prompt_tokens, choice.num_tokens)
