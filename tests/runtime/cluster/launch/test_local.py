"""Engines as processes: share of the machine, keys, and their end with the launcher."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from corun.runtime.cluster.division import EngineShare, MachineDivision
from corun.runtime.cluster.http.calls import make_session
from corun.runtime.cluster.launch import local
from corun.runtime.cluster.launch.launcher import EXITED, READY
from corun.runtime.cluster.launch.local import (
    LocalLauncher,
    divide_this_machine,
    engine_environment,
    engine_options,
)
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import ConfigError
from corun.runtime.machine.devices import VisibleDevice
from support.launching import DEADLINE_S, KEY, local_launcher, received_by, seen
from support.processes import line_of, program
from support.serving import wait_until

CPU = min(os.sched_getaffinity(0))
SHARE = EngineShare(
    cpus=(CPU,), engine_cpus=(CPU,), memory_bytes=2 << 30, device=VisibleDevice("GPU-x", None)
)


def with_launcher(
    tmp_path: Path,
    division: MachineDivision,
    work: Callable[[LocalLauncher], Awaitable[None]],
    engine: EngineConfig | None = None,
) -> None:
    async def run() -> None:
        async with make_session(KEY) as session:
            launcher = local_launcher(tmp_path, session, division, engine)
            try:
                await work(launcher)
            finally:
                await launcher.close()

    asyncio.run(run())


def test_an_engine_gets_its_share_and_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORUN_PORT", "1")  # an option, which the command has read before
    monkeypatch.setenv("CORUN_API_KEY", "a client's")

    async def work(launcher: LocalLauncher) -> None:
        await launcher.start("e")
        ready = await seen(launcher, lambda one: one.state == READY)
        assert ready.cpu_list == str(CPU) and ready.pid in psutil.pids()
        found = await asyncio.to_thread(received_by, ready.url)
        assert found["cpus"] == [CPU]
        assert (found["api_key"], found["admin_key"]) == (KEY, KEY)
        assert found["visible"] == "GPU-x"
        assert found["options"] == {
            "model": "m",
            "engine-cores": str(CPU),
            "cpu-cores": "none",
            "memory-gib": 1.7,
        }
        command = " ".join(psutil.Process(ready.pid).cmdline())
        assert KEY not in command

    with_launcher(tmp_path, MachineDivision((SHARE,), ()), work, EngineConfig(model="m"))


def test_all_shares_are_given_once(tmp_path: Path) -> None:
    async def work(launcher: LocalLauncher) -> None:
        await launcher.start("a")
        with pytest.raises(ConfigError, match="divided among 1 engines"):
            await launcher.start("b")
        await launcher.stop("a", drain_timeout_s=5.0)
        await launcher.start("b")

    with_launcher(tmp_path, MachineDivision((SHARE,), ()), work)


def test_an_option_that_is_refused_is_an_exit_like_others(tmp_path: Path) -> None:
    async def work(launcher: LocalLauncher) -> None:
        await launcher.start("a")
        ended = await seen(launcher, lambda one: one.state == EXITED)
        assert ended.reason == "exit status 2"

    with_launcher(tmp_path, MachineDivision((EngineShare(),), ()), work, EngineConfig(model="m", seed=13))


_LAUNCH = """
import asyncio, sys
from pathlib import Path
from corun.runtime.cluster.http.calls import make_session
from support.launching import local_launcher, seen
async def main():
    async with make_session("k") as session:
        launcher = local_launcher(Path(sys.argv[1]), session)
        await launcher.start("e")
        status = await seen(launcher, lambda one: one.state == "ready")
        print(status.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its new parent has not reaped it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_no_engine_outlives_its_launcher(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repository / "tests"))
    with program(_LAUNCH, tmp_path) as process:
        engine = psutil.Process(int(line_of(process)))
        assert engine.is_running()
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: has_ended(engine), DEADLINE_S)


def test_options_of_a_device_and_of_shared_cores() -> None:
    engine, serve = EngineConfig(model="m", memory_gib=3.0), ServeConfig(max_body_mib=8)
    share = EngineShare(host_bytes=5, memory_bytes=9, num_threads=2)
    assert engine_options(engine, serve, share) == {
        "model": "m",
        "memory-gib": 3.0,
        "cpu-cores": "none",
        "cpu-threads": 2,
        "host-bytes": "5",
        "max-body-mib": 8,
    }
    own = replace(engine, cpu_threads=1, host_bytes="1GiB")
    found = engine_options(own, serve, share)
    assert (found["cpu-threads"], found["host-bytes"]) == (1, "1GiB")


def test_each_engine_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (VisibleDevice("GPU-a", None), VisibleDevice("GPU-b", None))
    monkeypatch.setattr(local, "read_cuda_devices", lambda: devices)
    division = divide_this_machine(EngineConfig(model="m", device="cuda"), 2, unpinned=True)
    visible = [engine_environment({}, "key", share)["CUDA_VISIBLE_DEVICES"] for share in division.shares]
    assert visible == ["GPU-a", "GPU-b"]
    with pytest.raises(ConfigError, match="--device cuda:1 is for one engine"):
        divide_this_machine(EngineConfig(model="m", device="cuda:1"), 2, unpinned=True)


def test_keys_with_spaces_stay_one_key() -> None:
    environment = engine_environment({"PATH": "x", "CORUN_OTHER": "y"}, "a b", EngineShare())
    assert environment == {
        "PATH": "x",
        "CORUN_OTHER": "y",
        "CORUN_API_KEY": "'a b'",
        "CORUN_ADMIN_KEY": "'a b'",
    }
