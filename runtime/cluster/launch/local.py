"""Engines as local processes, each with a share of this machine. They end with this process."""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ...config.engine import EngineConfig
from ...config.notations import format_cpus, parse_cpu_cores
from ...config.option import option_specs
from ...config.serve import ServeConfig
from ...config.variables import PREFIX
from ...errors import ConfigError, ResourceError
from ...machine.devices import read_cuda_devices
from ...machine.facts import read_machine_facts
from ...server.listening import bind, url_of
from ...tasks import cancel_all
from ..division import EngineNeeds, EngineShare, MachineDivision, divide_machine
from ..process import bind_to_parent, ended, exit_words, spawn
from ..wire import EngineStatus
from .launcher import DRAINING, EXITED, READY, STARTING, StatusBoard

_BOUND = "corun.runtime.cluster.launch.local"
_GIB = 2**30
_LOOK_EVERY_S = 0.1  # for polls whether an engine is ready
_KILL_AFTER_S = 5.0  # after its time to drain

_logger = logging.getLogger(__name__)


ANY = "any"


# CPUS is a list such as 2-7,10, or "any". The command ends with its launcher. The kernel keeps both
# settings over ``exec``.
def main() -> None:
    """Pin this process and execute the command."""
    cpus, *command = sys.argv[1:]
    bind_to_parent()
    if cpus != ANY:
        # A sandbox may forbid pinning. The engine logs the CPUs on which it runs.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, parse_cpu_cores(cpus, "CPUS"))
    os.execv(command[0], command)  # noqa: S606 - without a shell


if __name__ == "__main__":
    main()


class LocalLauncher:
    """The ``EngineLauncher`` of ``corun serve``, or of a command with the same options."""

    def __init__(
        self,
        *,
        division: MachineDivision,
        engine: EngineConfig,
        serve: ServeConfig,
        host: str,
        cluster_key: str,
        directory: Path,
        command: Sequence[str],
        session: aiohttp.ClientSession,
    ) -> None:
        """``directory``: for files of options. ``command``: the program that has ``serve``."""
        self._division = division
        self._engine, self._serve, self._host = engine, serve, host
        self._key = cluster_key
        self._directory = directory
        self._command = command
        self._session = session
        self._board = StatusBoard()
        self._running: dict[str, _Running] = {}
        self._shares: dict[str, int] = {}

    async def start(self, engine_id: str) -> None:
        """Start a process. Raises ``ConfigError`` if all shares of the machine are in use."""
        before = self._board.get(engine_id)
        if before is not None and before.state != EXITED:
            return
        share = self._share_of(engine_id)
        # A bound socket that does not listen reserves the port.
        sock = bind(self._host, 0)
        try:
            process = self._spawn(engine_id, share, sock.getsockname()[1])
        except OSError as error:
            sock.close()
            if before is None:
                del self._shares[engine_id]
            raise ResourceError(f"cannot start engine {engine_id}: {error}") from error
        self._board.set(
            EngineStatus(
                engine_id=engine_id,
                url=None,
                state=STARTING,
                pid=process.pid,
                cpu_list=format_cpus(share.cpus),
                num_restarts=0 if before is None else before.num_restarts + 1,
            )
        )
        following = asyncio.ensure_future(self._follow(engine_id, process, sock))
        self._running[engine_id] = _Running(process, following)

    async def stop(self, engine_id: str, *, drain_timeout_s: float) -> None:
        running = self._running.get(engine_id)
        if running is not None and self._board.get(engine_id) is not None:
            self._board.change(engine_id, state=DRAINING)
            running.send(signal.SIGTERM)
            if not await running.ends(drain_timeout_s + _KILL_AFTER_S):
                _logger.warning("engine %s does not end; killing it", engine_id)
                running.send(signal.SIGKILL)
                await running.following
        self._running.pop(engine_id, None)
        self._shares.pop(engine_id, None)
        self._board.remove(engine_id)

    def list(self) -> tuple[EngineStatus, ...]:
        return self._board.list()

    def watch(self) -> AsyncGenerator[EngineStatus, None]:
        return self._board.watch()

    async def close(self) -> None:
        for running in self._running.values():
            running.send(signal.SIGKILL)
        for engine_id in list(self._running):
            await self.stop(engine_id, drain_timeout_s=0.0)
        self._board.close()

    def _share_of(self, engine_id: str) -> EngineShare:
        shares = self._division.shares
        index = self._shares.get(engine_id)
        if index is None:
            free = set(range(len(shares))).difference(self._shares.values())
            if not free and shares[0].cpus:
                raise ConfigError(
                    f"the cores of this machine are divided among {len(shares)} engines, all of "
                    "which run; start the cluster with more --engines, or --unpinned"
                )
            # Any number of engines may share cores.
            index = min(free) if free else len(self._shares) % len(shares)
            self._shares[engine_id] = index
        return shares[index]

    def _spawn(self, engine_id: str, share: EngineShare, port: int) -> "subprocess.Popen[bytes]":
        path = self._directory / f"{engine_id}.json"
        path.write_bytes(msgspec.json.encode(engine_options(self._engine, self._serve, share)))
        environment = engine_environment(os.environ, self._key, share)
        cpus = format_cpus(share.cpus) or ANY
        address = ["--host", self._host, "--port", str(port)]
        command = [*self._command, "serve", "--config", str(path), *address]
        return spawn(_BOUND, cpus, *command, environment=environment)

    async def _follow(self, engine_id: str, process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
        waiting = asyncio.ensure_future(self._wait_ready(engine_id, url_of(sock)))
        try:
            status = await ended(process)
        finally:
            await cancel_all(waiting)
            sock.close()
        self._board.change(engine_id, state=EXITED, url=None, pid=0, reason=exit_words(status))

    async def _wait_ready(self, engine_id: str, url: str) -> None:
        started_s = time.monotonic()
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                timeout = aiohttp.ClientTimeout(total=1.0)
                async with self._session.get(f"{url}/ready", timeout=timeout) as response:
                    if response.status == HTTPStatus.OK:
                        break
            await asyncio.sleep(_LOOK_EVERY_S)
        status = self._board.get(engine_id)
        if status is not None and status.state == STARTING:
            took_s = time.monotonic() - started_s
            _logger.info("engine %s is ready at %s after %.1f s", engine_id, url, took_s)
            self._board.change(engine_id, state=READY, url=url, reason=None)


class _Running:
    """A process, and the task that waits for its end."""

    def __init__(self, process: "subprocess.Popen[bytes]", following: "asyncio.Task[None]") -> None:
        self._process = process
        self.following = following

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    async def ends(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return False after ``timeout_s``."""
        done, _ = await asyncio.wait([self.following], timeout=timeout_s)
        return bool(done)


def divide_this_machine(
    engine: EngineConfig, num_engines: int, *, unpinned: bool, num_cpus: float | None = None
) -> MachineDivision:
    """Divide this machine among engines; ``num_cpus``: a limit of CPUs, None = all.

    Raises ``ConfigError`` if there are too few resources.
    """
    if engine.device.startswith("cuda:"):
        raise ConfigError(
            f"--device {engine.device} is for one engine, and corun cluster gives each engine its "
            "own GPU: use --device cuda, and name the GPUs in CUDA_VISIBLE_DEVICES"
        )
    machine = read_machine_facts()
    if num_cpus is not None:
        quota = num_cpus if machine.cpu_quota is None else min(num_cpus, machine.cpu_quota)
        machine = replace(machine, cpu_quota=quota)
    devices = () if engine.device == "cpu" else read_cuda_devices()
    assert engine.model is not None
    files = Path(engine.model).glob("*.safetensors")
    needs = EngineNeeds(
        num_engines=num_engines,
        has_workers=bool(devices) or engine.link_gib_per_s is not None,
        weights_bytes=sum(path.stat().st_size for path in files),  # if the model is a local directory
    )
    return divide_machine(machine, devices, needs, unpinned=unpinned)


def engine_options(engine: EngineConfig, serve: ServeConfig, share: EngineShare) -> dict[str, Any]:
    """Return the options that differ from the defaults, in the format of ``--config``."""
    if share.cpus:
        engine = replace(
            engine,
            engine_cores=format_cpus(share.engine_cpus),
            cpu_cores=format_cpus(share.worker_cpus) or "none",
        )
    else:
        num_threads = engine.cpu_threads or share.num_threads
        engine = replace(engine, cpu_cores="none", cpu_threads=num_threads)
    if share.memory_bytes is not None and engine.memory_gib is None:
        memory_gib = share.memory_bytes * engine.memory_share("cpu") / _GIB
        engine = replace(engine, memory_gib=memory_gib)
    if share.host_bytes is not None and engine.host_bytes is None:
        engine = replace(engine, host_bytes=str(share.host_bytes))
    return _changed(engine, EngineConfig) | _changed(serve, ServeConfig)


def _changed(config: object, kind: type) -> dict[str, Any]:
    values = {spec: getattr(config, spec.name) for spec in option_specs(kind)}
    return {spec.key: value for spec, value in values.items() if value != spec.default}


def engine_environment(present: Mapping[str, str], cluster_key: str, share: EngineShare) -> dict[str, str]:
    """Return ``present`` without options, which are in the options file, and with the keys.

    Keys are in the environment, since a list of processes shows the command line.
    """
    specs = (*option_specs(EngineConfig), *option_specs(ServeConfig))
    options = {f"{PREFIX}{name.upper()}" for name in ("config", *(spec.name for spec in specs))}
    environment = {name: text for name, text in present.items() if name not in options}
    key = shlex.quote(cluster_key)
    environment |= {f"{PREFIX}API_KEY": key, f"{PREFIX}ADMIN_KEY": key}
    if share.device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = share.device.name
    return environment
