"""An agent on a machine of Ray: a process of its own, which a Ray actor supervises.

Processes of Ray end when its control store is away for long, when a head restarts without its
state, and when their machine's raylet ends. An agent survives all of these, and the next actor
finds it unchanged. Unsupervised for two minutes, it ends as on a signal, since Ray might have given
its machine to another job.

``python -m corun.runtime.cluster.machines.supervised`` is the agent. It reads ``NodeSettings`` from
its input.
One lock shows that it runs, another that an actor supervises it. The kernel releases both, however
the processes end.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from ....cpu_workers.process_life import signals_held
from ...server.listening import bind, url_of
from ...whole_file import write_whole
from ..agent.run import run_agent
from ..division import MachineDivision
from ..launch.local import divide_this_machine
from ..process import run_process
from ..resources import AgentResources
from ..settings import AgentSettings, MachineSettings, NodeSettings

STARTING, RUNNING, FAILED, ENDED = "starting", "running", "failed", "ended"
_POLL_EVERY_S = 0.5
_RESTART_AFTER_S = (0.0, 1.0, 5.0, 10.0, 30.0)  # by restarts in a row
_LASTING_S = 60.0
_SUPERVISED, _RUNS, _LOCATION, _LOG, _ENDED = "held.lock", "runs.lock", "place.json", "log", "ended"
_MAX_LOG_BYTES = 64 << 20
_SHOWN_BYTES = 4096  # of the end of a log, searched for the error
_LOCK_TRIES, _LOCK_AGAIN_S = 5, 0.05
_FIRST = "0"  # the first agent's directory on a machine
_MODULE = "corun.runtime.cluster.machines.supervised"

_logger = logging.getLogger(__name__)


class AgentLocation(msgspec.Struct, frozen=True):
    """The address and process of an agent."""

    agent_id: str
    url: str
    pid: int
    resources: AgentResources = msgspec.field(name="bundle")  # as in files of earlier versions
    options_digest: str


class SupervisedAgent(msgspec.Struct, frozen=True):
    """An agent and its state."""

    state: str  # starting | running | failed (will be restarted) | ended (on request)
    agent_id: str
    location: AgentLocation | None = None
    reason: str | None = None  # why it failed


class AgentSupervisor:
    """Runs an agent on this machine, in the first directory that no other agent uses.

    Raises ``OSError`` if no directory can be created.
    """

    def __init__(self, settings: NodeSettings) -> None:
        """``settings.state_dir``: of the cluster; each machine has a subdirectory."""
        root = Path(settings.state_dir) / settings.host
        number = 0
        while (lock := _locked(root / str(number) / _SUPERVISED)) is None:
            number += 1
        self._lock = lock
        self._directory = root / str(number)
        self._settings = msgspec.structs.replace(
            settings,
            state_dir=str(self._directory),
            agent_id=settings.host if number == 0 else f"{settings.host}.{number}",
        )
        self._digest = options_digest(self._settings)
        (self._directory / _ENDED).unlink(missing_ok=True)
        self._reason: str | None = None
        threading.Thread(target=self._supervise, name="corun-supervisor", daemon=True).start()

    def agent(self) -> SupervisedAgent:
        """Return the agent's current state."""
        location = self._location()
        if location is not None and location.options_digest != self._digest:
            location = None  # it will be ended
        if location is not None:
            state = RUNNING
        elif self._has_ended():
            state = ENDED
        else:
            state = FAILED if self._reason else STARTING
        return SupervisedAgent(
            state=state, agent_id=self._settings.agent_id, location=location, reason=self._reason
        )

    def _supervise(self) -> None:
        """Start the agent unless it runs, and restart it when it exits. Runs for ever."""
        tries, started_s = 0, time.monotonic()
        while True:
            if _is_locked(self._directory / _RUNS) or self._has_ended():
                if time.monotonic() - started_s >= _LASTING_S:
                    self._reason = None
                location = self._location()
                if location is not None and location.options_digest != self._digest:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(location.pid, signal.SIGTERM)
                time.sleep(_POLL_EVERY_S)
                continue
            if tries:
                self._reason = self._last_error()
                if time.monotonic() - started_s >= _LASTING_S:
                    tries = 1
                time.sleep(_RESTART_AFTER_S[min(tries - 1, len(_RESTART_AFTER_S) - 1)])
            tries, started_s = tries + 1, time.monotonic()
            try:
                self._start()
            except OSError as error:
                self._reason = f"an agent cannot be started: {error}"

    def _location(self) -> AgentLocation | None:
        """Return the location of the running agent; None if none runs or has published it."""
        if not _is_locked(self._directory / _RUNS):
            return None
        try:
            return msgspec.json.decode((self._directory / _LOCATION).read_bytes(), type=AgentLocation)
        except (OSError, msgspec.DecodeError):
            return None

    def _has_ended(self) -> bool:
        """Return whether an agent with these options has ended on request."""
        try:
            return (self._directory / _ENDED).read_text(encoding="ascii") == self._digest
        except OSError:
            return False

    def _start(self) -> None:
        """Start the agent as a detached process, which inherits the lock of running agents."""
        runs = _locked(self._directory / _RUNS)
        if runs is None:
            return
        (self._directory / _LOCATION).unlink(missing_ok=True)
        path = self._directory / _LOG
        if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
            path.replace(path.with_suffix(".1"))
        # An agent gets no variables of Ray. CUDA_VISIBLE_DEVICES, which Ray sets, stays.
        environment = {name: os.environ[name] for name in os.environ if name[:4] != "RAY_"}
        with runs, path.open("ab") as log, signals_held():
            subprocess.run(
                [sys.executable, "-P", "-m", _MODULE],
                input=msgspec.json.encode(self._settings),
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=(runs.fileno(),),
                check=False,
            )

    def _last_error(self) -> str:
        path = self._directory / _LOG
        with contextlib.suppress(OSError), path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _SHOWN_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            words = [line for line in lines if "error" in line.lower()] or lines
            if words:
                return words[-1].removeprefix("corun: error: ")
        return f"its agent has ended; see {path}"


def options_digest(settings: NodeSettings) -> str:
    """Return a digest of all settings that change what an agent does."""
    alike = msgspec.structs.replace(
        settings, controller_url="", run_id="", log_level="", agent_id="", host="", state_dir=""
    )
    return hashlib.sha256(msgspec.json.encode(alike)).hexdigest()[:16]


async def run_supervised(settings: NodeSettings, stop: asyncio.Event) -> int | None:
    """Run until ``stop``, until asked to end, or until unsupervised for long.

    Raises ``ConfigError`` if this machine has too few resources.
    """
    directory = Path(settings.state_dir)
    resources = settings.resources
    # A second agent on a machine does not know the cores of the first.
    is_shared = settings.unpinned or directory.name != _FIRST
    division = divide_this_machine(
        settings.engine, resources.num_engines, unpinned=is_shared, num_cpus=resources.num_cpus
    )
    digest = options_digest(settings)
    if not is_shared:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, division.others_cpus)
    with bind(settings.host, 0) as kept:  # reserves the port
        location = AgentLocation(
            agent_id=settings.agent_id,
            url=url_of(kept),
            pid=os.getpid(),
            resources=resources,
            options_digest=digest,
        )
        write_whole(directory / _LOCATION, msgspec.json.encode(location))
        watching = asyncio.ensure_future(
            _end_unsupervised(directory / _SUPERVISED, settings.unsupervised_s, stop)
        )
        try:
            agent = _agent_settings(settings, division, kept.getsockname()[1])
            status = await run_agent(agent, stop)
            if status is None and not watching.done():
                write_whole(directory / _ENDED, digest.encode())
            return status
        finally:
            watching.cancel()


def _agent_settings(settings: NodeSettings, division: MachineDivision, port: int) -> AgentSettings:
    cache_bytes = settings.adapter_cache_bytes
    if cache_bytes is None:
        cache_bytes = shutil.disk_usage(settings.state_dir).free // 2
    given: dict[str, Any] = {name: getattr(settings, name) for name in MachineSettings.__struct_fields__}
    if settings.engine_command is not None:
        given["engine_command"] = settings.engine_command
    return AgentSettings(
        port=port,
        division=division,
        adapter_cache_bytes=cache_bytes,
        num_places=settings.resources.num_engines,
        **given,
    )


async def _end_unsupervised(path: Path, unsupervised_s: float, stop: asyncio.Event) -> None:
    """Set ``stop`` and return once the agent has been unsupervised for ``unsupervised_s``."""
    supervised_s = time.monotonic()
    while time.monotonic() - supervised_s < unsupervised_s:
        if _is_locked(path):
            supervised_s = time.monotonic()
        await asyncio.sleep(_POLL_EVERY_S)
    _logger.warning("no Ray actor has claimed this agent for %g s; exiting", unsupervised_s)
    stop.set()


def _locked(path: Path) -> IO[bytes] | None:
    """Lock and return the file; None if another process holds the lock.

    Retries, since ``_is_locked`` of another thread or process takes the lock for a moment.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = path.open("ab")
    for number in range(_LOCK_TRIES):
        time.sleep(_LOCK_AGAIN_S if number else 0.0)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
    file.close()
    return None


def _is_locked(path: Path) -> bool:
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


if __name__ == "__main__":
    if os.fork():
        os._exit(os.EX_OK)  # the parent waits for this process only
    run_process(NodeSettings, run_supervised, is_bound=False)
