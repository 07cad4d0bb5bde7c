"""Launchers of bare engines, for tests of all launchers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
from aiohttp import ClientSession
from corun.runtime.cluster.division import EngineShare, MachineDivision
from corun.runtime.cluster.http.calls import make_session
from corun.runtime.cluster.launch.launcher import EngineLauncher
from corun.runtime.cluster.launch.local import LocalLauncher
from corun.runtime.cluster.launch.supervisor import StaticLauncher
from corun.runtime.cluster.wire import EngineCard, EngineProfile, EngineStatus
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.server.listening import bind

from .simulation import MODEL

KEY = "a-key"
DEADLINE_S = 60.0
BARE_ENGINE = (sys.executable, "-S", str(Path(__file__).with_name("bare_engine.py")))
# The state that a bare engine reports.
os.environ["BARE_ENGINE_PROFILE"] = msgspec.json.encode(
    EngineProfile(
        model="bare",
        base_fingerprint="f",
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=16,
        adapter_bytes_per_rank=1,
        file_bytes_per_s=1e9,
        kv_bytes_per_token=64,
        machine=MODEL,
    )
).decode()
SHARED = MachineDivision((EngineShare(num_threads=1),), ())


def local_launcher(
    directory: Path,
    session: ClientSession,
    division: MachineDivision = SHARED,
    engine: EngineConfig | None = None,
) -> LocalLauncher:
    """A launcher of bare engines as processes."""
    return LocalLauncher(
        division=division,
        engine=engine or EngineConfig(),
        serve=ServeConfig(),
        host="127.0.0.1",
        cluster_key=KEY,
        directory=directory,
        command=BARE_ENGINE,
        session=session,
    )


def received_by(url: str | None) -> dict[str, Any]:
    """State of a bare engine, from what it has received."""
    found: dict[str, Any] = httpx.get(f"{url}/received", timeout=DEADLINE_S).json()
    return found


class Launched(Protocol):
    """A launcher, with controls to end and start its engines without its knowledge."""

    @property
    def launcher(self) -> EngineLauncher:
        """Of two engines."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Their names."""

    def kill(self, engine_id: str) -> None:
        """End an engine, as a machine would."""

    async def revive(self, engine_id: str) -> None:
        """Start it again."""


class LaunchedLocally:
    """Engines are the launcher's children."""

    ids = ("a", "b")

    def __init__(self, launcher: LocalLauncher) -> None:
        self.launcher = launcher

    def kill(self, engine_id: str) -> None:
        (status,) = (one for one in self.launcher.list() if one.engine_id == engine_id)
        os.kill(status.pid, signal.SIGKILL)

    async def revive(self, engine_id: str) -> None:
        await self.launcher.start(engine_id)


class LaunchedElsewhere:
    """Engines are this test's children."""

    def __init__(self, launcher: StaticLauncher, processes: "dict[str, StaticEngine]") -> None:
        self.launcher = launcher
        self.ids = tuple(processes)
        self._processes = processes

    def kill(self, engine_id: str) -> None:
        self._processes[engine_id].end()

    async def revive(self, engine_id: str) -> None:
        self._processes[engine_id].begin()


class StaticEngine:
    """A bare engine on a port of its own."""

    def __init__(self, directory: Path) -> None:
        self._sock = bind("127.0.0.1", 0)
        self._port = self._sock.getsockname()[1]
        self._config = directory / f"{self._port}.json"
        self._config.write_text("{}")
        self.url = f"http://127.0.0.1:{self._port}"
        self.begin()

    def begin(self) -> None:
        address = ["--config", str(self._config), "--host", "127.0.0.1", "--port", str(self._port)]
        command = [*BARE_ENGINE, "serve", *address]
        self._process = subprocess.Popen(command)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.end()
        self._sock.close()


@contextlib.asynccontextmanager
async def locally(directory: Path) -> AsyncIterator[Launched]:
    async with make_session(KEY) as session:
        yield LaunchedLocally(local_launcher(directory, session))


@contextlib.asynccontextmanager
async def elsewhere(directory: Path) -> AsyncIterator[Launched]:
    """A launcher of engines that other programs run."""
    engines = [StaticEngine(directory) for _ in range(2)]
    try:
        async with make_session(KEY) as session:
            for engine in engines:
                await _answers(session, engine.url)
            cards = {one.url: EngineCard(engine_id=one.url, url=one.url) for one in engines}
            launcher = StaticLauncher(cards, session, look_every_s=0.05)
            yield LaunchedElsewhere(launcher, {engine.url: engine for engine in engines})
    finally:
        for engine in engines:
            engine.close()


async def _answers(session: ClientSession, url: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(OSError):
                async with session.get(f"{url}/ready"):
                    return
            await asyncio.sleep(0.02)


async def seen(launcher: EngineLauncher, condition: Callable[[EngineStatus], bool]) -> EngineStatus:
    """The first status that is watched and fits."""
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(launcher.watch()) as statuses:
        async for status in statuses:
            if condition(status):
                return status
    raise AssertionError("the launcher has closed")
