"""HTTP routes for the adapters of the cluster: list, load, pin and unload.

Lists come from the gateway's own state; the controller makes changes.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...adapters.allowed_dirs import allowed_path
from ...adapters.info import LEVELS, AdapterInfo
from ...engine_state import Residency
from ...server.adapter_listing import adapter_json, parse_page
from ...server.body import parse_body
from ...server.fields import UnknownFields
from ...server.lora_routes import LoadRequest, UnloadRequest, read_change
from ...server.responses import json_response
from ..wire import AdapterChange, AdapterEntry
from .controller import ControllerLink
from .state import GatewayState


class ClusterAdapterRoutes:
    """Handlers bound to one gateway."""

    def __init__(
        self, state: GatewayState, controller: ControllerLink, unknown_fields: UnknownFields
    ) -> None:
        self._state = state
        self._controller = controller
        self._unknown_fields = unknown_fields

    async def list_all(self, request: Request) -> Response:
        """By name: which agents have the files, and at which level engines have the adapter."""
        page = parse_page(request.query_params)
        entries = self._state.table.adapters
        infos = [self._info(one) for one in entries.values()]
        shown, has_more = page.of(infos)
        return json_response(
            {
                "object": "list",
                "data": [self._json(one, entries[one.name]) for one in shown],
                "has_more": has_more,
                "num_adapters": len(infos),
                "age_s": self._age_s(),
            }
        )

    async def get(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        entry = self._state.table.adapters.get(name)
        if entry is None:
            raise self._state.unknown_adapter(name, param="name")
        return json_response(self._json(self._info(entry), entry) | {"age_s": self._age_s()})

    async def load(self, request: Request) -> Response:
        """Load an adapter for all engines, or pin it; answered when one engine serves it."""
        body = await parse_body(LoadRequest, await self._read(request), self._unknown_fields)
        if body.lora_path is None and body.pinned is not None:
            change = AdapterChange(action="pin", name=body.lora_name, pinned=body.pinned)
            return await self._change(change, "pinned" if body.pinned else "unpinned")
        change = AdapterChange(
            action="load",
            name=body.lora_name,
            path=await allowed_path(body.directory(), self._state.settings.allowed_lora_dirs),
            load_inplace=bool(body.load_inplace),
            pinned=body.pinned,
        )
        return await self._change(change, "loaded")

    async def unload(self, request: Request) -> Response:
        """Unload an adapter from all engines; its running requests finish."""
        body = await parse_body(UnloadRequest, await self._read(request), self._unknown_fields)
        return await self._change(AdapterChange(action="unload", name=body.lora_name), "unloaded")

    async def _read(self, request: Request) -> bytes:
        return await read_change(request, self._state.settings, self._state.check_accepting, "gateway")

    async def _change(self, change: AdapterChange, done: str) -> Response:
        entry = await self._controller.change(change)
        answer: dict[str, Any] = {"status": done, "lora_name": change.name}
        if change.action != "unload":
            answer["adapter"] = self._json(self._info(entry), entry)
        return json_response(answer)

    def _info(self, entry: AdapterEntry) -> AdapterInfo:
        """Return an adapter as one engine shows it, at the fastest level of all engines."""
        levels = self._levels(entry.name).values()
        level = min(levels, key=LEVELS.index, default=LEVELS[-1])
        return AdapterInfo(
            name=entry.name,
            path=entry.source,
            state=entry.state,
            reason=entry.reason,
            rank=entry.rank,
            num_bytes=entry.num_bytes,
            version=entry.digest,
            pinned=entry.pinned,
            residency=Residency(level=level),
        )

    def _levels(self, name: str) -> dict[str, str]:
        """Return the level of an adapter at each engine that serves it."""
        placed = {engine_id: link.state.adapters.get(name) for engine_id, link in self._state.links.items()}
        return {engine_id: one.level for engine_id, one in placed.items() if one is not None}

    def _json(self, info: AdapterInfo, entry: AdapterEntry) -> dict[str, Any]:
        copies = [
            agent.agent_id for agent in self._state.table.agents.values() if entry.digest in agent.digests
        ]
        own = {"revision": entry.revision, "copies": copies, "engines": self._levels(entry.name)}
        return adapter_json(info) | own

    def _age_s(self) -> float:
        """Return the age of the oldest engine state."""
        ages_s = (link.health.silent_s for link in self._state.links.values())
        return round(max(ages_s, default=0.0), 3)
