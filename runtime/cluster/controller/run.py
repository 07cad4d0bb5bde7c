"""Builds a controller, and runs it until a signal ends it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

from ...errors import ResourceError
from ...server.listening import bind, url_of
from ..http.calls import make_session
from ..http.serving import serve_app
from ..policy.placement.registry import check_live_placement
from ..settings import ControllerSettings
from ..wire import AgentCard
from .app import ControllerParts, ControllerRoutes
from .changes import AdapterChanges
from .commands import Commands
from .engine_changes import EngineChanges
from .machines import Machines
from .members import Members
from .placing import PlacementSettings, Placing
from .pool import CopyPool
from .registry import Registry
from .table import RoutingTable

_SWEEP_EVERY_S = 0.25
_DRAIN_TIMEOUT_S = 2.0

_logger = logging.getLogger(__name__)


async def run_controller(settings: ControllerSettings, stop: asyncio.Event) -> None:
    """Serve until ``stop``.

    Raises ``ConfigError`` if the port is taken, or the state directory is held by another
    controller, foreign or corrupt.
    """
    check_live_placement(settings.placement, has_points=settings.operating_points is not None)
    with bind(settings.host, settings.port) as sock:
        registry = Registry(Path(settings.state_dir), time.time)
        try:
            registry.begin_run(settings.run_id)
            async with _parts(settings, registry) as parts:
                app = ControllerRoutes(parts).app(settings.cluster_key)
                async with asyncio.TaskGroup() as group:  # one failure ends all
                    running = [group.create_task(work) for work in _work(parts)]
                    _logger.info("listening at %s", url_of(sock))
                    await serve_app(app, sock, stop, drain_timeout_s=_DRAIN_TIMEOUT_S)
                    for task in running:
                        task.cancel()
                parts.placing.save()
                registry.set_members(*parts.members.stored())
        finally:
            registry.close()


@contextlib.asynccontextmanager
async def _parts(settings: ControllerSettings, registry: Registry) -> AsyncIterator[ControllerParts]:
    table, pool = RoutingTable(registry.start), CopyPool()
    points = settings.operating_points
    async with make_session(settings.cluster_key) as session:

        def show(base_fingerprint: str) -> None:
            changes.show(base_fingerprint)

        members = Members(table, session, time.monotonic, on_base=show)
        commands = Commands(table, members, pool, session, settings.roots)
        changes = AdapterChanges(registry, table, members, commands)
        machines = Machines(registry)
        engine_changes = EngineChanges(registry, table, members, pool, commands, machines)
        placing = Placing(
            PlacementSettings(
                policy=settings.placement,
                every_s=settings.placement_interval_s,
                min_copies=settings.min_copies,
                tokens_per_s=None if points is None else points.tokens_per_s,
            ),
            registry,
            table,
            members,
            pool,
            commands,
            time.time,
        )
        parts = ControllerParts(
            registry=registry,
            table=table,
            members=members,
            pool=pool,
            commands=commands,
            changes=changes,
            engine_changes=engine_changes,
            placing=placing,
            machines=machines,
            placement=settings.placement,
        )
        _restore(parts)
        try:
            yield parts
        finally:
            for close in (changes.close, engine_changes.close, members.close):
                await close()


def _work(parts: ControllerParts) -> list[Coroutine[None, None, None]]:
    return [
        parts.changes.retry_unloads(),
        parts.placing.save_forever(),
        parts.placing.place_forever(),
        _sweep_forever(parts),
    ]


def _restore(parts: ControllerParts) -> None:
    known: dict[str, list[str]] = {}
    for copy in parts.registry.copies():
        known.setdefault(copy.agent_id, []).append(copy.digest)
    for agent_id, digests in known.items():
        parts.pool.restore(agent_id, digests)
    parts.pool.set_ended(known)  # until their first report
    parts.changes.recover()
    parts.placing.restore()
    agents = [
        AgentCard(agent_id=one, url=url, digests=tuple(sorted(known.get(one, ()))))
        for one, url in parts.registry.agents().items()
    ]
    parts.members.restore(parts.registry.members(), agents, parts.registry.engines())


async def _sweep_forever(parts: ControllerParts) -> None:
    """Detect silent and leaving members, and store the membership. Runs for ever."""
    stored = parts.members.stored()
    while True:
        await asyncio.sleep(_SWEEP_EVERY_S)
        parts.members.sweep()
        parts.engine_changes.move_leaving()
        if (now := parts.members.stored()) != stored:
            try:
                parts.registry.set_members(*now)
                stored = now
            except ResourceError as error:
                _logger.warning("could not save cluster membership (will retry): %s", error)
