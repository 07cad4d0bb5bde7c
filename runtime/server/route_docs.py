"""What is said of each route, in ``/openapi.json`` and on the page of them: one entry for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..adapters.info import LEVEL_ALIASES, LEVELS
from ..engine_state import ENGINE_STATE_PATH, PROFILE_PATH, EngineProfile, EngineState
from .adapter_listing import MAX_PAGE, AdapterCard
from .answers import DetokenizedText, Health, ModelCard, ModelList, Readiness, Tokens, Version
from .basic_routes import DetokenizeRequest, TokenizeRequest
from .body import RequestModel
from .chat import ChatRequest
from .completions import CompletionRequest
from .lora_routes import LoadRequest, UnloadRequest
from .responses import Answer, ChatChoice, ChatChunkChoice, Chunk, CompletionChoice

_Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDoc:
    """One route: what goes in and what comes out."""

    summary: str
    body: type[RequestModel] | None = None
    query: Mapping[str, _Schema] = field(default_factory=dict)
    answer: Any = None  # of JSON, by its type; None = a stream alone, or text
    event: Any = None  # of a stream, by its type; without an answer it has no end
    errors: tuple[int, ...] = ()  # statuses of answers that are an ErrorBody
    unhealthy: Any = None  # of status 503, if that is no ErrorBody


_KEY = (401, 500)
_BODY = (400, *_KEY, 404, 413, 503)
_GENERATES = (*_BODY, 429)
_CHANGES = (*_BODY, 403)

AdapterPage: Any = msgspec.defstruct(
    "AdapterPage",
    [
        ("object", str), ("data", list[AdapterCard]), ("has_more", bool),
        ("num_adapters", int), ("num_fitting", int), ("age_s", float),
    ],
)  # fmt: skip
AdapterNow: Any = msgspec.defstruct("AdapterNow", [("age_s", float)], bases=(AdapterCard,))
AdapterChange: Any = msgspec.defstruct(
    "AdapterChange",
    [
        ("status", str), ("lora_name", str),
        ("adapter", AdapterCard | msgspec.UnsetType, msgspec.UNSET),
    ],
)  # fmt: skip

_LOAD = RouteDoc(
    summary="Load an adapter, give its name a new version, or pin one; answers when it is ready.",
    body=LoadRequest, answer=AdapterChange, errors=_CHANGES,
)  # fmt: skip
_UNLOAD = RouteDoc(
    summary="Unload an adapter; requests that run under it finish.",
    body=UnloadRequest, answer=AdapterChange, errors=_CHANGES,
)  # fmt: skip

ROUTE_DOCS: Mapping[tuple[str, str], RouteDoc] = {
    ("POST", "/v1/chat/completions"): RouteDoc(
        summary="A conversation in, the next message out.",
        body=ChatRequest, answer=Answer[ChatChoice], event=Chunk[ChatChunkChoice],
        errors=_GENERATES,
    ),
    ("POST", "/v1/completions"): RouteDoc(
        summary="Prompts in, what follows them out.",
        body=CompletionRequest, answer=Answer[CompletionChoice], event=Chunk[CompletionChoice],
        errors=_GENERATES,
    ),
    ("GET", "/v1/models"): RouteDoc(
        summary="What can be asked for: the base model's names, and adapters.",
        answer=ModelList, errors=_KEY,
    ),
    ("GET", "/v1/models/{model}"): RouteDoc(
        summary="One of them.", answer=ModelCard, errors=(*_KEY, 400, 404, 503)
    ),
    ("GET", "/v1/lora_adapters"): RouteDoc(
        summary="All adapters by name, in pages: where they are, and why if they have failed.",
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": MAX_PAGE},
            "after": {"type": "string", "description": "Begin behind this name."},
            "level": {
                "enum": [*LEVELS, *LEVEL_ALIASES],
                "description": "Only adapters at this level. gpu means device, cpu means host.",
            },
        },
        answer=AdapterPage, errors=(*_KEY, 400, 503),
    ),
    ("GET", "/v1/lora_adapters/{name}"): RouteDoc(
        summary="One of them.", answer=AdapterNow, errors=(*_KEY, 404, 503)
    ),
    ("POST", "/v1/load_lora_adapter"): _LOAD,
    ("POST", "/load_lora_adapter"): _LOAD,
    ("POST", "/v1/unload_lora_adapter"): _UNLOAD,
    ("POST", "/unload_lora_adapter"): _UNLOAD,
    ("POST", "/tokenize"): RouteDoc(
        summary="The tokens of a text, or of a conversation as the chat template writes it.",
        body=TokenizeRequest, answer=Tokens, errors=_BODY,
    ),
    ("POST", "/detokenize"): RouteDoc(
        summary="The text of tokens, special ones included.",
        body=DetokenizeRequest, answer=DetokenizedText, errors=_BODY,
    ),
    ("GET", "/health"): RouteDoc(
        summary="200 while the engine lives.", answer=Health, errors=_KEY, unhealthy=Health
    ),
    ("GET", "/ready"): RouteDoc(
        summary="200 while new requests are taken.", answer=Readiness, errors=(*_KEY, 503)
    ),
    ("GET", "/metrics"): RouteDoc(summary="Prometheus metrics.", errors=_KEY),
    ("GET", ENGINE_STATE_PATH): RouteDoc(
        summary="Load, adapters and a heartbeat of the engine, as they change: for routers.",
        event=EngineState, errors=_KEY,
    ),
    ("GET", PROFILE_PATH): RouteDoc(
        summary="What the engine is, and how long things take there.",
        answer=EngineProfile, errors=_KEY,
    ),
    ("GET", "/version"): RouteDoc(summary="The version of corun.", answer=Version, errors=_KEY),
    ("GET", "/openapi.json"): RouteDoc(
        summary="What this page says, for programs.", answer=dict[str, Any], errors=_KEY
    ),
}  # fmt: skip
