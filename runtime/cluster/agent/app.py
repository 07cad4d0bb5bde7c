"""An agent's HTTP server: for its controller, for gateways and for other agents."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from ...server.errors import HttpError, InvalidValueError
from ..http.serving import cluster_key_check, make_app, read_struct, struct_response
from ..wire import (
    AGENT_CHECK_PATH,
    AGENT_END_PATH,
    AGENT_ENGINES_PATH,
    AGENT_ENSURE_PATH,
    AGENT_FILES_PATH,
    AGENT_JOIN_PATH,
    AGENT_PIN_PATH,
    AGENT_UNLOAD_PATH,
    AgentReport,
    CheckAdapter,
    CheckedAdapter,
    EndAgent,
    EngineChange,
    Ensure,
    Join,
    Pin,
    Unload,
)
from .engines import EngineFleet
from .fetch import Fetcher
from .report import Leader
from .store import AdapterFileStore, check_digest


@dataclass(slots=True, kw_only=True)
class AgentState:
    """The parts of one agent."""

    agent_id: str
    url: str
    store: AdapterFileStore
    fleet: EngineFleet
    core_division: str
    drain_timeout_s: float
    fetcher: Fetcher
    leader: Leader
    stop: asyncio.Event  # set to end the agent
    num_places: int | None
    gone: dict[str, int] = field(default_factory=dict)  # unloaded names, and the revisions of their removal

    def report(self) -> AgentReport:
        return AgentReport(
            agent_id=self.agent_id,
            url=self.url,
            engines=self.fleet.statuses(),
            copies=self.store.ages_s(),
            store_bytes=self.store.capacity_bytes,
            used_bytes=self.store.used_bytes,
            core_division=self.core_division,
            keeps=tuple(sorted(self.store.kept())),
            fetches=dict(self.fetcher.by_peer),
            num_places=self.num_places,
        )

    async def release(self, digest: str) -> bool:
        """Have all engines unload a digest's adapters; return False if one is in use."""
        return all([await served.release(digest) for served in self.fleet.all_served()])


class AgentRoutes:
    """Handlers bound to one agent."""

    def __init__(self, state: AgentState) -> None:
        self._state = state

    def app(self, cluster_key: str) -> web.Application:
        """Return the application; every request needs the cluster's key."""
        files = f"{AGENT_FILES_PATH}/{{digest}}"
        return make_app(
            cluster_key_check(cluster_key),
            [
                web.post(AGENT_CHECK_PATH, self.check),
                web.post(AGENT_ENSURE_PATH, self.ensure),
                web.post(AGENT_UNLOAD_PATH, self.unload),
                web.post(AGENT_PIN_PATH, self.pin),
                web.post(AGENT_ENGINES_PATH, self.engines),
                web.post(AGENT_JOIN_PATH, self.join),
                web.post(AGENT_END_PATH, self.end),
                web.get(files, self.manifest),
                web.get(f"{files}/{{file}}", self.file),
                web.get(f"{AGENT_FILES_PATH}/{{path:.*}}", self.no_digest),
            ],
        )

    async def check(self, request: web.Request) -> web.Response:
        """Check a directory, and copy its files into the store."""
        source = Path((await read_struct(request, CheckAdapter)).path).expanduser()
        manifest, rank = await self._state.store.ingest(source, self._state.release)
        self._state.fleet.changed.set()
        num_bytes = sum(one.num_bytes for one in manifest.files)
        return struct_response(CheckedAdapter(digest=manifest.digest, rank=rank, num_bytes=num_bytes))

    async def ensure(self, request: web.Request) -> web.Response:
        """Have an engine serve an adapter, at the requested revision or a later one."""
        asked = await read_struct(request, Ensure)
        served = self._state.fleet.served(asked.engine_id)
        ensured = await served.ensure(asked.adapter, asked.sources)
        self._state.fleet.changed.set()
        return struct_response(ensured)

    async def unload(self, request: web.Request) -> web.Response:
        """Unload a name at all engines; answered when they take no new requests for it."""
        gone = await read_struct(request, Unload)
        known = self._state.gone.get(gone.name, 0)
        self._state.gone[gone.name] = max(known, gone.revision)
        for served in self._state.fleet.all_served():
            await served.unload(gone.name, gone.revision)
        return struct_response(gone)

    async def pin(self, request: web.Request) -> web.Response:
        """Pin or unpin a name at the engines that serve it."""
        pin = await read_struct(request, Pin)
        for served in self._state.fleet.all_served():
            await served.pin(pin.name, pinned=pin.pinned)
        return struct_response(pin)

    async def engines(self, request: web.Request) -> web.Response:
        """Start to add, drain or remove engines; reports show the progress."""
        change = await read_struct(request, EngineChange)
        fleet = self._state.fleet
        if change.action == "add":
            await fleet.add(change.num_engines)
        elif change.action in ("drain", "remove") and change.engine_id is not None:
            fleet.drain(change.engine_id, self._state.drain_timeout_s)
        else:
            raise InvalidValueError(
                "action must be add, or drain or remove with an engine_id", param="action"
            )
        return struct_response(self._state.report())

    async def join(self, request: web.Request) -> web.Response:
        """Report to another controller, unless the current one answers."""
        asked = await read_struct(request, Join)
        self._state.leader.follow(asked.controller_url)
        self._state.fleet.changed.set()
        return struct_response(asked)

    async def end(self, request: web.Request) -> web.Response:
        asked = await read_struct(request, EndAgent)
        if asked.agent_id != self._state.agent_id:  # the address belongs to another agent now
            text = f"this is agent {self._state.agent_id}"
            raise HttpError(404, text, code="unknown_engine", param="agent_id")
        self._state.stop.set()
        return struct_response(asked)

    async def manifest(self, request: web.Request) -> web.Response:
        digest = check_digest(request.match_info["digest"])
        manifest = self._state.store.manifest(digest)
        if manifest is None:
            raise _not_here(digest)
        return struct_response(manifest)

    async def file(self, request: web.Request) -> web.StreamResponse:
        """One file of an adapter, by sendfile."""
        digest = check_digest(request.match_info["digest"])
        manifest = self._state.store.manifest(digest)
        name = request.match_info["file"]
        if manifest is None or all(one.name != name for one in manifest.files):
            raise _not_here(digest)
        return web.FileResponse(self._state.store.path(digest) / name, chunk_size=2**20)

    async def no_digest(self, request: web.Request) -> web.StreamResponse:
        """Refuse a path instead of a digest."""
        check_digest(request.match_info["path"])
        raise AssertionError("a path with a slash is no digest")


def _not_here(digest: str) -> HttpError:
    return HttpError(404, f"adapter {digest} is not here", code="unknown_digest")
