"""The controller's HTTP server: for gateways, agents and commands."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from ...errors import ResourceError
from ...server.errors import HttpError
from ...server.metrics import MAX_ADAPTER_SERIES, OTHER
from ..http.events import EventStream
from ..http.serving import cluster_key_check, make_app, read_struct, struct_response
from ..wire import (
    ACKS_PATH,
    ADAPTERS_PATH,
    AGENTS_PATH,
    DEMAND_PATH,
    ENGINES_PATH,
    ENSURE_PATH,
    MACHINES_PATH,
    STATUS_PATH,
    TABLE_PATH,
    AdapterChange,
    AgentReport,
    ClusterStatus,
    EngineChange,
    Ensure,
    GatewayDemand,
    MachinesReport,
    TableAck,
)
from .changes import AdapterChanges
from .commands import Commands
from .engine_changes import EngineChanges
from .machines import Machines
from .members import Members
from .placing import Placing
from .pool import CopyPool
from .registry import Registry
from .table import RoutingTable, Subscriber


class _Collector:
    """Collects metrics from the controller's parts."""

    def __init__(self, table: RoutingTable, pool: CopyPool, members: Members, placing: Placing) -> None:
        self._table = table
        self._pool = pool
        self._members = members
        self._placing = placing

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        table, copies = self._table, self._pool.num_copies()
        by_name = Counter[str]()
        for number, entry in enumerate(table.adapters.values()):
            name = entry.name if number < MAX_ADAPTER_SERIES else OTHER
            by_name[name] += copies.get(entry.digest, 0)
        family = GaugeMetricFamily(
            "corun_cluster_adapter_copies",
            "Copies of an adapter's files, by adapter.",
            labels=["adapter_name"],
        )
        for name, number in by_name.items():
            family.add_metric([name], number)
        yield family
        numbers = [len(agent.digests) for agent in table.agents.values()]
        for name, text, value in (
            ("most_adapters", "Adapters at the agent with most adapters.", max(numbers, default=0)),
            ("adapters_per_agent", "Adapters divided by agents.", len(set(copies)) / max(1, len(numbers))),
            ("engines", "Engines that get requests.", len(self._members.open_engines())),
            ("gateways", "Connected gateways.", len(table.subscribers)),
            (
                "placement_moved_bytes",
                "Bytes moved by the last step of the placement.",
                self._placing.moved_bytes,
            ),
            ("placement_step_seconds", "Time to plan the last step of the placement.", self._placing.step_s),
        ):
            yield GaugeMetricFamily(f"corun_cluster_{name}", text, value)
        yield from self._fetches()

    def _fetches(self) -> Iterator[Metric]:
        for name, field, text in (
            ("fetches", "num_fetched", "Adapters fetched by an agent."),
            ("fetched_bytes", "num_bytes", "Bytes of files fetched by an agent."),
            ("fetch_seconds", "seconds", "Seconds of fetches, with checks."),
            ("fetches_lost", "num_lost", "Fetches that a peer did not complete."),
            ("fetches_wrong", "num_wrong", "Fetches with content that did not match the digest."),
        ):
            family = GaugeMetricFamily(f"corun_cluster_{name}", text, labels=["agent", "peer"])
            for report in self._members.reports.values():
                for peer, fetches in report.fetches.items():
                    family.add_metric([report.agent_id, peer], getattr(fetches, field))
            yield family


def exposition(table: RoutingTable, pool: CopyPool, members: Members, placing: Placing) -> bytes:
    """Return the text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Collector(table, pool, members, placing))
    return generate_latest(registry)


_COMMENT_EVERY_S = 0.5
_SEND_TIMEOUT_S = 2.0
_STORE_USE_EVERY_S = 60.0
_METRICS_PATH = "/metrics"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerParts:
    """The parts of a controller."""

    registry: Registry
    table: RoutingTable
    members: Members
    pool: CopyPool
    commands: Commands
    changes: AdapterChanges
    engine_changes: EngineChanges
    placing: Placing
    machines: Machines
    placement: str


class ControllerRoutes:
    """Handlers over one controller's parts."""

    def __init__(self, parts: ControllerParts) -> None:
        self._parts = parts
        self._used_s: dict[str, float] = {}  # agent: when the use of its copies was stored
        self._is_ending = False

    def app(self, cluster_key: str) -> web.Application:
        """Return the application; every request needs the cluster's key."""
        app = make_app(
            cluster_key_check(cluster_key),
            [
                web.get(TABLE_PATH, self.table),
                web.post(ACKS_PATH, self.acks),
                web.post(DEMAND_PATH, self.demand),
                web.post(AGENTS_PATH, self.agents),
                web.post(ENSURE_PATH, self.ensure),
                web.post(ADAPTERS_PATH, self.adapters),
                web.post(ENGINES_PATH, self.engines),
                web.post(MACHINES_PATH, self.machines),
                web.get(STATUS_PATH, self.status),
                web.get(_METRICS_PATH, self.metrics),
            ],
        )
        app.on_shutdown.append(self._end_streams)
        return app

    async def table(self, request: web.Request) -> web.StreamResponse:
        """Stream the table: first all of it, then changes, until the gateway disconnects."""
        gateway_id = request.query.get("gateway", "")
        if not gateway_id:
            raise HttpError(400, f"{TABLE_PATH} takes ?gateway=ID", code="missing_field", param="gateway")
        table = self._parts.table
        stream = EventStream(request, send_timeout_s=_SEND_TIMEOUT_S)
        response = await stream.begin()
        subscriber = table.subscribe(gateway_id)
        try:
            while subscriber.is_open and not self._is_ending:
                change = table.next_change(subscriber)
                if change is not None:
                    await stream.send(change)
                elif not await _woken(subscriber):
                    await stream.comment()
        except ConnectionError:
            pass  # the gateway has disconnected, or does not read
        finally:
            table.unsubscribe(subscriber)
        return response

    async def acks(self, request: web.Request) -> web.Response:
        """Take a gateway's acknowledgement of the table up to a sequence."""
        ack = await read_struct(request, TableAck)
        self._parts.table.acknowledge(ack.gateway_id, ack.sequence)
        return struct_response(ack)

    async def demand(self, request: web.Request) -> web.Response:
        """Take a gateway's demand and ejections of the last second."""
        demand = await read_struct(request, GatewayDemand)
        self._parts.placing.record(demand)
        self._parts.members.eject(demand)
        return web.json_response({})

    async def agents(self, request: web.Request) -> web.Response:
        """Take an agent's report; answer with orders on copies."""
        parts, report = self._parts, await read_struct(request, AgentReport)
        agent_id, now_s = report.agent_id, time.time()
        parts.members.report(report)
        is_new = parts.pool.report(report)
        parts.pool.set_ended(parts.members.silent() | parts.members.leaving())
        orders = parts.pool.orders(
            agent_id,
            parts.table.adapters.values(),
            parts.changes.busy(),
            parts.placing.planned_digests(agent_id),
            parts.placing.placed_digests(),
        )
        if is_new or now_s - self._used_s.get(agent_id, 0.0) > _STORE_USE_EVERY_S:
            try:
                parts.registry.set_copies(agent_id, parts.pool.stored(agent_id, report.copies, now_s))
                self._used_s[agent_id] = now_s
            except ResourceError as error:
                _logger.warning("could not save the copies of agent %s (will retry): %s", agent_id, error)
        return struct_response(orders)

    async def ensure(self, request: web.Request) -> web.Response:
        """Have an engine without an agent serve an adapter, for a gateway."""
        asked = await read_struct(request, Ensure)
        ensured = await self._parts.commands.ensure(asked.engine_id, asked.adapter)
        return struct_response(ensured)

    async def adapters(self, request: web.Request) -> web.Response:
        """Load, unload or pin a name; answer with its entry, or its last one."""
        change = await read_struct(request, AdapterChange)
        entry = await self._parts.changes.apply(change)
        if change.action == "unload":
            self._parts.placing.remove(change.name)
        return struct_response(entry)

    async def engines(self, request: web.Request) -> web.Response:
        """Add, drain or remove engines; answer with the new status."""
        await self._parts.engine_changes.apply(await read_struct(request, EngineChange))
        return struct_response(self._status())

    async def machines(self, request: web.Request) -> web.Response:
        """Take the report on other machines; answer with the engines to start there."""
        report = await read_struct(request, MachinesReport)
        num_engines = len(self._parts.table.engines)
        return struct_response(self._parts.machines.apply_report(report, num_engines))

    async def status(self, request: web.Request) -> web.Response:
        return struct_response(self._status())

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus exposition."""
        text = exposition(self._parts.table, self._parts.pool, self._parts.members, self._parts.placing)
        return web.Response(body=text, headers={"Content-Type": _METRICS_TYPE})

    def _status(self) -> ClusterStatus:
        parts = self._parts
        return ClusterStatus(
            engines=tuple(parts.table.engines.values()),
            agents=tuple(parts.members.reports.values()),
            adapters=tuple(parts.table.adapters.values()),
            ejected=parts.members.ejected,
            placement=parts.placement,
            num_gateways=len(parts.table.subscribers),
            machines=parts.machines.state(),
        )

    async def _end_streams(self, app: web.Application) -> None:
        self._is_ending = True
        for subscriber in list(self._parts.table.subscribers.values()):
            self._parts.table.unsubscribe(subscriber)


async def _woken(subscriber: Subscriber) -> bool:
    """Wait for a change; return False when a keep-alive is due."""
    try:
        async with asyncio.timeout(_COMMENT_EVERY_S):
            await subscriber.wake.wait()
    except TimeoutError:
        return False
    return True
