"""A controller over real HTTP, with fake agents and gateways."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from corun.runtime.cluster.controller import changes, members
from corun.runtime.cluster.http.calls import UnreachableError, call, make_session
from corun.runtime.cluster.wire import ENSURE_PATH, STATUS_PATH, AdapterChange, ClusterStatus, Ensure
from corun.runtime.server.errors import HttpError
from support.adapter_files import write_adapter
from support.fake_cluster import (
    RunningCluster,
    digest_of,
    eventually,
    in_cluster,
    profile_of,
    running_controller,
)


def test_a_load_is_answered_when_one_engine_serves_it_and_all_gateways_know(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0", "a-1")
        gateways = [await cluster.gateway(name) for name in ("g0", "g1")]
        entry = await cluster.load("x", "content")
        assert entry.state == "ready" and entry.digest == digest_of("content")
        assert [one.adapters["x"] for one in gateways] == [entry, entry]
        assert [one.engine_id for one in agent.asked] == ["a-0"]
        assert await cluster.load("x", "content") == entry  # loading the same again changes nothing

    in_cluster(tmp_path, work)


def test_a_reload_has_a_new_revision_and_the_other_engines_follow(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0", "a-1", "a-2")
        gateway = await cluster.gateway()
        first = await cluster.load("x", "old")
        agent.engines["a-2"].entries["x"] = first  # loaded for a request
        with pytest.raises(HttpError, match="'x' is already loaded with other content") as refused:
            await cluster.load("x", "new")
        assert (refused.value.status, refused.value.code) == (400, "adapter_exists")
        second = await cluster.load("x", "new", load_inplace=True)
        assert second.revision > first.revision and gateway.adapters["x"] == second
        await eventually(lambda: agent.engines["a-2"].entries["x"] == second)
        assert "x" not in agent.engines["a-1"].entries

    in_cluster(tmp_path, work)


def test_what_an_engine_refuses_leaves_all_as_it_was(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0")
        gateway = await cluster.gateway()
        first = await cluster.load("x", "old")

        async def refuse(asked: Ensure) -> None:
            raise HttpError(400, "rank 999 is too large", code="adapter_failed")

        agent.on_ensure = refuse
        for name in ("x", "y"):
            with pytest.raises(HttpError, match="rank 999 is too large"):
                await cluster.load(name, "new", load_inplace=True)
        # An engine may have the new content at the failed revision.
        await eventually(lambda: "y" not in gateway.adapters)
        assert gateway.adapters["x"].digest == first.digest
        assert gateway.adapters["x"].revision > agent.asked[1].adapter.revision
        await eventually(lambda: [one.name for one in agent.unloaded] == ["y"])
        agent.unreadable.add("torn")
        with pytest.raises(HttpError, match="torn is no adapter"):
            await cluster.load("z", "torn")

    in_cluster(tmp_path, work)


def test_another_engine_is_tried_if_one_is_dead(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0", "a-1")

        async def dead(asked: Ensure) -> None:
            if asked.engine_id == "a-0":
                raise HttpError(503, "it is gone", code="engine_dead")

        agent.on_ensure = dead
        await cluster.load("x", "content")
        assert "x" in agent.engines["a-1"].entries

    in_cluster(tmp_path, work)


def test_an_unload_reaches_gateways_first_and_all_agents(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agents = [await cluster.agent(name, f"{name}-0") for name in "ab"]
        gateway = await cluster.gateway()
        entry = await cluster.load("x", "content")
        await cluster.unload("x")
        assert "x" not in gateway.adapters
        for agent in agents:
            (gone,) = agent.unloaded
            assert gone.name == "x" and gone.revision > entry.revision
        with pytest.raises(HttpError, match="no model or adapter is named 'x'") as unknown:
            await cluster.unload("x")
        assert unknown.value.status == 404
        again = await cluster.load("x", "content")
        assert again.revision > agents[0].unloaded[0].revision

    in_cluster(tmp_path, work)


def test_pins_are_kept_and_published(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0")
        gateway = await cluster.gateway()
        await cluster.load("x", "content", pinned=True)
        assert gateway.adapters["x"].pinned
        entry = await cluster.change(AdapterChange(action="load", name="x", pinned=False))
        assert not entry.pinned and not agent.pinned[-1].pinned
        await eventually(lambda: not gateway.adapters["x"].pinned)

    in_cluster(tmp_path, work)


def test_a_gateway_that_does_not_take_a_change_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_ACKS_TIMEOUT_S", 0.2)

    async def work(cluster: RunningCluster) -> None:
        await cluster.agent("a", "a-0")
        deaf = await cluster.gateway("deaf", acknowledges=False)
        await cluster.load("x", "content")
        status = await cluster.status()
        assert status.num_gateways == 0
        assert deaf.adapters["x"].state == "ready"

    in_cluster(tmp_path, work)


def test_engines_of_another_base_are_refused_with_both(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        await cluster.agent("a", "a-0")
        other = await cluster.engine(profile=profile_of("base-2"))
        halved = await cluster.engine(profile=profile_of(dtype="float16"))
        right = await cluster.engine()
        for engine, message in (
            (other, "serves the base model base-2, and the others base-1"),
            (halved, "computes in float16 .* the others in float32 over base-1"),
        ):
            with pytest.raises(HttpError, match=message) as refused:
                await cluster.engines("add", url=engine.url)
            assert refused.value.status == 400
        await cluster.engines("add", url=right.url)
        with pytest.raises(HttpError, match="is given twice"):
            await cluster.engines("add", url=right.url + "/")
        with pytest.raises(HttpError, match="does not speak corun's API"):
            await cluster.engines("add", url=cluster.url + "/nothing")
        with pytest.raises(HttpError, match="there is no engine 'b-0'; there are a-0"):
            await cluster.engines("drain", engine_id="b-0")
        with pytest.raises(HttpError, match="action must be add"):
            await cluster.engines("stop")

    in_cluster(tmp_path, work)


def test_an_engine_that_drains_gets_no_requests_and_then_is_gone(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0", "a-1")
        gateway = await cluster.gateway()
        static = await cluster.engine(num_running=1)
        await cluster.engines("add", url=static.url)
        await cluster.engines("drain", engine_id="a-0")
        assert gateway.engines["a-0"].is_draining and agent.changed[0].engine_id == "a-0"
        await cluster.report(agent)
        await eventually(lambda: "a-0" not in gateway.engines)
        await cluster.engines("remove", engine_id=static.url)
        assert gateway.engines[static.url].is_draining
        static.num_running = 0
        await eventually(lambda: static.url not in gateway.engines)
        assert set(gateway.engines) == {"a-1"}

    in_cluster(tmp_path, work)


def test_the_last_copy_moves_before_the_last_engine_of_an_agent_goes(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0")
        await cluster.load("x", "content")
        await cluster.report(agent)
        other = await cluster.agent("b", "b-0")
        gateway = await cluster.gateway()
        removing = asyncio.ensure_future(cluster.engines("remove", engine_id="a-0"))
        await eventually(lambda: gateway.engines["a-0"].is_draining)
        for _ in range(3):
            await cluster.report(agent)  # with its present copies
            await asyncio.sleep(0.02)
        await eventually(lambda: digest_of("content") in other.copies)
        assert other.asked[0].sources == (agent.url,)
        assert not agent.changed and not removing.done()
        await cluster.report(other)  # the answer orders to keep it
        assert other.orders.keep == (digest_of("content"),) and not removing.done()
        await cluster.report(other)  # confirms it
        await removing
        assert agent.changed

    in_cluster(tmp_path, work)


def test_a_silent_agent_is_not_asked_and_its_engines_stay_until_gateways_eject_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_AGENT_SILENT_S", 0.3)

    async def work(cluster: RunningCluster) -> None:
        await cluster.agent("a", "a-0")
        gateway = await cluster.gateway()
        await asyncio.sleep(0.4)
        with pytest.raises(HttpError, match="agent 'a' is silent") as silent:
            await cluster.engines("drain", engine_id="a-0")
        assert silent.value.status == 503 and not gateway.engines["a-0"].is_draining
        with pytest.raises(HttpError):
            await cluster.load("x", "content")
        await cluster.demand({}, ejected={"a-0": "silent"})
        await eventually(lambda: "a-0" not in gateway.engines)

    in_cluster(tmp_path, work)


def test_an_engine_without_an_agent_loads_from_the_path_itself(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        engine = await cluster.engine()
        await cluster.engines("add", url=engine.url)
        source = write_adapter(tmp_path / "source", num_bytes=1000)
        entry = await cluster.load("x", str(source))
        assert engine.served == {"x": str(source)}
        (source / "adapter_model.safetensors").write_bytes(
            (source / "adapter_model.safetensors").read_bytes()[:-4] + b"abcd"
        )
        second = await cluster.engine()
        await cluster.engines("add", url=second.url)
        with pytest.raises(HttpError, match="has changed since it was loaded as 'x'"):
            await cluster.post(ENSURE_PATH, Ensure(engine_id=second.url, adapter=entry), dict)
        assert not second.served
        await cluster.unload("x")
        assert not engine.served

    in_cluster(tmp_path, work)


def test_without_engines_nothing_is_loaded(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        with pytest.raises(HttpError, match="no engine is ready") as refused:
            await cluster.load("x", "content")
        assert refused.value.status == 503
        await cluster.agent("a", "a-0")
        with pytest.raises(HttpError, match="is the name of the base model"):
            await cluster.load("base", "content")
        with pytest.raises(HttpError, match="action must be load"):
            await cluster.change(AdapterChange(action="load", name="x"))

    in_cluster(tmp_path, work)


def test_all_is_there_after_a_restart(tmp_path: Path) -> None:
    async def run(outlive: contextlib.AsyncExitStack) -> None:
        async with running_controller(tmp_path, outlive) as cluster:
            agent = await cluster.agent("a", "a-0")
            static = await cluster.engine()
            await cluster.engines("add", url=static.url)
            gateway = await cluster.gateway()
            entry = await cluster.load("x", "content")
            await cluster.report(agent)  # its copy
            await eventually(lambda: gateway.sequence > 0)
            sequence = gateway.sequence
        # A new command adds engines without an agent itself.
        for run_id, engines in (("run", {"a-0", static.url}), ("another command", {"a-0"})):
            async with running_controller(tmp_path, outlive, run_id=run_id) as cluster:
                after = await cluster.gateway()
                assert after.adapters == {"x": entry} and after.sequence > sequence
                # Gateways lose no engine before the first reports of agents, nor the agents
                # that load adapters and have the files.
                is_same = run_id == "run"
                assert {*after.engines} == (engines if is_same else set())
                cards = [(one.url, one.digests) for one in after.agents.values()]
                assert cards == ([(agent.url, (entry.digest,))] if is_same else [])
                await cluster.report(agent)
                await cluster.has_engines(engines)
                assert agent.orders.keep == (entry.digest,)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as outlive:
            await run(outlive)

    asyncio.run(main())


def test_metrics_show_copies_engines_and_gateways(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        agent = await cluster.agent("a", "a-0")
        await cluster.gateway()
        await cluster.load("x", "content")
        await cluster.report(agent)
        lines = (await cluster.metrics()).splitlines()
        assert 'corun_cluster_adapter_copies{adapter_name="x"} 1.0' in lines
        assert {"corun_cluster_engines 1.0", "corun_cluster_gateways 1.0"} <= {*lines}

    in_cluster(tmp_path, work)


def test_nothing_is_answered_without_the_key(tmp_path: Path) -> None:
    async def work(cluster: RunningCluster) -> None:
        async with make_session("another key") as session:
            with pytest.raises(HttpError, match="the cluster's key is missing or wrong") as refused:
                await call(session, cluster.url + STATUS_PATH, None, ClusterStatus, timeout_s=5.0)
        assert refused.value.status == 401 and not isinstance(refused.value, UnreachableError)

    in_cluster(tmp_path, work)
