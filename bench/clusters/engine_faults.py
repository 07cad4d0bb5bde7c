"""Engines that die, stop, drain, come and go, under a load; and clients that leave."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import psutil
from corun.runtime.cluster.http.events import read_events
from corun.runtime.cluster.wire import ENGINE_STATE_PATH, EngineState
from corun.runtime.tasks import cancel_all

from .live import START_TIMEOUT_S, LiveCluster, until
from .streams import ERROR, REFUSED, SILENT, Load, Outcome, body_maker, load_of

RATE_RPS = 30.0
Figures = dict[str, float]
_BEFORE_S, _AFTER_S = 2.0, 4.0  # of the load around a fault
_STOPPED_S = 10.0
_NUM_RESTARTS, _NUM_CHANGES = 20, 10
_LEAVE_AFTER_S = 0.3
_LONG_PROMPT, _LONG_ANSWER = 8000, 1000


def exceeded(
    fault: str, figures: Figures, most_of: Mapping[str, Figures], least_of: Mapping[str, Figures]
) -> list[str]:
    """Which bounds the figures of a run exceed."""
    over = [
        f"{fault}: {name} is {figures[name]:g}, at most {most:g}"
        for name, most in most_of[fault].items()
        if figures[name] > most
    ]
    under = [
        f"{fault}: {name} is {figures[name]:g}, at least {least:g}"
        for name, least in least_of.get(fault, {}).items()
        if figures[name] < least
    ]
    return over + under


def as_text(figures: Figures) -> str:
    """The figures on one line."""
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


async def engine_kill(cluster: LiveCluster, names: Sequence[str], seed: int) -> Figures:
    """An engine is killed: its streams end, each with an error event, and it is replaced."""
    async with load_of(cluster.url, RATE_RPS, body_maker(names), seed) as load:
        await asyncio.sleep(_BEFORE_S)
        engine_id, pid = await _some_engine(cluster, seed)
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()

        async def replaced() -> bool:
            engine = (await cluster.engines()).get(engine_id)
            return engine is not None and engine.pid != pid and engine_id in await cluster.usable()

        replaced_s = await until(replaced, START_TIMEOUT_S)
        await asyncio.sleep(_AFTER_S)
    return killed(load, engine_id, killed_s) | {"replaced s": replaced_s}


async def engine_stop(cluster: LiveCluster, names: Sequence[str], seed: int) -> Figures:
    """An engine is stopped: it is ejected, its requests end or go elsewhere, and it comes back."""
    async with load_of(cluster.url, RATE_RPS, body_maker(names), seed) as load:
        await asyncio.sleep(_BEFORE_S)
        engine_id, pid = await _some_engine(cluster, seed)
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            process.suspend()
        away = await while_away(cluster, engine_id, _STOPPED_S)
        for process in family:
            process.resume()
        back_s = await until(lambda: is_usable(cluster, engine_id), START_TIMEOUT_S)
        await asyncio.sleep(_AFTER_S)
    return away.figures(load) | {"back s": back_s}


async def client_leaves(cluster: LiveCluster, names: Sequence[str], seed: int) -> Figures:
    """Clients leave before and after their first token: the engine is free."""
    return {
        "free before first s": await _left(cluster, names, after_first=False),
        "free after first s": await _left(cluster, names, after_first=True),
    }


async def restarts_by_drain(cluster: LiveCluster, names: Sequence[str], seed: int) -> Figures:
    """Engines are drained and started again, one after the other."""
    number = len(await cluster.engines())
    async with load_of(cluster.url, RATE_RPS, body_maker(names), seed) as load:
        for _ in range(_NUM_RESTARTS):
            engine_id = min(await cluster.engines(), key=_age)
            await _end_engine(cluster, "drain", engine_id)
            await cluster.change("add")
            await cluster.has_usable(number)
        await asyncio.sleep(1.0)
    return failures(load, None) | {"restarts": _NUM_RESTARTS}


async def engines_come_and_go(cluster: LiveCluster, names: Sequence[str], seed: int) -> Figures:
    """An engine is added and removed, and no adapter is ever without a copy."""
    number = len(await cluster.engines())
    without_copy = 0
    async with load_of(cluster.url, RATE_RPS, body_maker(names), seed) as load:
        for _ in range(_NUM_CHANGES):
            before = set(await cluster.engines())
            await cluster.change("add")
            await cluster.has_usable(number + 1)
            (added,) = set(await cluster.engines()) - before
            await asyncio.sleep(0.5)
            await _end_engine(cluster, "remove", added)
            status = await cluster.status()
            copies = {digest for agent in status.agents for digest in agent.copies}
            without_copy += sum(one.digest not in copies for one in status.adapters)
    return failures(load, None) | {"without a copy": without_copy, "changes": 2 * _NUM_CHANGES}


def killed(load: Load, engine_id: str, killed_s: float) -> Figures:
    """How a load has fared of which an engine was killed then."""
    cut = _cut_of(load, engine_id)
    return failures(load, engine_id) | {
        "streams cut": len(cut),
        "avoided s": max([0.0, *(one.started_s - killed_s for one in cut)]),
    }


@dataclass(frozen=True, slots=True)
class Away:
    """How the gateway has fared with an engine that says nothing, since when."""

    engine_id: str
    since_s: float
    ejected_s: float  # after that
    let_go_s: float  # likewise

    def figures(self, load: Load) -> Figures:
        """Of the load that ran meanwhile."""
        cut = _cut_of(load, self.engine_id)
        return failures(load, self.engine_id) | {
            "streams cut": len(cut),
            "ejected s": self.ejected_s,
            "open ended or retried s": self.let_go_s,
            "last error s": max([0.0, *(one.ended_s - self.since_s for one in cut)]),
        }


async def while_away(cluster: LiveCluster, engine_id: str, away_s: float) -> Away:
    """Watch an engine that has just fallen silent for so long."""
    since_s = time.monotonic()

    async def ejected() -> bool:
        return not await is_usable(cluster, engine_id)

    async def let_go() -> bool:
        return (await cluster.by_engine("in_flight"))[engine_id] == 0

    await until(ejected, away_s)
    ejected_s = time.monotonic() - since_s
    await until(let_go, away_s)
    let_go_s = time.monotonic() - since_s
    await asyncio.sleep(max(0.0, away_s - let_go_s))
    return Away(engine_id, since_s, ejected_s, let_go_s)


async def is_usable(cluster: LiveCluster, engine_id: str) -> bool:
    """Whether it is sent requests."""
    return engine_id in await cluster.usable()


async def _some_engine(cluster: LiveCluster, seed: int) -> tuple[str, int]:
    """One in turn, that gets requests."""
    usable = sorted(await cluster.usable())
    engine_id = usable[seed % len(usable)]
    return engine_id, (await cluster.engines())[engine_id].pid


async def _end_engine(cluster: LiveCluster, action: str, engine_id: str) -> None:
    await cluster.change(action, engine_id=engine_id)

    async def gone() -> bool:
        return engine_id not in await cluster.engines()

    await until(gone, START_TIMEOUT_S)


def _age(engine_id: str) -> int:
    return int(engine_id.rpartition("-")[2])


def _cut_of(load: Load, engine_id: str) -> list[Outcome]:
    """Streams that ended with an error event of this engine."""
    return [one for one in load.outcomes if one.kind == ERROR and one.engine == engine_id]


def failures(load: Load, engine_id: str | None) -> Figures:
    """How many streams ended otherwise than they may; those of this engine end with an error."""
    for one in load.bad():
        if one.kind != ERROR or one.engine != engine_id:
            print(f"  {one}", flush=True)
    return {
        "streams": len(load.outcomes),
        "lost before first byte": sum(one.kind == REFUSED for one in load.outcomes),
        "silent ends": sum(one.kind == SILENT for one in load.outcomes),
        "others cut": sum(
            one.kind == ERROR and (engine_id is None or one.engine != engine_id) for one in load.outcomes
        ),
    }


async def _left(cluster: LiveCluster, names: Sequence[str], *, after_first: bool) -> float:
    """Seconds from leaving to when the engines say that they have nothing."""
    engines = [one.url for one in (await cluster.engines()).values() if one.url is not None]
    num_tokens = _LONG_ANSWER
    body = {
        "model": names[0],
        "prompt": [5] * (64 if after_first else _LONG_PROMPT),
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
    }
    loads = {url: 0 for url in engines}

    async def watch(url: str) -> None:
        states = read_events(cluster.session, url + ENGINE_STATE_PATH, EngineState, silent_s=10.0)
        async with contextlib.aclosing(states):
            async for state in states:
                if state.load is not None:
                    running, waiting = (state.load.num_running_by_rank, state.load.num_waiting_by_rank)
                    loads[url] = sum(running.values()) + sum(waiting.values())

    async def is_busy() -> bool:
        return sum(loads.values()) > 0

    async def is_free() -> bool:
        return sum(loads.values()) == 0

    watching = [asyncio.ensure_future(watch(url)) for url in engines]
    try:
        await asyncio.sleep(0.2)
        async with aiohttp.ClientSession() as session:
            first = asyncio.Event()
            asking = asyncio.ensure_future(_read(session, cluster.url, body, first))
            await until(is_busy, 10.0, every_s=0.002)
            if after_first:
                async with asyncio.timeout(10.0):
                    await first.wait()
            else:
                await asyncio.sleep(_LEAVE_AFTER_S)
                assert not first.is_set(), "the first token has come"
            left_s = time.monotonic()
            await cancel_all(asking)
        assert await is_busy(), "it has ended by itself"
        await until(is_free, 10.0, every_s=0.002)
        return time.monotonic() - left_s
    finally:
        await cancel_all(*watching)


async def _read(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], first: asyncio.Event
) -> None:
    """Read a stream; cancellation closes the connection."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                first.set()
