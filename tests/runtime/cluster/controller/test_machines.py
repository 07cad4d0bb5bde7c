"""Wishes: engines to be started on machines that another process finds."""

import asyncio
from pathlib import Path

import pytest
from corun.runtime.cluster.controller import machines
from corun.runtime.cluster.wire import MACHINES_PATH, MachinesOrders, MachinesReport
from corun.runtime.server.errors import HttpError
from support.fake_cluster import TIMEOUT_S, RunningCluster, in_cluster, running_controller

UP = MachinesReport(kind="ray", is_up=True, num_agents=1, num_supervised=1)
DOWN = MachinesReport(kind="ray", is_up=False, num_agents=1, reason="its head is away")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_TAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(machines, "_SILENT_S", TIMEOUT_S)  # only what says that it is down is down


async def send_report(cluster: RunningCluster, report: MachinesReport) -> MachinesOrders:
    return await cluster.post(MACHINES_PATH, report, MachinesOrders)


async def take(cluster: RunningCluster, report: MachinesReport) -> tuple[str, ...]:
    """Wait for wishes, and take them."""
    while not (wishes := (await send_report(cluster, report)).wishes):
        await asyncio.sleep(0.02)
    await send_report(cluster, MachinesReport(kind="ray", is_up=report.is_up, num_agents=2, taken=wishes))
    return wishes


def test_an_engine_is_started_where_there_is_a_place_and_else_elsewhere(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0", num_places=2)
        assert (await send_report(cluster, UP)).num_engines == 1
        await cluster.engines("add")
        assert len(agent.changed) == 1 and (await send_report(cluster, UP)).wishes == ()
        agent.engines["a-1"] = await cluster.engine()
        await cluster.report(agent)
        adding = asyncio.ensure_future(cluster.engines("add", num_engines=2))
        await take(cluster, UP)
        await take(cluster, UP)
        await adding
        assert len(agent.changed) == 1 and (await send_report(cluster, UP)).wishes == ()

    in_cluster(tmp_path, work)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("is_silent", [False, True])
def test_what_must_wait_is_refused_and_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    async def work(cluster: RunningCluster) -> None:
        await cluster.agent("a", "a-0", num_places=1)
        await send_report(cluster, UP if is_silent else DOWN)
        if is_silent:
            monkeypatch.setattr(machines, "_SILENT_S", 0.3)
            await asyncio.sleep(0.4)
        why = "it is silent" if is_silent else "its head is away"
        with pytest.raises(HttpError, match=f"by ray now .{why}.; the start is stored, and done when"):
            await cluster.engines("add")
        state = (await cluster.status()).machines
        assert state is not None and not state.is_up and state.reason == why
        assert len(await take(cluster, UP)) == 1  # it is back
        assert (await send_report(cluster, UP)).wishes == ()

    in_cluster(tmp_path, work)


@pytest.mark.usefixtures("soon")
def test_what_must_wait_is_done_though_the_controller_ends_before(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_controller(tmp_path) as cluster:
            await send_report(cluster, DOWN)
            with pytest.raises(HttpError, match="the start is stored"):
                await cluster.engines("add")
        async with running_controller(tmp_path) as cluster:
            assert len(await take(cluster, UP)) == 1
        async with running_controller(tmp_path) as cluster:
            assert (await send_report(cluster, UP)).wishes == (), "once"

    asyncio.run(run())


def test_an_agent_is_drained_with_all_its_engines(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0", "a-1")
        other = await cluster.agent("b", "b-0")
        gateway = await cluster.gateway()
        entry = await cluster.load("x", "content")
        await cluster.report(agent)
        await cluster.report(other)
        reporting = asyncio.ensure_future(_keep_reporting(cluster, agent, other))
        try:
            await cluster.engines("drain", engine_id="a")
        finally:
            reporting.cancel()
        assert agent.ended == 1 and entry.digest in other.copies
        assert gateway.engines["a-0"].is_draining and gateway.engines["a-1"].is_draining
        assert not gateway.engines["b-0"].is_draining

    async def _keep_reporting(cluster: RunningCluster, *agents: object) -> None:
        while True:
            for agent in agents:
                await cluster.report(agent)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)

    in_cluster(tmp_path, work)
