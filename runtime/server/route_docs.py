"""The documentation of each route, for ``/openapi.json`` and the README of the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..adapters.info import LEVEL_ALIASES, LEVELS
from ..engine_state import ENGINE_STATE_PATH, PROFILE_PATH, EngineProfile, EngineState
from .adapter_listing import MAX_PAGE, AdapterCard
from .answers import DetokenizedText, Health, ModelCard, ModelList, Readiness, Tokens, Version
from .anthropic_blocks import AnthropicEvent, AnthropicMessage
from .anthropic_fields import AnthropicRequest
from .basic_routes import DetokenizeRequest, TokenizeRequest
from .body import RequestModel
from .chat import ChatRequest
from .completions import CompletionRequest
from .lora_routes import LoadRequest, UnloadRequest
from .response_fields import ResponsesRequest
from .response_objects import ResponseEvent, ResponseObject
from .responses import Answer, ChatChoice, ChatChunkChoice, Chunk, CompletionChoice

_Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDoc:
    """One route: its body, its answer and its errors."""

    summary: str
    body: type[RequestModel] | None = None
    query: Mapping[str, _Schema] = field(default_factory=dict)
    answer: Any = None  # type of the JSON answer; None = only a stream, or text
    event: Any = None  # type of a stream's events; without an answer the stream has no end
    ends_with_done: bool = True  # the last event of a stream with an end is [DONE] or an error
    errors: tuple[int, ...] = ()  # statuses of answers that are an ErrorBody
    unhealthy: Any = None  # type of the answer 503, if it is no ErrorBody


_KEY = (401, 500)
_BODY = (400, *_KEY, 404, 413, 503)
_GENERATES = (*_BODY, 429)
_CHANGES = (*_BODY, 403)

AdapterPage: Any = msgspec.defstruct(
    "AdapterPage",
    [
        ("object", str),
        ("data", list[AdapterCard]),
        ("has_more", bool),
        ("num_adapters", int),
        ("num_fitting", int),
        ("age_s", float),
    ],
)
AdapterNow: Any = msgspec.defstruct("AdapterNow", [("age_s", float)], bases=(AdapterCard,))
AdapterChange: Any = msgspec.defstruct(
    "AdapterChange",
    [("status", str), ("lora_name", str), ("adapter", AdapterCard | msgspec.UnsetType, msgspec.UNSET)],
)

_LOAD = RouteDoc(
    summary="Load, reload or pin an adapter; answers when it is ready.",
    body=LoadRequest,
    answer=AdapterChange,
    errors=_CHANGES,
)
_UNLOAD = RouteDoc(
    summary="Unload an adapter; its running requests finish.",
    body=UnloadRequest,
    answer=AdapterChange,
    errors=_CHANGES,
)

ROUTE_DOCS: Mapping[tuple[str, str], RouteDoc] = {
    ("POST", "/v1/chat/completions"): RouteDoc(
        summary="Generate the next message of a conversation.",
        body=ChatRequest,
        answer=Answer[ChatChoice],
        event=Chunk[ChatChunkChoice],
        errors=_GENERATES,
    ),
    ("POST", "/v1/completions"): RouteDoc(
        summary="Continue prompts.",
        body=CompletionRequest,
        answer=Answer[CompletionChoice],
        event=Chunk[CompletionChoice],
        errors=_GENERATES,
    ),
    ("POST", "/v1/responses"): RouteDoc(
        summary="Answer a text or items, in the form of OpenAI's responses; nothing is stored.",
        body=ResponsesRequest,
        answer=ResponseObject,
        event=ResponseEvent,
        ends_with_done=False,
        errors=_GENERATES,
    ),
    ("POST", "/v1/messages"): RouteDoc(
        summary="Generate the next message of a conversation, in the form of Anthropic's API.",
        body=AnthropicRequest,
        answer=AnthropicMessage,
        event=AnthropicEvent,
        ends_with_done=False,
        errors=_GENERATES,
    ),
    ("GET", "/v1/models"): RouteDoc(
        summary="Names that a request can give as model: the base model's and the adapters'.",
        answer=ModelList,
        errors=_KEY,
    ),
    ("GET", "/v1/models/{model}"): RouteDoc(
        summary="One model.", answer=ModelCard, errors=(*_KEY, 400, 404, 503)
    ),
    ("GET", "/v1/lora_adapters"): RouteDoc(
        summary="Adapters by name, in pages: level, state, and the reason of a failure.",
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": MAX_PAGE},
            "after": {"type": "string", "description": "Start after this name."},
            "level": {
                "enum": [*LEVELS, *LEVEL_ALIASES],
                "description": "Only adapters at this level. gpu means device, cpu means host.",
            },
        },
        answer=AdapterPage,
        errors=(*_KEY, 400, 503),
    ),
    ("GET", "/v1/lora_adapters/{name}"): RouteDoc(
        summary="One adapter.", answer=AdapterNow, errors=(*_KEY, 404, 503)
    ),
    ("POST", "/v1/load_lora_adapter"): _LOAD,
    ("POST", "/load_lora_adapter"): _LOAD,
    ("POST", "/v1/unload_lora_adapter"): _UNLOAD,
    ("POST", "/unload_lora_adapter"): _UNLOAD,
    ("POST", "/tokenize"): RouteDoc(
        summary="The tokens of a text, or of a conversation after the chat template.",
        body=TokenizeRequest,
        answer=Tokens,
        errors=_GENERATES,
    ),
    ("POST", "/detokenize"): RouteDoc(
        summary="The text of tokens, including special tokens.",
        body=DetokenizeRequest,
        answer=DetokenizedText,
        errors=_GENERATES,
    ),
    ("GET", "/health"): RouteDoc(
        summary="200 while the engine is alive.", answer=Health, errors=_KEY, unhealthy=Health
    ),
    ("GET", "/ready"): RouteDoc(
        summary="200 while new requests are accepted and the engine makes progress.",
        answer=Readiness,
        errors=(*_KEY, 503),
    ),
    ("GET", "/metrics"): RouteDoc(summary="Prometheus metrics.", errors=_KEY),
    ("GET", ENGINE_STATE_PATH): RouteDoc(
        summary="A stream of the engine's load, adapters and heartbeat, for routers.",
        event=EngineState,
        errors=_KEY,
    ),
    ("GET", PROFILE_PATH): RouteDoc(
        summary="The engine's model, its limits, and a latency model of its machine.",
        answer=EngineProfile,
        errors=_KEY,
    ),
    ("GET", "/version"): RouteDoc(summary="The version of corun.", answer=Version, errors=_KEY),
    ("GET", "/openapi.json"): RouteDoc(
        summary="This API as an OpenAPI document.", answer=dict[str, Any], errors=_KEY
    ),
}
