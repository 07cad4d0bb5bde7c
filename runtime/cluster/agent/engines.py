"""Starts, restarts and drains the engines of a machine."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from ...errors import CorunError
from ...server.errors import HttpError
from ...tasks import TaskSet, cancel_all
from ...whole_file import write_whole
from ..http.calls import UnreachableError
from ..launch.launcher import EXITED, READY, STARTING, EngineLauncher
from ..wire import EngineStatus
from .served import ServedAdapters

_logger = logging.getLogger(__name__)


class _EngineList(msgspec.Struct, frozen=True):
    run_id: str
    num_ids: int
    engine_ids: list[str]


class EngineListFile:
    """The list of a machine's engines in one run of the cluster, ``run_id``, in a file.

    After a crash the agent's next process restores the engines that ran last, not those of the
    first start. The list of another run is ignored.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id

    def read(self) -> tuple[int, list[str]] | None:
        """Return the number of ids used in this run, and the engine ids; None without a list."""
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=_EngineList)
        except (OSError, msgspec.DecodeError):
            return None
        return (saved.num_ids, saved.engine_ids) if saved.run_id == self._run_id else None

    def write(self, num_ids: int, engine_ids: list[str]) -> None:
        """Write the list. A failure is logged only: engines go on without it."""
        try:
            write_whole(self._path, msgspec.json.encode(_EngineList(self._run_id, num_ids, engine_ids)))
        except OSError as error:
            _logger.warning("cannot write engine list to %s: %s", self._path, error)


_RESTART_AFTER_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # by restarts in a row
_ASK_AGAIN_S = 1.0
_LASTING_S = 60.0  # after so long a run delays start over

# Connects to the engine that is ready at this URL.
Connect = Callable[[str], Awaitable[ServedAdapters]]


class EngineFleet:
    """Keeps engines running. On one event loop; run with ``running``."""

    def __init__(
        self, launcher: EngineLauncher, agent_id: str, connect: Connect, list_file: EngineListFile
    ) -> None:
        self.changed = asyncio.Event()  # set when there is news; the reporter clears it
        self.failed: asyncio.Future[EngineStatus] = asyncio.get_running_loop().create_future()
        self._launcher = launcher
        self._connect = connect
        self._agent_id = agent_id
        self._list_file = list_file
        self._num_ids = 0
        self._wanted: dict[str, int] = {}  # by engine: restarts in a row
        self._served: dict[str, ServedAdapters] = {}
        self._ready_s: dict[str, float] = {}
        self._has_been_ready = False
        self._tasks = TaskSet()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch and restart engines inside the block; end the rest after it."""
        watching = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            self._wanted.clear()
            await cancel_all(watching, *self._tasks)
            await self._launcher.close()

    def statuses(self) -> tuple[EngineStatus, ...]:
        """Return statuses for reports; an engine is ready when its adapters can be changed."""
        return tuple(
            status if status.state != READY or status.engine_id in self._served else _starting(status)
            for status in self._launcher.list()
        )

    def served(self, engine_id: str) -> ServedAdapters:
        """Return the adapters of an engine. Raises ``HttpError`` if it is not ready."""
        served = self._served.get(engine_id)
        if served is None:
            raise UnreachableError(f"engine {engine_id!r} is not ready at this agent")
        return served

    def all_served(self) -> list[ServedAdapters]:
        return list(self._served.values())

    async def begin(self, number: int) -> None:
        """Start the engines of an earlier process of this agent, or else ``number``."""
        saved = self._list_file.read()
        if saved is None:
            await self.add(number)
            return
        self._num_ids, engine_ids = saved
        for engine_id in engine_ids:
            await self._start(engine_id)

    async def add(self, number: int) -> None:
        """Start ``number`` more. Raises ``CorunError`` if one cannot be started."""
        for _ in range(number):
            await self._start(f"{self._agent_id}-{self._num_ids}")
            self._num_ids += 1
            self._save()

    def drain(self, engine_id: str, drain_timeout_s: float) -> None:
        """End an engine after its requests. Raises ``HttpError`` if it is unknown."""
        if all(status.engine_id != engine_id for status in self._launcher.list()):
            raise HttpError(404, f"there is no engine {engine_id!r} here", code="unknown_engine")
        if self._wanted.pop(engine_id, None) is not None:
            self._save()
        self._tasks.begin(self._stop(engine_id, drain_timeout_s))

    async def drain_all(self, drain_timeout_s: float) -> None:
        """End all engines after their requests, and wait for that."""
        self._wanted.clear()
        ids = [status.engine_id for status in self._launcher.list()]
        await asyncio.gather(*(self._stop(engine_id, drain_timeout_s) for engine_id in ids))

    async def _start(self, engine_id: str) -> None:
        await self._launcher.start(engine_id)
        self._wanted[engine_id] = 0
        self.changed.set()

    def _save(self) -> None:
        self._list_file.write(self._num_ids, list(self._wanted))

    async def _stop(self, engine_id: str, drain_timeout_s: float) -> None:
        await self._launcher.stop(engine_id, drain_timeout_s=drain_timeout_s)
        self._served.pop(engine_id, None)
        self.changed.set()

    async def _watch(self) -> None:
        async for status in self._launcher.watch():
            self.changed.set()
            if status.state == READY and status.url is not None:
                self._tasks.begin(self._ready(status.engine_id, status.url))
            elif status.state == EXITED:
                self._served.pop(status.engine_id, None)
                if status.engine_id in self._wanted:
                    self._exited(status)

    async def _ready(self, engine_id: str, url: str) -> None:
        """Connect to an engine; retry until it answers or is gone."""
        while any(one.url == url and one.state == READY for one in self._launcher.list()):
            try:
                served = await self._connect(url)
            except HttpError as error:
                _logger.warning("engine %s is ready but does not answer (will retry): %s", engine_id, error)
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            self._served[engine_id] = served
            self._ready_s[engine_id] = time.monotonic()
            self._has_been_ready = True
            self.changed.set()
            return

    def _exited(self, status: EngineStatus) -> None:
        engine_id = status.engine_id
        if not self._has_been_ready and not self.failed.done():
            self.failed.set_result(status)  # all engines are alike, so none can start
            return
        lasted_s = time.monotonic() - self._ready_s.pop(engine_id, time.monotonic())
        tries = 0 if lasted_s >= _LASTING_S else self._wanted[engine_id]
        self._wanted[engine_id] = tries + 1
        after_s = _RESTART_AFTER_S[min(tries, len(_RESTART_AFTER_S) - 1)]
        _logger.warning("engine %s ended (%s); restarting it in %g s", engine_id, status.reason, after_s)
        self._tasks.begin(self._restart(engine_id, after_s))

    async def _restart(self, engine_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if engine_id not in self._wanted:
            return
        try:
            await self._launcher.start(engine_id)
        except CorunError as error:
            _logger.error("engine %s: %s", engine_id, error)
            self._tasks.begin(self._restart(engine_id, _RESTART_AFTER_S[-1]))


def _starting(status: EngineStatus) -> EngineStatus:
    return msgspec.structs.replace(status, state=STARTING, url=None)
