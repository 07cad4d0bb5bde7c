"""Starts, restarts and ends the processes of a cluster on one machine, in order.

The controller starts first, then the agent with its engines, then gateways. They end in reverse
order, so that running requests are answered. Tokens and adapters do not pass this process.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ...config.notations import LoraModule
from ...errors import ConfigError, CorunError
from ...exit_codes import EXIT_FAILED
from ...server.errors import HttpError
from ...server.listening import StopSignals
from ...tasks import cancel_all
from ..engine_types.registry import engine_type_of
from ..http.calls import UnreachableError, call, make_session
from ..process import ended, exit_words, spawn
from ..settings import AgentSettings, ControllerSettings, GatewaySettings, ProcessSettings, RaySettings
from ..state_dir import publish_controller, remove_controller
from ..wire import (
    ADAPTERS_PATH,
    ENGINES_PATH,
    STATUS_PATH,
    AdapterChange,
    ClusterStatus,
    EngineCard,
    EngineChange,
    EngineStatus,
)
from .launcher import DRAINING, EXITED, READY, StatusBoard

_ASK_EVERY_S = 0.1
_CONTROLLER_START_S = 30.0
_CALL_TIMEOUT_S = 10.0
_LOAD_TIMEOUT_S = 180.0
_SIGNAL_S = 1.0
_GRACE_S = 5.0  # after the time to drain

_CONTROLLER = "corun.runtime.cluster.controller.__main__"
_AGENT = "corun.runtime.cluster.agent.__main__"
_NODES = "corun.runtime.cluster.machines.nodes"
_GATEWAY = "corun.runtime.cluster.gateway.__main__"

_RESTART_AFTER_S = (0.0, 0.5, 1.0, 5.0)  # by restarts in a row
_LASTING_S = 30.0  # after so long a run delays start over

_LOOK_TIMEOUT_S = 2.0


class StaticLauncher:
    """An ``EngineLauncher`` for engines that run already, and that it does not end."""

    def __init__(
        self, engines: Mapping[str, EngineCard], session: aiohttp.ClientSession, *, look_every_s: float = 1.0
    ) -> None:
        """``engines``: by id."""
        self._engines = engines
        self._session = session
        self._look_every_s = look_every_s
        self._board = StatusBoard()
        self._polling: dict[str, asyncio.Task[None]] = {}

    async def start(self, engine_id: str) -> None:
        """Find the engine. Raises ``HttpError`` if the server is not of its engine type."""
        if engine_id not in self._engines:
            raise ConfigError(f"engine {engine_id!r} has no URL, and this command does not start it")
        if engine_id in self._polling:
            return
        card = self._engines[engine_id]
        await engine_type_of(card.foreign).profile(self._session, card)
        self._board.set(EngineStatus(engine_id=engine_id, url=card.url, state=READY, pid=0, cpu_list=""))
        self._polling[engine_id] = asyncio.ensure_future(self._poll(card))

    async def stop(self, engine_id: str, *, drain_timeout_s: float) -> None:
        """Stop polling the engine. The engine goes on."""
        task = self._polling.pop(engine_id, None)
        if task is not None:
            await cancel_all(task)
        self._board.remove(engine_id)

    def list(self) -> tuple[EngineStatus, ...]:
        return self._board.list()

    def watch(self) -> AsyncGenerator[EngineStatus, None]:
        return self._board.watch()

    async def close(self) -> None:
        """Stop polling all engines."""
        for engine_id in list(self._polling):
            await self.stop(engine_id, drain_timeout_s=0.0)
        self._board.close()

    async def _poll(self, card: EngineCard) -> None:
        url = card.url + engine_type_of(card.foreign).ready_path
        while True:
            await asyncio.sleep(self._look_every_s)
            state, reason = await self._state_at(url)
            self._board.change(card.engine_id, state=state, reason=reason)

    async def _state_at(self, url: str) -> tuple[str, str | None]:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S), self._session.get(url) as response:
                is_ready = response.status == HTTPStatus.OK
                return READY if is_ready else DRAINING, None
        except TimeoutError:
            return EXITED, f"silent for {_LOOK_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return EXITED, str(error) or type(error).__name__


class SupervisedProcess:
    """A process of a cluster. On one event loop."""

    def __init__(self, module: str, settings: ProcessSettings) -> None:
        self._name = settings.process_name
        self._module = module
        self._settings = settings
        self._is_wanted = True
        self._process: subprocess.Popen[bytes] | None = None
        self._supervising: asyncio.Task[None] | None = None

    def start(self, on_exit: Callable[[int], bool]) -> None:
        """Start the process. ``on_exit`` gets the status of an exit; True restarts it."""
        self._process = self._spawn()
        self._supervising = asyncio.ensure_future(self._supervise(self._process, on_exit))

    async def end(self, timeout_s: float) -> None:
        """End the process, and kill it if it takes too long. Idempotent."""
        self._is_wanted = False
        if self._supervising is None or self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._supervising], timeout=timeout_s)
        if not done:
            _logger.warning("the %s process does not end; killing it", self._name)
            self.kill()
            await self._supervising

    def kill(self) -> None:
        """Kill the process; ``end`` reaps it."""
        self._is_wanted = False
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    async def _supervise(self, process: "subprocess.Popen[bytes]", on_exit: Callable[[int], bool]) -> None:
        tries = 0
        while True:
            started_s = time.monotonic()
            status = await ended(process)
            if not self._is_wanted or not on_exit(status):
                return
            tries = 0 if time.monotonic() - started_s >= _LASTING_S else tries
            after_s = _RESTART_AFTER_S[min(tries, len(_RESTART_AFTER_S) - 1)]
            tries += 1
            _logger.warning(
                "the %s process ended (%s); restarting it in %g s", self._name, exit_words(status), after_s
            )
            await asyncio.sleep(after_s)
            if not self._is_wanted:
                return
            try:
                process = self._process = self._spawn()
            except OSError as error:  # a later try may succeed
                _logger.error("cannot start the %s process (will retry): %s", self._name, error)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        return spawn(self._module, settings=self._settings)


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The processes to run. Without a controller: gateways of a cluster that runs elsewhere."""

    name: str  # of the model, for logs
    url: str  # of the gateways
    controller_url: str
    cluster_key: str
    gateways: tuple[GatewaySettings, ...]
    state_dir: Path | None = None  # of the controller
    controller: ControllerSettings | None = None
    agent: AgentSettings | None = None
    ray: RaySettings | None = None  # agents on other machines
    engines: tuple[EngineCard, ...] = ()  # without an agent
    adapters: tuple[LoraModule, ...] = ()  # to be registered at start
    pinned: tuple[str, ...] = ()  # names of adapters
    drain_timeout_s: float


class ClusterSupervisor:
    """Runs one plan. On one event loop; ``run`` once."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._controllers = _processes(_CONTROLLER, [plan.controller])
        self._agents = [*_processes(_NODES, [plan.ray]), *_processes(_AGENT, [plan.agent])]
        self._gateways = _processes(_GATEWAY, plan.gateways)
        self._begun: set[SupervisedProcess] = set()  # started successfully: restarted on exit
        self._is_published = False
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, stop: StopSignals) -> int:
        """Run until a signal (0), or until a start fails (the exit status of the failed process).

        Raises ``CorunError`` if an engine is refused.
        """
        async with make_session(self._plan.cluster_key) as session:
            static = StaticLauncher({one.engine_id: one for one in self._plan.engines}, session)
            watching = asyncio.ensure_future(_log_changes(static))
            starting = asyncio.ensure_future(self._start(session, static))
            stopped = asyncio.ensure_future(stop.first.wait())
            ends: set[asyncio.Future[Any]] = {stopped, self._ended}
            try:
                await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if self._ended.done() or (starting.done() and starting.exception()):
                    # A signal to all processes of the group may reach this one last.
                    await asyncio.wait({stopped}, timeout=_SIGNAL_S)
                if starting.done() and not stopped.done():
                    await starting  # raises if an engine was refused
                    _logger.info("serving %s at %s/v1", self._plan.name, self._plan.url)
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_all(starting, stopped)
                await self._end(stop)
                await static.close()
                await watching
        # A signal to the group also ends processes that are starting.
        has_failed = self._ended.done() and not stop.first.is_set()
        return self._ended.result() if has_failed else os.EX_OK

    async def _start(self, session: aiohttp.ClientSession, static: StaticLauncher) -> None:
        plan = self._plan
        self._begin(self._controllers)
        if self._controllers:
            await self._controller_answers(session)
        else:
            await self._find_controller(session)
        if plan.state_dir is not None:
            publish_controller(plan.state_dir, plan.controller_url)
            self._is_published = True
        self._begin(self._agents)
        for card in plan.engines:
            await self._add(session, static, card)
        await self._engine_is_ready(session)
        for adapter in plan.adapters:
            await self._register(session, adapter)
        # Gateways may be ready before this process sees it, so these have started already.
        self._begun.update(self._controllers, self._agents)
        self._begin(self._gateways)
        await self._gateway_is_ready(session)
        self._begun.update(self._gateways)

    async def _add(self, session: aiohttp.ClientSession, static: StaticLauncher, card: EngineCard) -> None:
        """Add an engine. Raises ``ConfigError`` if the server is no engine, or does not fit."""
        try:
            await static.start(card.engine_id)
            change = EngineChange(action="add", url=card.url, foreign=card.foreign)
            await self._ask(session, ENGINES_PATH, change)
        except HttpError as error:
            raise ConfigError(f"--engine {card.url} cannot join the cluster: {error}") from error

    def _begin(self, processes: Iterable[SupervisedProcess]) -> None:
        for process in processes:
            process.start(partial(self._exited, process))

    def _exited(self, process: SupervisedProcess, status: int) -> bool:
        """Return whether to restart a process: always, if its first start succeeded."""
        has_begun = process in self._begun
        if not has_begun and not self._ended.done():
            self._ended.set_result(status if status > 0 else EXIT_FAILED)
        return has_begun

    async def _controller_answers(self, session: aiohttp.ClientSession) -> None:
        deadline_s = time.monotonic() + _CONTROLLER_START_S
        while True:
            try:
                await self._status(session)
            except UnreachableError as error:
                if time.monotonic() > deadline_s:
                    raise CorunError(f"the controller does not answer: {error}") from error
                await asyncio.sleep(_ASK_EVERY_S)
            else:
                return

    async def _find_controller(self, session: aiohttp.ClientSession) -> None:
        """Raise ``CorunError`` if no controller answers, ``ConfigError`` if it refuses the key."""
        try:
            await self._status(session)
        except UnreachableError:
            raise
        except HttpError as error:
            raise ConfigError(f"the controller at {self._plan.controller_url} refuses: {error}") from error

    async def _engine_is_ready(self, session: aiohttp.ClientSession) -> None:
        """Wait for the first engine, without a deadline: a failed start ends its agent."""
        while self._plan.controller is not None and not (await self._status(session)).engines:
            await asyncio.sleep(_ASK_EVERY_S)

    async def _gateway_is_ready(self, session: aiohttp.ClientSession) -> None:
        """Wait for a gateway, without a deadline: engines may start slowly."""
        while True:
            timeout = aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"{self._plan.url}/ready", timeout=timeout) as response:
                    # With --health-needs-key the answer is a 401.
                    if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
                        return
            await asyncio.sleep(_ASK_EVERY_S)

    async def _register(self, session: aiohttp.ClientSession, adapter: LoraModule) -> None:
        change = AdapterChange(
            action="load",
            name=adapter.name,
            path=adapter.path,
            load_inplace=True,
            pinned=True if adapter.name in self._plan.pinned else None,
        )
        try:
            await self._ask(session, ADAPTERS_PATH, change, timeout_s=_LOAD_TIMEOUT_S)
        except HttpError as error:
            _logger.error("cannot load adapter %r; the cluster starts without it: %s", adapter.name, error)

    async def _status(self, session: aiohttp.ClientSession) -> ClusterStatus:
        url = self._plan.controller_url + STATUS_PATH
        return await call(session, url, None, ClusterStatus, timeout_s=_CALL_TIMEOUT_S)

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        path: str,
        change: msgspec.Struct,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> None:
        """POST a change to the controller. Raises ``HttpError`` if it is refused."""
        url = self._plan.controller_url + path
        await call(session, url, change, dict, timeout_s=timeout_s)

    async def _end(self, stop: StopSignals) -> None:
        """End all processes; kill them after a second signal."""
        ending = asyncio.ensure_future(self._end_in_order())
        hurry = asyncio.ensure_future(stop.second.wait())
        await asyncio.wait({ending, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            for process in (*self._gateways, *self._agents, *self._controllers):
                process.kill()
        hurry.cancel()
        await ending

    async def _end_in_order(self) -> None:
        drain_s = self._plan.drain_timeout_s + _GRACE_S
        await _all_end(self._gateways, drain_s)
        for agents in self._agents:  # other machines first: last copies move to this one
            await _all_end([agents], 2 * drain_s)
        if self._is_published and self._plan.state_dir is not None:
            remove_controller(self._plan.state_dir)
        await _all_end(self._controllers, _GRACE_S)


async def _all_end(processes: Sequence[SupervisedProcess], timeout_s: float) -> None:
    await asyncio.gather(*(process.end(timeout_s) for process in processes))


def _processes(module: str, settings: Sequence[ProcessSettings | None]) -> list[SupervisedProcess]:
    return [SupervisedProcess(module, one) for one in settings if one is not None]


async def _log_changes(launcher: StaticLauncher) -> None:
    """Log changes of engines without an agent."""
    async for status in launcher.watch():
        if status.state != EXITED:
            _logger.info("engine %s is %s", status.engine_id, status.state)
        elif status.reason is not None:  # without a reason, only polling has ended
            _logger.warning("engine %s is unreachable: %s", status.engine_id, status.reason)
