"""Endpoints that do not generate: models, health, metrics, version, tokens."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import UnknownModelError
from ..frontend.tokenizer import check_token_ids
from .body import RequestModel, parse_body, read_body
from .chat import template_messages
from .errors import HttpError, error_response
from .model_names import is_listed
from .responses import ModelCard, json_response
from .settings import STATS_TIMEOUT_S
from .state import ServerState


class TokenizeRequest(RequestModel):
    """Text, or a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(RequestModel):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: list[int]


class BasicRoutes:
    """Handlers bound to one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """200 while the engine lives."""
        error = self._state.engine.error
        if error is not None:
            return json_response({"status": "dead", "reason": str(error)}, status=503)
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while new requests are accepted."""
        try:
            self._state.check_accepting()
        except Exception as exc:
            return error_response(exc)
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus exposition."""
        await self._state.engine.refresh_stats(STATS_TIMEOUT_S)
        body, content_type = self._state.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: Request) -> Response:
        """The version of corun."""
        return json_response({"version": self._state.settings.version})

    async def list_models(self, request: Request) -> Response:
        """The base model under each served name, and the adapters that can be asked for."""
        return json_response({"object": "list", "data": self._cards()})

    async def get_model(self, request: Request) -> Response:
        """One entry of the list."""
        target = self._state.resolve(request.path_params["model"])
        wanted = target.adapter_name or target.shown_name
        for card in self._cards():
            if card.id == wanted:
                return json_response(card)
        raise UnknownModelError(f"there is no model {wanted!r} here", param="model")

    async def tokenize(self, request: Request) -> Response:
        """Text or messages to token ids."""
        body = parse_body(TokenizeRequest, await self._read(request))
        self._state.resolve(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise HttpError(400, "give prompt or messages, one of them", code="invalid_value")
        tokenizer = self._state.engine.tokenizer
        if body.messages is None:
            text, add_special_tokens = str(body.prompt), body.add_special_tokens is not False
        else:
            add_generation_prompt = body.add_generation_prompt is not False
            text = tokenizer.apply_chat_template(
                template_messages(body.messages), add_generation_prompt=add_generation_prompt
            )
            add_special_tokens = bool(body.add_special_tokens)
        tokens = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
        max_model_len = self._state.engine.get_model_info().max_model_len
        return json_response(
            {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        )

    async def detokenize(self, request: Request) -> Response:
        """Token ids to text."""
        body = parse_body(DetokenizeRequest, await self._read(request))
        self._state.resolve(body.model)
        vocab_size = self._state.engine.get_model_info().vocab_size
        tokens = check_token_ids(body.tokens, vocab_size=vocab_size)
        return json_response({"prompt": self._state.engine.tokenizer.decode(tokens)})

    async def _read(self, request: Request) -> bytes:
        limit = self._state.settings.max_body_bytes
        return await read_body(request.scope, request.receive, limit)

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
