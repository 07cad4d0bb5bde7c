"""Endpoints that do not generate: models, health, metrics, version, tokens."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, ClassVar

from msgspec import UNSET
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from ..errors import UnknownModelError
from ..frontend.template_limits import render_in_time
from ..frontend.tokenizer import begin_flow, check_token_ids
from ..limits import tokenize_limit
from .answers import DetokenizedText, Health, ModelCard, ModelList, Readiness, Tokens, Version
from .body import HeldBody, RequestModel, given, is_large, parse_body, read_body
from .chat_messages import ConversationFields
from .errors import HttpError, error_response
from .fields import MESSAGE_FIELDS
from .generation_request import check_ids
from .message_schema import MessagesField
from .metrics import CONTENT_TYPE
from .open_requests import ended_by_disconnect
from .responses import json_response
from .settings import MAX_STATS_AGE_S
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
        """The version of corun."""
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
            raise HttpError(400, "give either prompt or messages", code="invalid_value")
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
