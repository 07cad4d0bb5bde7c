"""The way of every request that generates: body, names, disconnects, errors.

Subclasses know one body and one form of answer each. An endpoint is an ASGI application, because
streams are written without a response object in between.
"""

import uuid
from abc import ABC, abstractmethod

import msgspec
from starlette.types import Receive, Scope, Send

from ..errors import RequestError
from ..frontend.outputs import RequestOutput
from ..limits import check_num_sequences
from .body import read_body
from .chunks import ChunkEncoder, Envelope
from .errors import ClientGoneError
from .generation import Generation, final_outputs, run, timing_of, usage_of
from .lifecycle import ended_by_disconnect
from .responses import Answer
from .sse import DONE_EVENT, EventStream
from .state import ServerState


class Form(ABC):
    """One parsed request: what to generate and how to write the answer."""

    generation: Generation
    envelope: Envelope
    stream: bool
    stream_usage: bool
    timing: bool  # whether times are to be reported

    @abstractmethod
    def chunk_encoder(self) -> ChunkEncoder:
        """Return a fresh encoder for a stream."""

    @abstractmethod
    def choices(self, prompt_index: int, output: RequestOutput) -> list[msgspec.Struct]:
        """Return the finished choices of one prompt."""


class GenerationEndpoint(ABC):
    """Answers ``POST`` requests by generating."""

    id_prefix: str
    prompt_field: str  # the field of the body that holds the prompt

    def __init__(self, state: ServerState) -> None:
        self.state = state

    @abstractmethod
    async def read_form(self, body: bytes, request_id: str) -> Form:
        """Parse ``body``. Raises ``RequestError``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        stream = EventStream(scope, receive, send)
        try:
            self.state.check_accepting()
            with self.state.open_requests.track() as request:
                body = await read_body(scope, receive, self.state.settings.max_body_bytes)
                with ended_by_disconnect(receive, request):
                    await self._answer(body, stream)
        except ClientGoneError:
            return
        except Exception as exc:
            await stream.fail(exc)

    async def _answer(self, body: bytes, stream: EventStream) -> None:
        request_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        stream.request_id = request_id
        form = await self.read_form(body, request_id)
        try:
            self._check_size(form.generation)
            if form.stream:
                await self._answer_stream(form, stream)
            else:
                await self._answer_whole(form, stream)
        except RequestError as exc:
            if exc.param == "prompt":
                exc.param = self.prompt_field
            raise

    def _check_size(self, generation: Generation) -> None:
        check_num_sequences(
            len(generation.prompts),
            generation.sampling.n,
            max_num_seqs=self.state.settings.max_num_seqs,
            max_num_waiting=self.state.engine.get_model_info().max_num_waiting,
        )

    async def _answer_stream(self, form: Form, stream: EventStream) -> None:
        encoder = form.chunk_encoder()
        metrics = self.state.metrics

        async def take(index: int, output: RequestOutput) -> None:
            events = encoder.encode(index, output)
            if events:
                await stream.write(events)

        runs = await run(self.state.engine, form.generation, metrics, take)
        last = encoder.last_event(
            usage_of(final_outputs(runs)) if form.stream_usage else None,
            timing_of(runs, metrics.clock()) if form.timing else None,
        )
        await stream.close(last + DONE_EVENT)

    async def _answer_whole(self, form: Form, stream: EventStream) -> None:
        metrics = self.state.metrics
        runs = await run(self.state.engine, form.generation, metrics, _take_nothing)
        outputs = final_outputs(runs)
        envelope = form.envelope
        answer = Answer(
            id=envelope.id,
            object=envelope.object,
            created=envelope.created,
            model=envelope.model,
            choices=[
                choice
                for index, output in enumerate(outputs)
                for choice in form.choices(index, output)
            ],
            usage=usage_of(outputs),
            timing=timing_of(runs, metrics.clock()) if form.timing else msgspec.UNSET,
        )
        await stream.reply(msgspec.json.encode(answer))


async def _take_nothing(index: int, output: RequestOutput) -> None:
    """A whole answer is made of the last outputs."""
