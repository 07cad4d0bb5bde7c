"""Routes for routers on other machines: the engine's state and its profile."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..adapters.info import AdapterInfo
from ..adapters.names import READY
from ..engine_state import Accepted, EngineLoadState, EngineProfile, EngineState, PlacedAdapter
from ..frontend.engine_watch import EngineWatch
from .responses import json_response
from .settings import STATS_TIMEOUT_S
from .state import ServerState

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
