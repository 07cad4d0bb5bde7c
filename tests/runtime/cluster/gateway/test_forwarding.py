"""Forwarding: a gateway looks like one server, over real HTTP."""

import asyncio

import msgspec
import pytest
from aiohttp import web
from corun.runtime.cluster.wire import GATEWAY_HEADER
from support.fake_cluster import eventually
from support.gateways import (
    DONE,
    EVENT,
    GatewayCluster,
    ScriptedEngine,
    answer_at_once,
    begin_stream,
    entry_of,
    hang_up,
    in_cluster,
    refuse,
    stream_at_once,
)


def test_a_body_and_its_answer_are_forwarded_as_they_are() -> None:
    async def work(cluster: GatewayCluster) -> None:
        body = b'{ "model": "base" ,"prompt":"\\u00e9t\xc3\xa9", "unheard_of": [1, {"a": null}]}'
        headers = {"Content-Type": "application/json", "x-request-id": "mine", "traceparent": "00-a-b-01"}
        async with cluster.session.post(
            f"{cluster.url}/v1/completions", data=body, headers=headers
        ) as response:
            answer = await response.read()
            assert response.status == 200
            assert response.headers["x-request-id"] == "mine"
            assert response.content_type == "application/json"
        assert msgspec.json.decode(answer)["choices"] == [{"index": 0, "text": " t t t"}]
        (got,) = cluster.engines[0].received
        assert (got.path, got.body) == ("/v1/completions", body)
        assert got.headers["x-request-id"] == "mine"
        assert got.headers["traceparent"] == "00-a-b-01"
        assert got.headers["Authorization"] == "Bearer cluster-key"
        gateway_id, _, number = got.headers[GATEWAY_HEADER].partition(":")
        assert gateway_id.startswith("gateway-") and number == "1"

    in_cluster(work)


def test_a_stream_is_forwarded_event_by_event() -> None:
    async def work(cluster: GatewayCluster) -> None:
        status, body = await cluster.complete(stream=True)
        assert (status, body) == (200, 3 * EVENT + DONE)
        assert await cluster.metric("gateway_first_token_seconds_count", engine="e0") == 1.0

    in_cluster(work, ScriptedEngine("e0", stream_at_once))


def test_errors_of_an_engine_are_forwarded_and_not_tried_elsewhere() -> None:
    async def work(cluster: GatewayCluster) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            status, body = await cluster.complete(path=path)
            assert status == 400 and b"the engine says invalid_value" in body
        assert sum(len(engine.received) for engine in cluster.engines) == 4

    refusing = refuse(400, "invalid_value")
    in_cluster(work, ScriptedEngine("e0", refusing), ScriptedEngine("e1", refusing))


def test_a_full_engine_is_left_once_and_a_full_cluster_says_when_to_come_again() -> None:
    async def work(cluster: GatewayCluster) -> None:
        full, other = cluster.engines
        other.queued_tokens = 10_000  # so that the full one is tried first
        await cluster.state_read()
        assert (await cluster.complete())[0] == 200
        assert (len(full.received), len(other.received)) == (1, 1)
        assert await cluster.metric("gateway_engine_retries_total", engine="e0") == 1.0
        other.answer = refuse(429, "overloaded")
        async with cluster.session.post(f"{cluster.url}/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["type"] == "rate_limit_error"

    in_cluster(work, ScriptedEngine("e0", refuse(429, "overloaded")), ScriptedEngine("e1"))


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_no_client_has_seen_is_tried_elsewhere(is_stream: bool) -> None:
    async def work(cluster: GatewayCluster) -> None:
        broken, whole = cluster.engines
        whole.queued_tokens = 10_000
        whole.answer = stream_at_once if is_stream else answer_at_once
        await cluster.state_read()
        status, body = await cluster.complete(stream=is_stream)
        assert status == 200 and b"error" not in body
        assert (len(broken.received), len(whole.received)) == (1, 1)

    in_cluster(work, ScriptedEngine("e0", hang_up), ScriptedEngine("e1"))


def test_an_answer_that_no_engine_completes_is_a_502() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b'{"choices":')
        return await hang_up(request)

    async def work(cluster: GatewayCluster) -> None:
        status, body = await cluster.complete()
        error = msgspec.json.decode(body)["error"]
        assert (status, error["code"]) == (502, "engine_lost")
        assert "ended before this answer was complete" in error["message"]

    in_cluster(work, ScriptedEngine("e0", half), ScriptedEngine("e1", half))


def test_a_stream_that_breaks_ends_with_an_error_event_behind_whole_events() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(EVENT + EVENT[:20])
        await asyncio.sleep(0.05)
        return await hang_up(request)

    async def work(cluster: GatewayCluster) -> None:
        status, body = await cluster.complete(stream=True)
        first, last, rest = body.split(b"\n\n")
        assert status == 200 and first + b"\n\n" == EVENT and not rest
        error = msgspec.json.decode(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "engine_lost" and "e0" in error["message"]

    in_cluster(work, ScriptedEngine("e0", breaks))


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_engine_sees_that_a_client_has_left(has_begun: bool) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request) if has_begun else web.StreamResponse()
        for _ in range(1000):
            if has_begun:
                await response.write(EVENT)
            await asyncio.sleep(0.02)
            assert request.transport is not None
        return response

    async def work(cluster: GatewayCluster) -> None:
        (engine,) = cluster.engines
        asking = asyncio.ensure_future(cluster.complete(stream=True))
        await eventually(lambda: bool(engine.received))
        await asyncio.sleep(0.1)
        asking.cancel()
        left_s = asyncio.get_running_loop().time()
        await eventually(lambda: engine.num_left == 1)
        assert asyncio.get_running_loop().time() - left_s < 10.0  # it would send for 20 s
        await eventually(lambda: engine.num_open == 0)

    in_cluster(work, ScriptedEngine("e0", endless))


def test_a_slow_reader_holds_back_its_own_stream_only() -> None:
    num_written = 0

    async def much(request: web.Request) -> web.StreamResponse:
        nonlocal num_written
        response = await begin_stream(request)
        for _ in range(2000):
            await response.write(EVENT * 200)  # 9 KiB
            num_written += 1
        await response.write(DONE)
        return response

    async def work(cluster: GatewayCluster) -> None:
        (engine,) = cluster.engines
        reader, writer = await asyncio.open_connection(
            *cluster.url.removeprefix("http://").split(":"), limit=1 << 10
        )
        body = b'{"prompt": "x", "stream": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.readline()
        while True:  # until the engine is blocked, too
            before = num_written
            await asyncio.sleep(0.3)
            if num_written == before:
                break
        assert num_written < 1900
        engine.answer = stream_at_once
        status, answer = await asyncio.wait_for(cluster.complete(stream=True), 20.0)
        assert (status, answer) == (200, 3 * EVENT + DONE)
        writer.close()

    in_cluster(work, ScriptedEngine("e0", much))


def test_a_connection_that_an_engine_has_closed_meanwhile_loses_nothing() -> None:
    async def work(cluster: GatewayCluster) -> None:
        (engine,) = cluster.engines
        for _ in range(3):
            assert (await cluster.complete())[0] == 200
            engine.answer = close_after
        assert len(engine.received) == 3

    async def close_after(request: web.Request) -> web.StreamResponse:
        response = await answer_at_once(request)
        response.force_close()
        return response

    in_cluster(work)


def test_tokens_of_streams_without_usage_are_sampled() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != "/tokenize":
            return await stream_at_once(request)
        return web.json_response({"count": 100, "max_model_len": 2048, "tokens": []})

    async def work(cluster: GatewayCluster) -> None:
        (engine,) = cluster.engines
        for _ in range(6):
            await cluster.complete(stream=True, prompt="word " * 100)
        await cluster.complete(stream=True, prompt=[1, 2, 3])
        await eventually(lambda: len(engine.received) == 11)
        asked = [one.body for one in engine.received if one.path == "/tokenize"]
        assert [msgspec.json.decode(one) for one in asked] == 4 * [{"prompt": "word " * 100}]

    in_cluster(work, ScriptedEngine("e0", answer))


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    ],
)
def test_a_gateway_checks_heads_as_a_server_does(head: bytes, status: int) -> None:
    async def work(cluster: GatewayCluster) -> None:
        host, port = cluster.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head)
        writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        writer.close()

    in_cluster(work)


def test_bodies_that_a_gateway_receives_have_room_together() -> None:
    large = {"model": "base", "prompt": "x" * 100_000}

    async def status(cluster: GatewayCluster, body: object) -> int:
        url = f"{cluster.url}/v1/completions"
        async with cluster.session.post(url, json=body) as response:
            await response.read()
            return response.status

    async def work(cluster: GatewayCluster) -> None:
        host, port = cluster.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n"
        writer.write(head + b" " * ((1 << 20) - 1000))
        await writer.drain()
        async with asyncio.timeout(20):
            while await status(cluster, large) != 429:
                await asyncio.sleep(0.05)
            assert await status(cluster, {"model": "base", "prompt": "x"}) == 200
            writer.close()
            while await status(cluster, large) != 200:
                await asyncio.sleep(0.05)

    in_cluster(work, max_bodies_mib=1)


def test_a_gateway_says_which_routes_it_has() -> None:
    async def work(cluster: GatewayCluster) -> None:
        _, document = await cluster.get("/openapi.json")
        assert {"/v1/completions", "/v1/lora_adapters/{name}", "/ready"} <= set(document["paths"])
        assert "/v1/engine_state" not in document["paths"]
        assert (await cluster.get("/version"))[0] == 200
        assert (await cluster.get("/v1/engine_state"))[0] == 404
        assert (await cluster.get("/v1/completions"))[0] == 405

    in_cluster(work)


def test_pages_of_an_allowed_origin_may_call_a_gateway() -> None:
    async def work(cluster: GatewayCluster) -> None:
        page = {"Origin": "http://localhost:3000"}
        asks = page | {"Access-Control-Request-Method": "POST"}
        async with cluster.session.options(f"{cluster.url}/v1/completions", headers=asks) as answer:
            assert answer.status == 200
        for body in (b'{"prompt": "x"}', b'{"prompt": "x", "model": "none"}'):
            async with cluster.session.post(
                f"{cluster.url}/v1/completions", data=body, headers=page
            ) as answer:
                assert answer.headers["Access-Control-Allow-Origin"] == page["Origin"]

    in_cluster(work, allowed_origins=("http://localhost:3000",))


@pytest.mark.parametrize("is_stream", [False, True])
def test_responses_are_routed_by_model_and_counted(is_stream: bool) -> None:
    usage = {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 3}

    async def answer(request: web.Request) -> web.StreamResponse:
        if not is_stream:
            return web.json_response({"object": "response", "usage": usage})
        response = await begin_stream(request)
        last = {"type": "response.completed", "response": {"usage": usage}}
        await response.write(b'event: response.created\ndata: {"type": "response.created"}\n\n')
        await response.write(b"event: response.completed\ndata: %b\n\n" % msgspec.json.encode(last))
        return response

    async def work(cluster: GatewayCluster) -> None:
        body = {"model": "summer", "input": "Once upon a time", "tools": [], "stream": is_stream}
        url = f"{cluster.url}/v1/responses"
        async with cluster.session.post(url, json=body) as response:
            assert response.status == 200 and b'"output_tokens"' in await response.read()
        (got,) = cluster.engines[0].received
        assert (got.path, msgspec.json.decode(got.body)) == ("/v1/responses", body)
        assert [one.adapter.name for one in cluster.controller.asked] == ["summer"]
        demand = cluster.controller.demand
        await eventually(lambda: any(one.output_tokens == {"summer": 3} for one in demand))
        async with cluster.session.post(url, json=body | {"model": "none"}) as response:
            assert response.status == 404

    in_cluster(work, ScriptedEngine("e0", answer), adapters=(entry_of("summer"),))
