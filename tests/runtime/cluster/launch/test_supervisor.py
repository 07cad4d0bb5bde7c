"""A cluster's processes are started, restarted and ended in order; engines are simulated."""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from corun.runtime.cli.main import main
from corun.runtime.cluster.launch import supervisor
from corun.runtime.cluster.launch.launcher import READY
from corun.runtime.cluster.launch.supervisor import ClusterPlan
from corun.runtime.cluster.wire import ClusterStatus
from corun.runtime.config.notations import LoraModule
from corun.runtime.errors import ConfigError
from support.clusters import KEY, Supervised, processes_of, simulated_plan, static_card, supervised
from support.latency_engine import save_tiny_adapter
from support.launching import StaticEngine
from support.serving import corun_command


def with_cluster(plan: ClusterPlan, work: Callable[[Supervised], Awaitable[None]]) -> None:
    async def run() -> None:
        async with supervised(plan) as cluster:
            await work(cluster)

    asyncio.run(run())


def num_ready(status: ClusterStatus, *, without: int = 0) -> int:
    engines = [engine for agent in status.agents for engine in agent.engines]
    return sum(engine.state == READY and engine.pid != without for engine in engines)


async def complete(cluster: Supervised, model: str) -> int:
    body = {"model": model, "prompt": "x", "max_tokens": 2}
    async with cluster.session.post(f"{cluster.plan.url}/v1/completions", json=body) as response:
        await response.read()
        return response.status


def test_what_is_killed_is_back_and_what_ends_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_ASK_EVERY_S", 0.5)  # clients see ready gateways before the command does
    source = save_tiny_adapter(tmp_path / "a")
    plan = simulated_plan(tmp_path / "state", adapters=[LoraModule("a", str(source))])

    async def work(cluster: Supervised) -> None:
        await cluster.ready()
        assert (tmp_path / "state/cluster.json").is_file()
        status = await cluster.until(lambda status: num_ready(status) == 1)
        assert [one.name for one in status.adapters] == ["a"]
        assert await complete(cluster, "a") == 200

        (controller,) = processes_of("cluster.controller")
        controller.kill()
        assert await complete(cluster, "a") == 200  # no token passes through it
        status = await cluster.until(lambda status: num_ready(status) == 1)
        assert [one.name for one in status.adapters] == ["a"]

        (gateway,) = processes_of("cluster.gateway")
        gateway.kill()
        await cluster.ready()

        (agent,), (engine,) = processes_of("cluster.agent"), processes_of("latency_engine")
        agent.kill()
        await asyncio.to_thread(engine.wait, 20)
        await cluster.until(lambda status: num_ready(status, without=engine.pid) == 1)
        await cluster.ready()
        assert await complete(cluster, "a") == 200  # its files are in the store

        assert await cluster.end() == 0
        assert not (tmp_path / "state/cluster.json").exists()
        for name in ("cluster.controller", "cluster.gateway", "cluster.agent", "latency_engine"):
            assert processes_of(name) == []

    with_cluster(plan, work)


@pytest.mark.usefixtures("own_logging")
def test_engines_come_and_go_by_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    place = ["--state-dir", str(tmp_path / "state"), "--cluster-key-file", str(key_file)]

    async def work(cluster: Supervised) -> None:
        await cluster.ready()
        assert await asyncio.to_thread(main, ["cluster", "add", "--engines", "1", *place]) == 0
        await cluster.until(lambda status: len(status.engines) == 2)
        assert await asyncio.to_thread(main, ["cluster", "drain", "m-0", *place]) == 0
        await cluster.until(lambda status: [one.engine_id for one in status.engines] == ["m-1"])
        assert await complete(cluster, "latency") == 200
        capfd.readouterr()
        assert await asyncio.to_thread(main, ["cluster", "remove", "m-0", *place]) == 2
        assert "no engine 'm-0'; there are m-1" in capfd.readouterr().err
        key_file.write_text("another")
        assert await asyncio.to_thread(main, ["cluster", "status", *place]) == 2
        assert "the cluster's key is missing or wrong" in capfd.readouterr().err
        gateway = ["gateway", "--port", "0", *place[2:], "--controller"]
        for url, status, words in (
            (cluster.plan.controller_url, 2, "refuses: the cluster's key is missing or wrong"),
            ("http://127.0.0.1:1", 1, "http://127.0.0.1:1/v1/cluster/status cannot be reached"),
        ):
            done = await asyncio.to_thread(
                subprocess.run, corun_command(*gateway, url), capture_output=True, text=True
            )
            assert done.returncode == status, done.stderr
            assert words in done.stderr and done.stderr.count("\n") == 1

    with_cluster(simulated_plan(tmp_path / "state"), work)


def test_a_state_directory_that_is_held_ends_the_start(tmp_path: Path) -> None:
    plan, other = (simulated_plan(tmp_path / "state", num_engines=0) for _ in range(2))
    engine = StaticEngine(tmp_path)

    async def work(cluster: Supervised) -> None:
        await cluster.until(lambda status: True)
        async with supervised(other) as second:
            assert await second.running == 2
        assert (tmp_path / "state/cluster.json").is_file()  # of the first cluster

    try:
        with_cluster(replace(plan, engines=(static_card(engine.url),)), work)
    finally:
        engine.close()


def test_engines_that_cannot_be_one_of_it_end_the_start(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1"
    plan = simulated_plan(tmp_path / "state", num_engines=0, engines=[static_card(url)])

    async def work(cluster: Supervised) -> None:
        with pytest.raises(ConfigError, match=f"--engine {url} cannot join the cluster"):
            await cluster.running

    with_cluster(plan, work)
    assert not (tmp_path / "state/cluster.json").exists()


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    async def work(cluster: Supervised) -> None:
        await cluster.until(lambda status: bool(status.agents))
        cluster.stop.receive()
        cluster.stop.receive()
        async with asyncio.timeout(20):
            assert await cluster.running == 0

    with_cluster(simulated_plan(tmp_path / "state"), work)
    assert processes_of("latency_engine") == []
