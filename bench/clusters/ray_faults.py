"""Faults of Ray under a load: its control store, head, nodes and network fail."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from http import HTTPStatus

import numpy as np
import psutil
from corun.runtime.server.errors import HttpError
from support.ray_cluster import SEPARATE_HOST, RayCluster

from .engine_faults import RATE_RPS, Figures, failures, is_usable, killed, while_away
from .live import LiveCluster, until
from .streams import Load, body_maker, load_of

NUM_ENGINES = 2  # on as many of three nodes
WHOLE_TIMEOUT_S = 120.0
_BEFORE_S, _AFTER_S = 3.0, 5.0
_BASELINE_S, _AWAY_S, _PARTITION_S = 40.0, 60.0, 10.0

_Names = Sequence[str]


async def nothing(ray: RayCluster, cluster: LiveCluster, names: _Names) -> Figures:
    """Nothing fails: by how much first tokens differ between two times of one load anyway."""
    async with _load(cluster, names) as load:
        began_s = time.monotonic()
        await asyncio.sleep(_BASELINE_S + _AWAY_S)
        ended_s = time.monotonic()
    return failures(load, None) | _p99s(load, began_s + _BASELINE_S, ended_s)


async def control_store_kill(ray: RayCluster, cluster: LiveCluster, names: _Names) -> Figures:
    """The control store is away for a minute: nothing is started, and everything else goes on."""
    async with _load(cluster, names) as load:
        await asyncio.sleep(_BASELINE_S)
        killed_s = time.monotonic()
        await asyncio.to_thread(ray.kill_control_store)
        await asyncio.sleep(_AWAY_S / 2)
        try:
            await cluster.change("add")
            is_refused = 0.0
        except HttpError as error:
            print(f"  {error.status}: {error}", flush=True)
            is_refused = float(error.status == HTTPStatus.SERVICE_UNAVAILABLE)
        await asyncio.sleep(max(0.0, killed_s + _AWAY_S - time.monotonic()))
        back_s = time.monotonic()
        await asyncio.to_thread(ray.begin_control_store)
        await _whole(ray, cluster, NUM_ENGINES + 1)  # with the requested one
        whole_s = time.monotonic() - back_s
        await asyncio.sleep(_AFTER_S)
    of_store = {"start refused": is_refused, "whole again s": whole_s}
    return failures(load, None) | _p99s(load, killed_s, back_s) | of_store


async def raylet_kill(ray: RayCluster, cluster: LiveCluster, names: _Names) -> Figures:
    """Only a raylet dies: what runs on its node goes on, and an engine begins elsewhere."""
    return await _node_kill(ray, cluster, names, with_engines=False)


async def node_kill(ray: RayCluster, cluster: LiveCluster, names: _Names) -> Figures:
    """A machine ends, with its raylet and all that runs there."""
    return await _node_kill(ray, cluster, names, with_engines=True)


async def head_kill(ray: RayCluster, cluster: LiveCluster, names: _Names) -> Figures:
    """The head ends, and begins again; nodes that give up begin again, too."""
    async with _load(cluster, names) as load:
        await asyncio.sleep(_BEFORE_S)
        await asyncio.to_thread(ray.kill_head)
        await until(lambda: _is_down(cluster), WHOLE_TIMEOUT_S)
        began_s = time.monotonic()
        await asyncio.to_thread(ray.begin_head)
        await _whole(ray, cluster, NUM_ENGINES)
        whole_s = time.monotonic() - began_s
        await asyncio.sleep(_AFTER_S)
    return failures(load, None) | {"whole again s": whole_s}


async def rolling_restart(ray: RayCluster, cluster: LiveCluster, names: _Names) -> Figures:
    """Each node in turn: its agent drains, the machine ends, and begins again."""
    slowest_s, nodes = 0.0, ray.nodes
    async with _load(cluster, names) as load:
        for node in nodes:
            agent = ray.agent_at(node)
            if agent is not None:
                await cluster.change("drain", engine_id=agent.agent_id)
                await until(partial(_has_ended, agent.pid), WHOLE_TIMEOUT_S)
            await asyncio.to_thread(ray.kill_node, node)
            await asyncio.to_thread(ray.begin_node, node)
            slowest_s = max(slowest_s, await _whole(ray, cluster, NUM_ENGINES))
        await asyncio.sleep(_AFTER_S)
    return failures(load, None) | {"restarts": len(nodes), "slowest whole s": slowest_s}


async def partition(ray: RayCluster, cluster: LiveCluster, names: _Names) -> Figures:
    """The machine of an engine is cut off for 10 s; ``ray`` has one in a network of its own."""
    async with _load(cluster, names) as load:
        await asyncio.sleep(_BEFORE_S)
        (engine_id,) = [
            one.engine_id
            for one in (await cluster.engines()).values()
            if one.url is not None and SEPARATE_HOST in one.url
        ]
        ray.cut_off()
        away = await while_away(cluster, engine_id, _PARTITION_S)
        ray.let_in()
        back_s = await until(lambda: is_usable(cluster, engine_id), WHOLE_TIMEOUT_S)
        await _whole(ray, cluster, NUM_ENGINES)
        await asyncio.sleep(_AFTER_S)
    return away.figures(load) | {"back s": back_s}


async def _node_kill(ray: RayCluster, cluster: LiveCluster, names: _Names, *, with_engines: bool) -> Figures:
    async with _load(cluster, names) as load:
        await asyncio.sleep(_BEFORE_S)
        node = next(node for node in ray.nodes if ray.agent_at(node) is not None)
        agent = ray.agent_at(node)
        assert agent is not None
        before = set(await cluster.engines())
        (engine_id,) = [one for one in before if one.rpartition("-")[0] == agent.agent_id]
        if with_engines:
            await asyncio.to_thread(ray.kill_node, node)
        else:
            await asyncio.to_thread(ray.kill_raylet, node)
        killed_s = time.monotonic()

        async def replaced() -> bool:
            return bool(await cluster.usable() - before)

        replaced_s = await until(replaced, WHOLE_TIMEOUT_S)
        await asyncio.sleep(_AFTER_S)
    return killed(load, engine_id, killed_s) | {"replaced s": replaced_s}


async def _whole(ray: RayCluster, cluster: LiveCluster, num_engines: int) -> float:
    """Wait until Ray watches all agents again, and so many engines get requests.

    Nodes that have ended are started again, as a machine's service manager would do.
    """

    async def is_whole() -> bool:
        await asyncio.to_thread(ray.mend)
        machines = (await cluster.status()).machines
        is_watched = machines is not None and machines.num_supervised == machines.num_agents
        return is_watched and len(await cluster.usable()) >= num_engines

    return await until(is_whole, WHOLE_TIMEOUT_S, every_s=0.2)


async def _is_down(cluster: LiveCluster) -> bool:
    machines = (await cluster.status()).machines
    return machines is not None and not machines.is_up


async def _has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def _load(cluster: LiveCluster, names: _Names) -> AbstractAsyncContextManager[Load]:
    return load_of(cluster.url, RATE_RPS, body_maker(names), seed=0)


def _p99s(load: Load, away_s: float, back_s: float) -> Figures:
    """Before something goes away, and while it is."""
    before_s = _p99(load, away_s - _BASELINE_S, away_s)
    while_away_s = _p99(load, away_s, back_s)
    ratio = while_away_s / before_s
    return {"p99 before s": before_s, "p99 away s": while_away_s, "p99 ratio": ratio}


def _p99(load: Load, from_s: float, to_s: float) -> float:
    """Of first tokens, of streams that began in a time."""
    waits_s = [
        one.first_s - one.started_s
        for one in load.outcomes
        if one.first_s is not None and from_s <= one.started_s < to_s
    ]
    return float(np.percentile(waits_s, 99))
