"""``corun cluster status``, ``add``, ``remove`` and ``drain``: show or change a running cluster."""

import argparse
import asyncio
import os
from collections.abc import Iterator

from ..cluster.engine_types.given import given_card
from ..cluster.http.calls import call, make_session
from ..cluster.state_dir import find_controller, read_key
from ..cluster.wire import (
    ENGINES_PATH,
    STATUS_PATH,
    AgentReport,
    ClusterStatus,
    EngineCard,
    EngineChange,
    EngineStatus,
)
from ..config.cluster import ClusterConfig
from ..config.flags import build_configs
from ..errors import ConfigError
from ..server.errors import HttpError

_TIMEOUT_S = 60.0  # the last copies of adapters move before an engine is removed
_GIB = 2**30


def run(arguments: argparse.Namespace) -> int:
    """Send the changes to the controller, and print the status of the cluster."""
    command = arguments.command
    (cluster,) = build_configs(vars(arguments), (ClusterConfig,), environment=os.environ, command=command)
    changes = list(_changes(command.rpartition(" ")[2], arguments, cluster))
    url, key = find_controller(cluster), read_key(cluster)
    for line in asyncio.run(_ask(url, key, changes)):
        print(line)
    return 0


def _changes(action: str, arguments: argparse.Namespace, cluster: ClusterConfig) -> Iterator[EngineChange]:
    if action == "add":
        if cluster.engines is None and not cluster.engine:
            raise ConfigError("nothing to add: give --engines N, or --engine URL of one that runs already")
        for text in cluster.engine:
            card = given_card(text)
            yield EngineChange(action="add", url=card.url, foreign=card.foreign)
        if cluster.engines is not None:
            yield EngineChange(action="add", num_engines=cluster.engines)
    elif action != "status":
        for engine_id in arguments.engine_id:
            yield EngineChange(action=action, engine_id=engine_id)


async def _ask(url: str, key: str, changes: list[EngineChange]) -> list[str]:
    async with make_session(key) as session:
        try:
            for change in changes:
                await call(session, url + ENGINES_PATH, change, dict, timeout_s=_TIMEOUT_S)
            status = await call(session, url + STATUS_PATH, None, ClusterStatus, timeout_s=_TIMEOUT_S)
        except HttpError as error:
            # A 4xx is a mistake in the options, a 5xx a failure of the cluster.
            raise ConfigError(str(error)) if error.status < 500 else error from None
    return list(status_lines(url, status))


def status_lines(url: str, status: ClusterStatus) -> Iterator[str]:
    """Yield a line for each engine, agent (with its cores) and adapter."""
    yield (f"controller {url}, {_count(status.num_gateways, 'gateway')}, placement {status.placement}")
    machines = status.machines
    if machines is not None:
        how = "" if machines.is_up else f", and does not answer: {machines.reason}"
        supervised = f"{machines.num_supervised} of {machines.num_agents}"
        yield f"{machines.kind} supervises {supervised} agents{how}"
    reported = {engine.engine_id: engine for agent in status.agents for engine in agent.engines}
    for card in status.engines:
        yield f"engine {_engine(card, reported.pop(card.engine_id, None), status)}"
    for engine in reported.values():
        reason = f": {engine.reason}" if engine.reason else ""
        yield f"engine {engine.engine_id}  {engine.state}{reason}"
    for agent in status.agents:
        yield from _agent(agent)
    for adapter in status.adapters:
        copies = sum(adapter.digest in agent.copies for agent in status.agents)
        reason = f": {adapter.reason}" if adapter.reason else ""
        pinned = ", pinned" if adapter.pinned else ""
        yield (
            f"adapter {adapter.name}  {adapter.state}{reason}, rank {adapter.rank}, revision "
            f"{adapter.revision}, {_count(copies, 'copy', 'copies')}{pinned}"
        )


def _engine(card: EngineCard, engine: EngineStatus | None, status: ClusterStatus) -> str:
    state = "draining" if card.is_draining else "ready" if engine is None else engine.state
    parts = [f"{card.engine_id}  {state}  {card.url}"]
    if card.foreign is not None:
        parts.append(card.foreign.kind)
    if engine is not None:
        parts.append(f"CPU {engine.cpu_list}" if engine.cpu_list else "shared cores")
        if engine.num_restarts:
            parts.append(_count(engine.num_restarts, "restart"))
    ejected = status.ejected.values()
    reasons = {seen[card.engine_id] for seen in ejected if card.engine_id in seen}
    parts += [f"not sent to: {reason}" for reason in sorted(reasons)]
    return ", ".join(parts)


def _agent(agent: AgentReport) -> Iterator[str]:
    yield (
        f"agent {agent.agent_id}  {agent.url}, {_count(len(agent.copies), 'adapter')} in "
        f"{agent.used_bytes / _GIB:.3g} of {agent.store_bytes / _GIB:.3g} GiB"
    )
    for line in agent.core_division.splitlines():
        yield f"  {line}"


def _count(number: int, one: str, more: str | None = None) -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"
