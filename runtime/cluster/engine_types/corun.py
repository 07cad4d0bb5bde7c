"""``corun serve`` as an engine: it reports profile and state, in the gateway's formats."""

from collections.abc import AsyncGenerator

import aiohttp

from ...server.answers import ModelCard, ModelList
from ...server.errors import HttpError
from ..http.calls import UnreachableError, call
from ..http.events import read_events
from ..wire import ENGINE_STATE_PATH, PROFILE_PATH, EngineCard, EngineProfile, EngineState
from .corun_api import EngineApi
from .engine_type import SentRecord, Translation

MODELS_PATH = "/v1/models"
_TIMEOUT_S = 5.0
_STREAM_SILENT_S = 30.0  # then the stream is opened again; missing heartbeats eject it sooner


class NoTranslation:
    """The ``Translation`` of engines that share the gateway's formats."""

    def body(self, body: bytes) -> bytes:
        return body

    def events(self, data: bytes) -> bytes:
        return data

    def answer(self, status: int, body: bytes) -> bytes:
        return body


class CorunEngineType:
    """The ``EngineType`` of ``corun serve``."""

    can_pin = True
    can_mix = True
    ready_path = "/ready"

    def __init__(self) -> None:
        self._translation = NoTranslation()

    async def profile(self, session: aiohttp.ClientSession, card: EngineCard) -> EngineProfile:
        url = card.url + PROFILE_PATH
        try:
            return await call(session, url, None, EngineProfile, timeout_s=_TIMEOUT_S)
        except UnreachableError:
            raise
        except HttpError as error:
            text = f"it does not speak corun's API ({error.status}: {error})"
            raise HttpError(error.status, text, code=error.code) from None

    async def base_cards(self, session: aiohttp.ClientSession, card: EngineCard) -> tuple[ModelCard, ...]:
        url = card.url + MODELS_PATH
        models = await call(session, url, None, ModelList, timeout_s=_TIMEOUT_S)
        return tuple(one for one in models.data if one.parent is None)

    def states(
        self, session: aiohttp.ClientSession, card: EngineCard, sent: SentRecord
    ) -> AsyncGenerator[EngineState, None]:
        url = card.url + ENGINE_STATE_PATH
        return read_events(session, url, EngineState, silent_s=_STREAM_SILENT_S)

    def adapters(self, session: aiohttp.ClientSession, url: str) -> EngineApi:
        return EngineApi(session, url)

    def translation(self, model: str | None, asked: str | None) -> Translation:
        return self._translation
