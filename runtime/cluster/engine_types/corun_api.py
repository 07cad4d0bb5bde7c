"""The public routes of ``corun serve`` for adapters, as agents and the controller use them."""

import contextlib
from http import HTTPStatus
from urllib.parse import quote

import aiohttp
import msgspec

from ...adapters.names import DRAINING
from ...server.errors import HttpError
from ..http.calls import call
from ..http.events import read_events
from ..wire import ENGINE_STATE_PATH, AdapterEntry, EngineState

_LOAD_TIMEOUT_S = 120.0  # reads all of an adapter's files
_CALL_TIMEOUT_S = 10.0


class _Load(msgspec.Struct, frozen=True, omit_defaults=True):
    lora_name: str
    lora_path: str | None = None
    load_inplace: bool | None = None
    pinned: bool | None = None


class _Unload(msgspec.Struct, frozen=True):
    lora_name: str


class _Use(msgspec.Struct, frozen=True):
    """The use of a name, and of its draining versions."""

    num_references: int
    num_waiting: int
    state: str = ""  # empty for a draining version
    draining: "tuple[_Use, ...]" = ()


class EngineApi:
    """The ``AdapterApi`` of one engine."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def incarnation(self) -> str:
        states = read_events(
            self._session, self.url + ENGINE_STATE_PATH, EngineState, silent_s=_CALL_TIMEOUT_S
        )
        async with contextlib.aclosing(states):
            async for state in states:
                return state.incarnation
        raise AssertionError("a stream of events ends by an error")

    async def load(self, entry: AdapterEntry, path: str) -> None:
        body = _Load(lora_name=entry.name, lora_path=path, load_inplace=True, pinned=entry.pinned)
        await self._post("load_lora_adapter", body, _LOAD_TIMEOUT_S)

    async def pin(self, name: str, *, pinned: bool) -> None:
        await self._post("load_lora_adapter", _Load(lora_name=name, pinned=pinned), _CALL_TIMEOUT_S)

    async def unload(self, name: str) -> None:
        try:
            await self._post("unload_lora_adapter", _Unload(lora_name=name), _CALL_TIMEOUT_S)
        except HttpError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # 404: it does not serve the name
                raise

    async def is_used(self, name: str, *, by_former: bool = False) -> bool:
        """Return whether requests for a name run or wait. Raises ``HttpError``.

        ``by_former``: count only requests from before the name was unloaded or replaced.
        """
        url = f"{self.url}/v1/lora_adapters/{quote(name, safe='/')}"
        try:
            use = await call(self._session, url, None, _Use, timeout_s=_CALL_TIMEOUT_S)
        except HttpError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        is_former = use.state == DRAINING
        counted = (use, *use.draining) if is_former or not by_former else use.draining
        return any(one.num_references or one.num_waiting for one in counted)

    async def _post(self, path: str, body: msgspec.Struct, timeout_s: float) -> None:
        url = f"{self.url}/v1/{path}"
        await call(self._session, url, body, dict, timeout_s=timeout_s)
