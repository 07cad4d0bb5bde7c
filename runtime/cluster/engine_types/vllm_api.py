"""vLLM's routes for adapters, which ``VLLM_ALLOW_RUNTIME_LORA_UPDATING`` enables."""

import re
from http import HTTPStatus

import aiohttp
import msgspec

from ...server.errors import HttpError
from ..http.calls import fetch
from ..wire import AdapterEntry
from .corun import MODELS_PATH
from .vllm_metrics import read_metrics
from .vllm_translation import vllm_refusal

_LOAD_PATH = "/v1/load_lora_adapter"
_UNLOAD_PATH = "/v1/unload_lora_adapter"
_LOAD_TIMEOUT_S = 120.0  # reads all of an adapter's files
_CALL_TIMEOUT_S = 5.0
_DIGEST_CHARS = 16
_NAME = re.compile(rf"(.+)@[0-9a-f]{{{_DIGEST_CHARS}}}")
_LOADED_ALREADY = "already been loaded"


def model_of(entry: AdapterEntry) -> str:
    """Return the unique name of this content at vLLM: ``NAME@DIGEST``."""
    return f"{entry.name}@{entry.digest[:_DIGEST_CHARS]}"


def name_of(model: str) -> str:
    """Return the name of a ``NAME@DIGEST``; any other name is returned as it is."""
    found = _NAME.fullmatch(model)
    return model if found is None else found[1]


class _Load(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str


class _Unload(msgspec.Struct, frozen=True):
    lora_name: str


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class VllmApi:
    """The ``AdapterApi`` of one engine."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def incarnation(self) -> str:
        body = await self._get("/metrics")
        try:
            return read_metrics(body).incarnation
        except ValueError as error:
            text = f"{self._url} does not answer like vLLM: {error}"
            raise HttpError(502, text, code="engine_refused") from None

    async def load(self, entry: AdapterEntry, path: str) -> str:
        """Load an adapter as ``NAME@DIGEST``, then unload other contents of the name.

        Running requests of those go on: vLLM only refuses new ones.
        """
        model = model_of(entry)
        try:
            await self.put(model, path)
        except HttpError as error:
            if error.status != HTTPStatus.BAD_REQUEST or _LOADED_ALREADY not in str(error):
                raise
        await self._drop(entry.name, but=model)
        return model

    async def put(self, model: str, path: str) -> None:
        """Load a directory under a new name."""
        await self._post(_LOAD_PATH, _Load(model, path), _LOAD_TIMEOUT_S)

    async def drop(self, model: str) -> None:
        """Unload exactly this name; ignore an unknown one."""
        try:
            await self._post(_UNLOAD_PATH, _Unload(model), _CALL_TIMEOUT_S)
        except HttpError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # already dropped
                raise

    async def pin(self, name: str, *, pinned: bool) -> None:
        raise AssertionError("``VllmEngineType.can_pin`` says so")

    async def unload(self, name: str) -> None:
        """Unload all contents of a name."""
        await self._drop(name)

    async def check_updates(self) -> None:
        """Raise ``HttpError`` if adapters cannot be loaded at run time."""
        try:
            # If the route exists, an empty name is refused without effect.
            await self._post(_UNLOAD_PATH, _Unload(""), _CALL_TIMEOUT_S)
        except HttpError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise HttpError(
                    400,
                    "the server cannot load adapters at run time: start it with "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
                    code="engine_refused",
                    param="url",
                ) from None
            if error.status != HTTPStatus.BAD_REQUEST:
                raise

    async def _drop(self, name: str, but: str | None = None) -> None:
        models = msgspec.json.decode(await self._get(MODELS_PATH), type=_Models)
        for model in models.data:
            if model.id not in (but, name) and name_of(model.id) == name:
                await self.drop(model.id)

    async def _get(self, path: str) -> bytes:
        url = self._url + path
        status, body = await fetch(self._session, url, None, timeout_s=_CALL_TIMEOUT_S)
        if status >= 400:
            raise vllm_refusal(url, status, body)
        return body

    async def _post(self, path: str, body: msgspec.Struct, timeout_s: float) -> None:
        url = self._url + path
        status, answer = await fetch(self._session, url, body, timeout_s=timeout_s)
        if status >= 400:
            raise vllm_refusal(url, status, answer)
