"""The ASGI application: its routes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..engine_state import ENGINE_STATE_PATH, PROFILE_PATH
from ..frontend.outputs import CompletionOutput, RequestOutput
from ..tools.parts import AnswerParser
from .anthropic_blocks import (
    AnthropicBlocks,
    AnthropicEvent,
    AnthropicMessage,
    AnthropicUsage,
    ToolUseBlock,
    encoded_events,
)
from .anthropic_chat import FIELD_NAMES, chat_body_of
from .anthropic_fields import AnthropicRequest
from .basic_routes import BasicRoutes
from .body import is_large, parse_body
from .chat import ChatEndpoint
from .completions import CompletionEndpoint
from .cors import with_cors
from .endpoint import OpenRecord, PromptRun
from .errors import ErrorReply
from .generation_request import ParsedRequest
from .lora_routes import LoraRoutes
from .middleware import AuthMiddleware, Handler, guarded, plain_app
from .openapi import openapi_json
from .response_endpoint import ResponsesEndpoint
from .responses import Timing, Usage, usage_of
from .sse import StreamEncoder
from .state import ServerState
from .state_routes import StateRoutes
from .translation import TranslatedEndpoint


class AnthropicEndpoint(TranslatedEndpoint):
    """Answers ``/v1/messages``."""

    id_prefix = "msg"
    field_names = FIELD_NAMES

    async def parse(self, body: bytes, record: OpenRecord) -> ParsedRequest:
        asked = await parse_body(AnthropicRequest, body, self.state.unknown_fields)
        record.read(asked.model, stream=bool(asked.stream))
        return await self._as_chat(chat_body_of, asked, record, is_large=is_large(body))

    def stream_encoder(self, request: ParsedRequest) -> StreamEncoder:
        return _MessageEvents(request)

    def answer(self, request: ParsedRequest, runs: Sequence[PromptRun]) -> msgspec.Struct:
        (choice,) = runs[0].latest.outputs
        blocks = AnthropicBlocks()
        list(blocks.add(request.answers.whole(choice)))  # its events are for streams
        list(blocks.end(is_complete=True))
        reason, sequence = _stop_of(choice, blocks)
        return msgspec.structs.replace(
            _message(request, usage_of(run.latest for run in runs)),
            content=blocks.blocks,
            stop_reason=reason,
            stop_sequence=sequence,
        )


class _MessageEvents(StreamEncoder):
    """The events of one stream."""

    __slots__ = ("_blocks", "_latest", "_parser", "_request")

    def __init__(self, request: ParsedRequest) -> None:
        self._request = request
        self._blocks = AnthropicBlocks()
        self._parser: AnswerParser | None = None  # there is none before the prompt is made
        self._latest: CompletionOutput | None = None

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        events = b""
        if self._parser is None:
            self._parser = self._request.answers.parser()
            message = _message(self._request, usage_of([output]))
            events = encoded_events([AnthropicEvent(type="message_start", message=message)])
        (self._latest,) = output.outputs
        return events + encoded_events(self._blocks.add(self._parser.feed(self._latest.new_text)))

    def end(self, usage: Usage | None, timing: Timing | None) -> bytes:
        assert self._parser is not None and self._latest is not None and usage is not None
        rest = self._request.answers.rest(self._parser, self._latest)
        events = [*self._blocks.add(rest), *self._blocks.end(is_complete=True)]
        reason, sequence = _stop_of(self._latest, self._blocks)
        events.append(
            AnthropicEvent(
                type="message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=AnthropicUsage.of(usage),
            )
        )
        return encoded_events([*events, AnthropicEvent(type="message_stop")])

    def error_event(self, reply: ErrorReply) -> bytes:
        error = {"type": reply.type, "message": reply.message}
        return encoded_events([AnthropicEvent(type="error", error=error)])


def _message(request: ParsedRequest, usage: Usage) -> AnthropicMessage:
    """Return the message before its first token."""
    envelope = request.envelope
    return AnthropicMessage(id=envelope.id, model=envelope.model, usage=AnthropicUsage.of(usage))


def _stop_of(choice: CompletionOutput, blocks: AnthropicBlocks) -> tuple[str, str | None]:
    """Return why the answer ended, and the stop sequence that ended it, if one did."""
    if choice.finish_reason == "length":
        return "max_tokens", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    has_calls = any(isinstance(block, ToolUseBlock) for block in blocks.blocks)
    return "tool_use" if has_calls else "end_turn", None


def build_app(state: ServerState) -> ASGIApp:
    """Return the application for ``state``."""
    generating: dict[str, ASGIApp] = {
        "/v1/completions": CompletionEndpoint(state),
        "/v1/chat/completions": ChatEndpoint(state),
        "/v1/responses": ResponsesEndpoint(state),
        "/v1/messages": AnthropicEndpoint(state),
    }
    app = AuthMiddleware(
        plain_app(_routes(state, generating)),
        generating,
        access=state.settings.access,
        max_connections=state.settings.limits.max_connections,
        on_answered=state.metrics.answered,
    )
    return with_cors(app, state.settings.allowed_origins)


def _routes(state: ServerState, generating: Mapping[str, ASGIApp]) -> list[Route]:
    basic, lora, states = BasicRoutes(state), LoraRoutes(state), StateRoutes(state)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
        Route("/v1/models", guarded(basic.list_models)),
        Route("/v1/models/{model:path}", guarded(basic.get_model)),
        Route("/v1/lora_adapters", guarded(lora.list_all)),
        Route("/v1/lora_adapters/{name:path}", guarded(lora.get)),
        Route("/health", guarded(basic.health)),
        Route("/ready", guarded(basic.ready)),
        Route("/metrics", guarded(basic.metrics)),
        Route(ENGINE_STATE_PATH, guarded(states.engine_state)),
        Route(PROFILE_PATH, guarded(states.profile)),
        Route("/version", guarded(basic.version)),
        Route("/openapi.json", guarded(_openapi_handler(state, lambda: routes))),
        Route("/tokenize", guarded(basic.tokenize), methods=["POST"]),
        Route("/detokenize", guarded(basic.detokenize), methods=["POST"]),
    ]
    for prefix in ("/v1", ""):
        routes.append(Route(f"{prefix}/load_lora_adapter", guarded(lora.load), methods=["POST"]))
        routes.append(Route(f"{prefix}/unload_lora_adapter", guarded(lora.unload), methods=["POST"]))
    return routes


def _openapi_handler(state: ServerState, routes: Callable[[], Iterable[Route]]) -> Handler:
    """Return the handler of the document, which is made on the first request."""
    document = cache(lambda: openapi_json(routes(), state.settings))

    async def handler(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    return handler
