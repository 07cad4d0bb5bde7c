"""vLLM's routes for adapters, which it has where ``VLLM_ALLOW_RUNTIME_LORA_UPDATING`` is set."""

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
    """What an adapter of this content is called there, and no other one ever."""
    return f"{entry.name}@{entry.digest[:_DIGEST_CHARS]}"


def name_of(model: str) -> str:
    """Of which name that is; what is called otherwise is not ours, and has its own."""
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
            text = f"{self._url} answers not as vLLM does: {error}"
            raise HttpError(502, text, code="engine_refused") from None

    async def load(self, entry: AdapterEntry, path: str) -> str:
        """Under the name of its content; other contents of the same name go, once it is there.

        Requests that run with them go on: vLLM only takes no new ones.
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
        """Load a directory under a name that it does not have yet."""
        await self._post(_LOAD_PATH, _Load(model, path), _LOAD_TIMEOUT_S)

    async def drop(self, model: str) -> None:
        """Unload what has exactly this name; nothing if there is none."""
        try:
            await self._post(_UNLOAD_PATH, _Unload(model), _CALL_TIMEOUT_S)
        except HttpError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # already dropped
                raise

    async def pin(self, name: str, *, pinned: bool) -> None:
        raise AssertionError("``VllmEngineType.can_pin`` says so")

    async def unload(self, name: str) -> None:
        """All contents of it."""
        await self._drop(name)

    async def check_updates(self) -> None:
        """Raise ``HttpError`` if adapters cannot be loaded while it runs."""
        try:
            # Without a name it does nothing but refuse, where it has the route.
            await self._post(_UNLOAD_PATH, _Unload(""), _CALL_TIMEOUT_S)
        except HttpError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise HttpError(
                    400,
                    "it loads no adapters while it runs: start it with "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
                    code="engine_refused", param="url",
                ) from None  # fmt: skip
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
