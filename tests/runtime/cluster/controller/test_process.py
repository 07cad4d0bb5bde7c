"""The controller as a process: after a kill it restores its state."""

import asyncio
import contextlib
import signal
import time
from pathlib import Path

from corun.runtime.cluster.http.calls import make_session
from corun.runtime.cluster.process import spawn
from corun.runtime.server.errors import HttpError
from corun.runtime.server.listening import bind
from support.agents import KEY
from support.fake_cluster import RunningCluster, digest_of, settings_of

_MODULE = "corun.runtime.cluster.controller"
_DEADLINE_S = 20.0  # ten times what is expected


async def answering(cluster: RunningCluster) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while True:
        try:
            await cluster.status()
            return
        except HttpError:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)


def test_after_a_kill_it_is_back_with_all_that_it_knew(tmp_path: Path) -> None:
    async def run(port: int) -> None:
        settings = settings_of(tmp_path, port)
        process = spawn(_MODULE, settings=settings)
        async with make_session(KEY) as session, contextlib.AsyncExitStack() as outlive:
            cluster = RunningCluster(f"http://127.0.0.1:{port}", session, outlive)
            await answering(cluster)
            agent = await cluster.agent("a", "a-0")
            entry = await cluster.load("x", "content")
            await cluster.report(agent)
            await cluster.demand({"x": 7})
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = spawn(_MODULE, settings=settings)
            await answering(cluster)
            gateway = await cluster.gateway()
            assert gateway.adapters == {"x": entry} and gateway.sequence >> 32 == 2
            assert list(gateway.engines) == ["a-0"]  # before its agent reports
            await cluster.report(agent)
            assert agent.orders.keep == (digest_of("content"),)
            process.terminate()
            assert process.wait(_DEADLINE_S) == 0

    with bind("127.0.0.1", 0) as kept:
        asyncio.run(run(kept.getsockname()[1]))


def test_what_a_user_must_put_right_ends_it_with_one_line(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as kept:
        settings = settings_of(tmp_path, kept.getsockname()[1], placement="nearby")
        assert spawn(_MODULE, settings=settings).wait(_DEADLINE_S) == 2
        (tmp_path / "registry.sqlite").write_text("notes")
        settings = settings_of(tmp_path, kept.getsockname()[1])
        assert spawn(_MODULE, settings=settings).wait(_DEADLINE_S) == 2
    assert (tmp_path / "registry.sqlite").read_text() == "notes"
