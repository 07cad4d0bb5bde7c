"""Endpoints that do not generate: models, health, metrics, version, tokens, state for routers."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..adapters.info import AdapterInfo
from ..adapters.names import READY
from ..engine_state import Accepted, EngineLoadState, EngineProfile, EngineState, PlacedAdapter
from ..errors import UnknownModelError
from ..frontend.engine_watch import EngineWatch
from ..frontend.template_limits import render_in_time
from ..frontend.tokenizer import begin_flow, check_token_ids
from ..limits import tokenize_limit
from .answers import DetokenizedText, Health, ModelCard, ModelList, Readiness, Tokens, Version
from .body import HeldBody, RequestModel, given, is_large, parse_body, read_body
from .chat_messages import ConversationFields
from .errors import InvalidValueError, error_response
from .fields import MESSAGE_FIELDS
from .generation_request import check_ids
from .message_schema import MessagesField
from .metrics import CONTENT_TYPE
from .open_requests import ended_by_disconnect
from .responses import json_response
from .settings import MAX_STATS_AGE_S, STATS_TIMEOUT_S
from .state import ServerState, is_listed

_MODEL = given("Model of the tokenizer; an adapter has the base model's.")


class TokenizeRequest(ConversationFields):
    """Text, or a conversation as the chat template renders it."""

    nested: ClassVar = {"messages": MESSAGE_FIELDS}

    model: str | None = _MODEL
    prompt: str | None = given("A text, instead of messages.")
    messages: MessagesField | None = None
    add_special_tokens: bool | None = given(
        "Add the model's special tokens; default: true for text, false for messages."
    )
    return_token_strs: bool | None = given("Also return the text of each token.")


class DetokenizeRequest(RequestModel):
    """Token ids to turn into text."""

    model: str | None = _MODEL
    tokens: Annotated[list[int], BeforeValidator(check_ids)] = Field(description="Token ids.")


class BasicRoutes:
    """Handlers bound to one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """200 while the engine is alive."""
        error = self._state.engine.error
        if error is not None:
            return json_response(Health("dead", str(error)), status=503)
        return json_response(Health("ok"))

    async def ready(self, request: Request) -> Response:
        """200 while new requests are accepted and the engine makes progress."""
        try:
            self._state.check_ready()
        except Exception as exc:
            return error_response(exc)
        return json_response(Readiness())

    async def metrics(self, request: Request) -> Response:
        """Prometheus exposition, with the engine's last published statistics.

        An idle engine publishes nothing on its own, so the request also asks for a refresh.
        """
        if self._state.engine.stats_age_s > MAX_STATS_AGE_S:
            self._state.engine.ask_stats()
        return Response(self._state.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return json_response(Version(self._state.settings.version))

    async def list_models(self, request: Request) -> Response:
        """The base model under each served name, and the adapters that requests can use."""
        return json_response(ModelList(self._cards()))

    async def get_model(self, request: Request) -> Response:
        """One entry of the list of models."""
        target = self._state.names.resolve(request.path_params["model"], self._state.engine.loras)
        wanted = target.adapter or target.shown_name
        for card in self._cards():
            if card.id == wanted:
                return json_response(card)
        raise UnknownModelError(f"there is no model {wanted!r}", param="model")

    async def tokenize(self, request: Request) -> Response:
        """Text or messages to token ids."""
        return await self._answer(request, self._tokenize)

    async def _tokenize(self, content: bytes) -> Response:
        body = await parse_body(TokenizeRequest, content, self._state.unknown_fields)
        target = await self._state.resolve(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidValueError("give either prompt or messages")
        conventions = await self._state.engine.conventions_of(target.adapter)
        tokenizer, limits = conventions.tokenizer, self._state.settings.limits
        if body.messages is None:
            param, text = "prompt", str(body.prompt)
            add_special_tokens = body.add_special_tokens is not False
        else:
            render = partial(body.render, conventions, body.messages, limits.max_json_items)
            param = "messages"
            text = await render_in_time(render, limits.template, is_large=is_large(content))
            add_special_tokens = bool(body.add_special_tokens)
        limit = tokenize_limit(limits.max_tokenize_tokens, param)
        tokens = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens, limit=limit)
        if len(tokens) > limit.max_tokens:
            raise limit.error()
        max_model_len = self._state.engine.get_model_info().max_model_len
        texts = await tokenizer.token_texts(tokens) if body.return_token_strs else UNSET
        return json_response(Tokens(len(tokens), max_model_len, tokens, texts))

    async def detokenize(self, request: Request) -> Response:
        """Token ids to text."""
        return await self._answer(request, self._detokenize)

    async def _detokenize(self, content: bytes) -> Response:
        body = await parse_body(DetokenizeRequest, content, self._state.unknown_fields)
        target = await self._state.resolve(body.model)
        conventions = await self._state.engine.conventions_of(target.adapter)
        vocab_size = conventions.vocab_size or self._state.engine.get_model_info().vocab_size
        tokens = check_token_ids(body.tokens, vocab_size=vocab_size) if body.tokens else []
        # With special tokens, so that tokenizing the text without added ones gives the same tokens.
        return json_response(DetokenizedText(await conventions.tokenizer.decode_async(tokens)))

    async def _answer(self, request: Request, answer: Callable[[bytes], Awaitable[Response]]) -> Response:
        """Read the body, and answer it until the client leaves."""
        begin_flow()
        state = self._state
        with state.open_requests.track() as opened, HeldBody(state.body_room) as held:
            max_bytes = state.settings.limits.max_body_bytes
            content = await read_body(request.scope, request.receive, max_bytes, held)
            with ended_by_disconnect(request.receive, opened):
                return await answer(content)

    def _cards(self) -> list[ModelCard]:
        state, info = self._state, self._state.engine.get_model_info()
        base = [
            ModelCard(
                id=name,
                created=state.created_s,
                root=info.model_path,
                parent=None,
                max_model_len=info.max_model_len,
            )
            for name in state.names.base_names
        ]
        adapters = {
            adapter.name: ModelCard(
                id=adapter.name,
                created=state.created_s,
                root=adapter.path,
                parent=state.names.base,
                max_model_len=info.max_model_len,
            )
            for adapter in state.engine.list_loras()
            if is_listed(adapter)
        }
        return base + list(adapters.values())


_MIN_INTERVAL_S = 0.1  # between two states
_EVENTS = "text/event-stream"
_MAX_INTERVAL_S = 0.25  # so that two heartbeats are within 0.5 s on a machine that is late


class EngineStateStream:
    """The changes of state for one reader."""

    def __init__(self, state: ServerState, watch: EngineWatch, incarnation: str) -> None:
        self._state = state
        self._watch = watch
        self._incarnation = incarnation
        self._adapters: dict[str, PlacedAdapter] = {}  # as sent last
        self._load: EngineLoadState | None = None
        self._num_changes = -1  # of the ledger, at the last state
        watch.changed(adapter.name for adapter in state.engine.list_loras())

    def next(self) -> EngineState:
        """Return the changes since the last call. O(changes)."""
        engine = self._state.engine
        load, sent_load = engine.get_stats().load, self._load
        self._load = load
        changed, removed = self._changed_adapters()
        return EngineState(
            incarnation=self._incarnation,
            beat=engine.num_heartbeats,
            is_ready=self._state.is_ready,
            load=None if load is sent_load else load,
            adapters=tuple(changed),
            removed=tuple(removed),
            accepted=self._newly_accepted(),
        )

    def _changed_adapters(self) -> tuple[list[PlacedAdapter], list[str]]:
        changed, removed = list[PlacedAdapter](), list[str]()
        for name in sorted(self._watch.take_names()):
            placed, sent = _placed(self._state.engine.loras.get(name)), self._adapters.get(name)
            if placed is None and sent is not None:
                del self._adapters[name]
                removed.append(name)
            elif placed is not None and placed != sent:
                self._adapters[name] = placed
                changed.append(placed)
        return changed, removed

    def _newly_accepted(self) -> dict[str, Accepted] | None:
        """Requests of gateways that the load in this state includes, if there are new ones."""
        ledger = self._state.gateways
        accepted = ledger.accept_known(self._state.engine.num_requests_received)
        num_changes, self._num_changes = self._num_changes, ledger.num_changes
        return None if num_changes == ledger.num_changes else accepted


class StateRoutes:
    """Handlers bound to one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._incarnation = uuid.uuid4().hex  # a server has one engine process, and ends with it

    async def engine_state(self, request: Request) -> Response:
        """A stream of the engine's state until the server ends."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        if request.method == "HEAD":  # an answer without a stream
            return Response(headers=headers, media_type=_EVENTS)
        return StreamingResponse(self._events(), headers=headers, media_type=_EVENTS)

    async def profile(self, request: Request) -> Response:
        """The engine's model, its limits, and a latency model of its machine."""
        engine, settings = self._state.engine, self._state.settings
        info, report = engine.get_model_info(), await engine.refresh_machine(STATS_TIMEOUT_S)
        profile = EngineProfile(
            model=self._state.names.base,
            base_fingerprint=info.base_fingerprint,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            block_size=settings.block_size,
            adapter_bytes_per_rank=info.adapter_bytes_per_rank,
            file_bytes_per_s=report.file_bytes_per_s,
            kv_bytes_per_token=report.kv_bytes_per_token,
            machine=report.machine,
            is_measured=report.is_measured,
        )
        return json_response(profile)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        with self._state.engine.watches.open() as watch:
            stream = EngineStateStream(self._state, watch, self._incarnation)
            while not self._state.is_ending:
                yield b"data: " + msgspec.json.encode(stream.next()) + b"\n\n"
                await asyncio.sleep(_MIN_INTERVAL_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_MAX_INTERVAL_S - _MIN_INTERVAL_S):
                        await watch.waker


def _placed(adapter: AdapterInfo | None) -> PlacedAdapter | None:
    """Return the adapter's place; None unless requests can use it."""
    if adapter is None or adapter.state != READY:
        return None
    residency = adapter.residency
    return PlacedAdapter(
        name=adapter.name,
        digest=adapter.version,
        level=residency.level,
        rank=adapter.rank,
        num_bytes=adapter.num_bytes,
        is_loading=residency.num_groups > 0 and not adapter.is_resident,
        pinned=adapter.pinned,
    )
