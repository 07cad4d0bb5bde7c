"""Engines that are gone, stopped or draining, over real HTTP."""

import asyncio

import pytest
from aiohttp import web
from corun.runtime.cluster.gateway import controller as controller_module
from corun.runtime.cluster.gateway import health
from support.fake_cluster import eventually
from support.gateways import (
    DONE,
    EVENT,
    GatewayCluster,
    ScriptedEngine,
    begin_stream,
    entry_of,
    in_cluster,
    refuse,
    stream_at_once,
)


class Slow:
    """Streams an event, and the rest when the test continues it."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(EVENT)
        await self.goes_on.wait()
        await response.write(DONE)
        return response


async def begins(cluster: GatewayCluster) -> "asyncio.Task[tuple[int, bytes]]":
    """Return a stream that has begun."""
    before = sum(len(engine.received) for engine in cluster.engines)
    task = asyncio.ensure_future(cluster.complete(stream=True))
    await eventually(lambda: sum(len(engine.received) for engine in cluster.engines) > before)
    # The gateway and the engines run on this loop: turns of it count, not the time.
    for _ in range(20):
        await asyncio.sleep(0.005)
    return task


def test_an_engine_that_exits_is_ejected_at_once_and_its_streams_end_with_an_error() -> None:
    async def work(cluster: GatewayCluster) -> None:
        slow, streams = Slow(), []
        gone, other = cluster.engines
        for full, free in ((other, gone), (gone, other)):
            full.queued_tokens, free.queued_tokens, free.answer = 10_000, 0, slow
            await cluster.state_read()
            streams += [await begins(cluster) for _ in range(2)]
        num_lost = gone.num_open
        assert num_lost == other.num_open == 2
        gone.end()
        await cluster.usable(1)
        assert await cluster.metric("gateway_engine_ejections_total", engine="e0") == 1.0
        slow.goes_on.set()
        bodies = [(await stream)[1] for stream in streams]
        assert sum(b"engine_lost" in body for body in bodies) == num_lost
        assert sum(body == EVENT + DONE for body in bodies) == len(streams) - num_lost

    in_cluster(work, ScriptedEngine("e0"), ScriptedEngine("e1"))


def test_an_engine_whose_beat_stops_is_ejected_and_three_beats_bring_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "SILENT_AFTER_S", 1.0)

    async def work(cluster: GatewayCluster) -> None:
        stopped, other = cluster.engines
        other.queued_tokens, other.answer = 10_000, stream_at_once
        stopped.answer = Slow()
        await cluster.state_read()
        begun = await begins(cluster)

        async def silent(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(10.0)
            return web.Response()

        stopped.answer = silent
        waiting = await begins(cluster)
        stopped.is_beating = False  # its server and its stream of states go on
        assert b"engine_lost" in (await begun)[1]
        assert await waiting == (200, 3 * EVENT + DONE)  # the client had received nothing
        assert await cluster.num_usable() == 1
        labels = {"engine": "e0", "cause": "silent"}
        assert await cluster.metric("gateway_engine_ejections_total", **labels) == 1.0
        assert stopped.num_streams == 1
        stopped.is_beating = True
        await cluster.usable(2)

    in_cluster(work, ScriptedEngine("e0"), ScriptedEngine("e1"))


def test_an_engine_that_refuses_connections_is_left_at_once() -> None:
    async def work(cluster: GatewayCluster) -> None:
        engine = cluster.engines[0]
        await cluster.controller.publish(engines=(engine.card(engine_id="e2", url="http://127.0.0.1:1"),))
        assert await cluster.metric("gateway_engine_usable", engine="e2") == 0.0
        assert (await cluster.complete())[0] == 200

    in_cluster(work, ScriptedEngine("e0"))


def test_a_draining_engine_gets_nothing_new_and_ends_what_it_has() -> None:
    async def work(cluster: GatewayCluster) -> None:
        draining, other = cluster.engines
        slow = draining.answer = Slow()
        other.queued_tokens = 10_000
        await cluster.state_read()
        stream = await begins(cluster)
        await cluster.controller.publish(engines=(draining.card(is_draining=True),))
        for _ in range(3):
            assert (await cluster.complete())[0] == 200
        assert len(draining.received) == 1
        await cluster.controller.publish(removed_engines=("e0",))
        slow.goes_on.set()
        assert await stream == (200, EVENT + DONE)

    in_cluster(work, ScriptedEngine("e0"), ScriptedEngine("e1"))


def test_without_an_engine_requests_are_refused_with_the_reason() -> None:
    async def work(cluster: GatewayCluster) -> None:
        (engine,) = cluster.engines
        engine.is_ready = False
        await cluster.usable(0)
        async with cluster.session.post(f"{cluster.url}/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            error = (await response.json())["error"]
        assert error["code"] == "no_engine_ready" and "e0 drains" in error["message"]
        assert (await cluster.get("/ready"))[0] == 503
        assert (await cluster.get("/health"))[0] == 200
        engine.is_ready = True
        await cluster.usable(1)
        assert (await cluster.get("/ready"))[0] == 200
        # An engine that reports it itself.
        engine.answer = refuse(503, "shutting_down")
        status, body = await cluster.complete()
        assert status == 503 and b"the engine says shutting_down" in body

    in_cluster(work, ScriptedEngine("e0"))


def test_a_controller_that_is_gone_changes_nothing_but_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "_SILENT_S", 0.3)

    async def work(cluster: GatewayCluster) -> None:
        controller = cluster.controller
        controller.is_gone = True
        controller.end()
        await eventually(lambda: not controller.num_streams)
        assert (await cluster.complete())[0] == 200
        assert await cluster.metric("gateway_hears_controller") == 0.0
        async with cluster.session.post(
            f"{cluster.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/x"}
        ) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
        controller.is_gone = False
        await eventually(lambda: controller.num_streams == 1)
        assert (await cluster.complete())[0] == 200

    in_cluster(work, ScriptedEngine("e0"), allow_runtime_lora_updating=True)


def test_demand_and_ejections_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "_DEMAND_EVERY_S", 0.1)

    async def work(cluster: GatewayCluster) -> None:
        await cluster.controller.publish(adapters=(entry_of("x"),))
        await cluster.complete(model="x", prompt=[1, 2, 3, 4])
        demand = cluster.controller.demand
        await eventually(lambda: any(one.prompt_tokens == {"x": 4} for one in demand))
        await eventually(lambda: any(one.output_tokens == {"x": 3} for one in demand))
        cluster.engines[0].end()
        await eventually(lambda: demand[-1].ejected == {"e0": "exited"})
        assert demand[-1].prompt_tokens == {}

    in_cluster(work, ScriptedEngine("e0"))


def test_an_engine_that_comes_back_is_not_taken_for_the_one_that_left() -> None:
    async def work(cluster: GatewayCluster) -> None:
        (engine,) = cluster.engines
        slow = engine.answer = Slow()
        stream = await begins(cluster)
        await cluster.controller.publish(removed_engines=("e0",))
        assert (await cluster.complete())[0] == 503
        await cluster.controller.publish(engines=(engine.card(),))
        await cluster.usable(1)
        engine.answer = stream_at_once
        assert (await cluster.complete(stream=True))[0] == 200
        slow.goes_on.set()
        assert await stream == (200, EVENT + DONE)
        await asyncio.sleep(0.3)  # the gateway closes the connections to the removed engine
        assert await cluster.num_usable() == 1
        assert (await cluster.complete(stream=True))[0] == 200
        assert await cluster.metric("gateway_decision_seconds_count") >= 3.0

    in_cluster(work, ScriptedEngine("e0"))
