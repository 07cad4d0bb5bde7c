"""Adapters over HTTP: the list, and loading and unloading where the options allow them."""

from collections.abc import Callable
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..adapters.allowed_dirs import allowed_path
from ..adapters.info import num_fitting
from ..adapters.names import check_adapter_name, unknown_name
from ..engine.messages import EngineStats
from ..errors import AdapterError, RequestError
from ..frontend.outputs import LoRARequest
from .adapter_listing import adapter_json, parse_page
from .body import RequestModel, given, parse_body, read_body
from .errors import HttpError, InvalidValueError
from .responses import json_response
from .settings import STATS_TIMEOUT_S, AppSettings
from .state import ServerState, is_listed

_UNUSED_INT_ID = 1  # the name identifies an adapter


class LoadRequest(RequestModel):
    """A directory to serve under a name; without a directory, ``pinned`` for a known name."""

    lora_name: str = Field(description="Name that requests give as model.")
    lora_path: str | None = given("PEFT directory on the server; without it, only pinned changes.")
    load_inplace: bool | None = given("Replace the version of a name that is loaded.")
    pinned: bool | None = given("Keep it on the device; default: unchanged.")

    def directory(self) -> str:
        """Return ``lora_path``. Raises ``HttpError`` without one."""
        if not self.lora_path:
            what = "missing" if self.lora_path is None else "empty"
            raise InvalidValueError(f"lora_path is {what}", param="lora_path")
        return self.lora_path


class UnloadRequest(RequestModel):
    """The adapter to stop serving."""

    lora_name: str = Field(description="Name of the adapter; its running requests finish.")
    lora_int_id: int | None = given("Without effect.")


async def read_change(
    request: Request, settings: AppSettings, check_accepting: Callable[[], None], process: str
) -> bytes:
    """Read the body of a change of adapters. Raises ``HttpError`` if there may be none now."""
    if not settings.allow_lora_updates:
        raise HttpError(
            403,
            f"adapters cannot be changed over HTTP: the {process} runs without --admin-key and "
            "without --allow-runtime-lora-updating",
            code="lora_updates_not_allowed",
        )
    check_accepting()
    return await read_body(request.scope, request.receive, settings.limits.max_body_bytes)


class LoraRoutes:
    """Handlers bound to one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list_all(self, request: Request) -> Response:
        """Registered adapters by name: level, state, and the reason of a failure."""
        page = parse_page(request.query_params)
        engine = self._state.engine
        stats = await self._fresh_stats()
        adapters = engine.list_loras()
        shown, has_more = page.of(adapters)
        return json_response(
            {
                "object": "list",
                "data": [adapter_json(one) for one in shown],
                "has_more": has_more,
                "num_adapters": len(adapters),
                "num_fitting": num_fitting(adapters, stats.adapter_room_bytes),
                "age_s": round(engine.stats_age_s, 3),
            }
        )

    async def get(self, request: Request) -> Response:
        """One adapter."""
        name = request.path_params["name"]
        await self._fresh_stats()
        adapter = self._state.engine.loras.get(name)
        if adapter is None:
            known = [one.name for one in self._state.engine.list_loras()]
            raise unknown_name(name, known, param="name")
        age = {"age_s": round(self._state.engine.stats_age_s, 3)}
        return json_response(adapter_json(adapter) | age)

    async def load(self, request: Request) -> Response:
        """Register an adapter, or pin one; answers when it is ready or refused."""
        body = await parse_body(LoadRequest, await self._read(request), self._state.unknown_fields)
        self._check_name(body.lora_name)
        if body.lora_path is None and body.pinned is not None:
            await self._state.engine.pin_lora(body.lora_name, pinned=body.pinned)
            return self._done("pinned" if body.pinned else "unpinned", body.lora_name)
        path = await allowed_path(body.directory(), self._state.settings.allowed_lora_dirs)
        await self._state.engine.add_lora(
            LoRARequest(body.lora_name, _UNUSED_INT_ID, path),
            reload=True,  # its files may have changed
            pinned=body.pinned,
            replace=bool(body.load_inplace),
        )
        return self._done("loaded", body.lora_name)

    async def unload(self, request: Request) -> Response:
        """Unregister an adapter; its running requests finish."""
        body = await parse_body(UnloadRequest, await self._read(request), self._state.unknown_fields)
        self._state.engine.loras.check_known(body.lora_name, param="lora_name")
        await self._state.engine.remove_lora(body.lora_name)
        return self._done("unloaded", body.lora_name)

    async def _fresh_stats(self) -> EngineStats:
        """Refresh statistics and adapters from the engine; raises its error if it is dead."""
        engine = self._state.engine
        if engine.error is not None:
            raise engine.error
        return await engine.refresh_stats(STATS_TIMEOUT_S)

    async def _read(self, request: Request) -> bytes:
        return await read_change(request, self._state.settings, self._state.check_accepting, "server")

    def _check_name(self, name: str) -> None:
        try:
            check_adapter_name(name, self._state.names.base_names)
        except AdapterError as error:
            raise RequestError(str(error), param="lora_name") from error

    def _done(self, verb: str, name: str) -> Response:
        adapter = self._state.engine.loras.get(name)
        answer: dict[str, Any] = {"status": verb, "lora_name": name}
        if adapter is not None and is_listed(adapter):
            answer["adapter"] = adapter_json(adapter)
        return json_response(answer)
