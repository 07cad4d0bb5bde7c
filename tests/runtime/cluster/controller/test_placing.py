"""Live placement: demand becomes copies, and then shares."""

import asyncio
import math
from functools import partial
from pathlib import Path

from corun.runtime.cluster.policy.placement.capacity_table import estimated_tokens_per_s
from corun.runtime.cluster.settings import OperatingPoints
from corun.runtime.cluster.wire import Ensure
from corun.runtime.server.errors import HttpError
from support import fake_cluster
from support.fake_cluster import TIMEOUT_S, RunningCluster, digest_of, eventually, profile_of

in_cluster = partial(fake_cluster.in_cluster, placement_interval_s=0.1)


def test_copies_come_before_routes_change(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        first, second = [await cluster.agent(name, f"{name}-0") for name in "ab"]
        let_go = asyncio.Event()

        async def wait(asked: Ensure) -> None:
            await let_go.wait()

        second.on_ensure = wait
        gateway = await cluster.gateway()
        await cluster.load("x", "content")
        await eventually(lambda: bool(second.asked))
        assert not gateway.shares
        let_go.set()
        await eventually(lambda: gateway.shares == {"x": {"a-0": 0.5, "b-0": 0.5}})
        assert digest_of("content") in first.copies & second.copies
        assert set((await cluster.report(second)).keep) == {digest_of("content")}

    in_cluster(tmp_path, work)


def test_routes_go_only_to_copies_that_have_come(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        await cluster.agent("a", "a-0")
        full = await cluster.agent("b", "b-0")

        async def refuse(asked: Ensure) -> None:
            raise HttpError(507, "no room", code="store_full")

        full.on_ensure = refuse
        gateway = await cluster.gateway()
        await cluster.load("x", "content")
        await eventually(lambda: gateway.shares == {"x": {"a-0": 1.0}})

    in_cluster(tmp_path, work)


def test_sticky_goes_by_demand_and_by_what_engines_bear(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agents = [await cluster.agent(name, f"{name}-0") for name in "abc"]
        gateway = await cluster.gateway()
        for name in "xyz":
            await cluster.load(name, name)
        await eventually(lambda: set(gateway.shares) == {"x", "y", "z"})
        assert len(gateway.shares["z"]) == 2  # as many as were asked for
        assert len(gateway.shares["x"]) == 1
        async with asyncio.timeout(TIMEOUT_S):
            while len(gateway.shares["x"]) < 3:
                await cluster.demand({"x": 60})  # 600 a second, or six engines
                await asyncio.sleep(0.03)
        assert len(gateway.shares["x"]) == 3 and len(gateway.shares["y"]) == 1
        assert all(digest_of("x") in agent.copies for agent in agents)

    points = OperatingPoints("a server", 10.0, 95.0, {8: 100.0})
    in_cluster(tmp_path, work, placement="sticky", min_copies={"z": 2}, operating_points=points)


def test_without_operating_points_sticky_estimates_them_from_profiles(tmp_path: Path) -> None:
    profile = profile_of()
    bytes_of_rank_8 = 8 * profile.adapter_bytes_per_rank
    full = estimated_tokens_per_s(profile.machine, profile.max_num_seqs, 1000, bytes_of_rank_8)

    async def work(cluster: RunningCluster) -> None:
        for name in "ab":
            await cluster.agent(name, f"{name}-0")
        gateway = await cluster.gateway()
        for name in "xy":
            await cluster.load(name, name)
        await eventually(lambda: set(gateway.shares) == {"x", "y"})
        async with asyncio.timeout(TIMEOUT_S):
            while len(gateway.shares["x"]) < 2:
                await cluster.demand({"x": math.ceil(full)})  # ten times a second
                await asyncio.sleep(0.03)
        assert len(gateway.shares["y"]) == 1

    in_cluster(tmp_path, work, placement="sticky")


def test_copies_beside_a_plan_go_when_it_is_carried_out(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agents = [await cluster.agent(name, f"{name}-0") for name in "ab"]
        let_go = asyncio.Event()

        async def wait(asked: Ensure) -> None:
            await let_go.wait()

        for agent in agents:
            agent.on_ensure = wait
        gateway = await cluster.gateway()
        loading = asyncio.create_task(cluster.load("x", "content"))
        for agent in agents:
            agent.copies.add(digest_of("content"))
        await eventually(lambda: any(agent.asked for agent in agents))
        assert all([not (await cluster.report(agent)).elsewhere for agent in agents])
        let_go.set()
        await loading
        await eventually(lambda: "x" in gateway.shares)
        home, other = agents if "a-0" in gateway.shares["x"] else reversed(agents)
        orders = await cluster.report(other)
        async with asyncio.timeout(TIMEOUT_S):
            while not orders.elsewhere:  # while the next plan is carried out
                await cluster.report(home)
                orders = await cluster.report(other)
        assert orders.elsewhere == (digest_of("content"),) and not orders.keep

    in_cluster(tmp_path, work, placement="contiguous")


def test_a_placement_without_room_changes_nothing(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        await cluster.agent("a", "a-0", store_bytes=1)
        gateway = await cluster.gateway()
        await cluster.load("x", "content")
        await asyncio.sleep(0.3)
        assert not gateway.shares and await cluster.status()

    in_cluster(tmp_path, work)
