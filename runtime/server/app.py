"""The ASGI application: its routes."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp

from ..engine_state import ENGINE_STATE_PATH, PROFILE_PATH
from ..frontend.outputs import CompletionOutput, RequestOutput
from .answer_blocks import BlockEvents, encoded
from .anthropic_blocks import AnthropicBlocks, AnthropicEvent, AnthropicMessage, AnthropicUsage, ToolUseBlock
from .anthropic_chat import FIELD_NAMES, chat_body_of
from .anthropic_fields import AnthropicRequest
from .basic_routes import BasicRoutes, StateRoutes
from .body import is_large, parse_body
from .chat import ChatEndpoint
from .completions import CompletionEndpoint
from .endpoint import OpenRecord, PromptRun
from .errors import ErrorReply
from .generation_request import ParsedRequest
from .lora_routes import LoraRoutes
from .middleware import AuthMiddleware, guarded, openapi_handler, plain_app, with_cors
from .response_endpoint import ResponsesEndpoint
from .responses import Usage, usage_of
from .sse import StreamEncoder
from .state import ServerState
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


class _MessageEvents(BlockEvents):
    __slots__ = ()
    _blocks: AnthropicBlocks

    def __init__(self, request: ParsedRequest) -> None:
        super().__init__(request, AnthropicBlocks())

    def _first(self, output: RequestOutput) -> Iterable[AnthropicEvent]:
        message = _message(self._request, usage_of([output]))
        return [AnthropicEvent(type="message_start", message=message)]

    def _last(self, choice: CompletionOutput, usage: Usage) -> Iterable[AnthropicEvent]:
        reason, sequence = _stop_of(choice, self._blocks)
        yield AnthropicEvent(
            type="message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=AnthropicUsage.of(usage),
        )
        yield AnthropicEvent(type="message_stop")

    def error_event(self, reply: ErrorReply) -> bytes:
        error = {"type": reply.type, "message": reply.message}
        return encoded([AnthropicEvent(type="error", error=error)])


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
        Route("/tokenize", guarded(basic.tokenize), methods=["POST"]),
        Route("/detokenize", guarded(basic.detokenize), methods=["POST"]),
    ]
    for prefix in ("/v1", ""):
        routes.append(Route(f"{prefix}/load_lora_adapter", guarded(lora.load), methods=["POST"]))
        routes.append(Route(f"{prefix}/unload_lora_adapter", guarded(lora.unload), methods=["POST"]))
    routes.append(Route("/openapi.json", guarded(openapi_handler(routes, state.settings))))
    return routes
