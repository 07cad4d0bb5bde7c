"""A gateway in front of a real server on a simulated machine.

Answers and refusals of the server pass the gateway unchanged.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import ClientSession
from corun.runtime.cluster.http.calls import make_session
from corun.runtime.cluster.wire import EngineCard
from support.agents import KEY
from support.gateways import GatewayCluster, gateway_cluster
from support.latency_engine import LatencyServer, LatencySettings

_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"prompt": [1, 2, 3], "max_tokens": 5}),
    ("completions", {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True}),
    ("completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2, "return_token_ids": True}),
    ("completions", {"prompt": [1], "stream": True, "stream_options": {"include_usage": True}}),
    ("completions", {"prompt": []}),
    ("completions", {"prompt": [1], "temperature": "warm"}),
    ("completions", {"prompt": [1], "stream": True, "max_tokens": -1}),
    ("chat/completions", {"messages": []}),
)


@pytest.fixture(scope="module")
def server() -> Iterator[LatencyServer]:
    with LatencyServer(LatencySettings(), "--api-key", KEY) as server:
        yield server


def _comparable(raw: bytes) -> list[Any]:
    """Return the objects of an answer or stream, without fields that differ each time."""
    found = []
    for text in raw.decode().removesuffix("\n\n").split("\n\n"):
        line = text.removeprefix("data: ")
        value = line if line == "[DONE]" else json.loads(line)
        if isinstance(value, dict):
            value.pop("id", None)
            value.pop("created", None)
        found.append(value)
    return found


async def _ask(session: ClientSession, url: str, path: str, body: Any) -> tuple[int, list[Any]]:
    async with session.post(f"{url}/v1/{path}", json=body) as response:
        return response.status, _comparable(await response.read())


async def _join(cluster: GatewayCluster, server: LatencyServer) -> None:
    card = EngineCard(engine_id="real", url=server.url)
    await cluster.controller.publish(engines=(card,))
    await cluster.usable(1)


def test_answers_are_those_of_the_server_itself(server: LatencyServer) -> None:
    async def run() -> None:
        async with gateway_cluster() as cluster, make_session(KEY) as session:
            await _join(cluster, server)
            for path, body in _REQUESTS:
                direct = await _ask(session, server.url, path, body)
                assert await _ask(session, cluster.url, path, body) == direct, body
            statuses = [(await _ask(session, cluster.url, *one))[0] for one in _REQUESTS]
            assert statuses == [200, 200, 200, 200, 400, 400, 400, 400]

    asyncio.run(run())


def test_a_client_that_leaves_frees_the_server(server: LatencyServer) -> None:
    async def num_running(session: ClientSession) -> float:
        async with session.get(f"{server.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        (line,) = [one for one in lines if one.startswith("corun:num_requests_running{")]
        return float(line.rpartition(" ")[2])

    async def run() -> None:
        async with gateway_cluster() as cluster, make_session(KEY) as session:
            await _join(cluster, server)
            body = {"prompt": [1], "max_tokens": 2000, "stream": True}
            async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
                await response.content.readany()
                assert await num_running(session) == 1.0
            deadline_s = asyncio.get_running_loop().time() + 20.0  # the answer takes longer
            while await num_running(session):
                assert asyncio.get_running_loop().time() < deadline_s
                await asyncio.sleep(0.02)

    asyncio.run(run())


def test_a_server_that_is_killed_ends_its_streams_and_nothing_else() -> None:
    async def run() -> None:
        with LatencyServer(LatencySettings(), "--api-key", KEY) as server:
            async with gateway_cluster() as cluster, make_session(KEY) as session:
                await _join(cluster, server)
                body = {"prompt": [1], "max_tokens": 2000, "stream": True}
                async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
                    await response.content.readany()
                    server.close()
                    rest = await response.content.read()
                assert json.loads(rest.rsplit(b"data: ", 1)[1])["error"]["code"] == "engine_lost"
                await cluster.usable(0)
                assert await cluster.metric("gateway_lost_total") == 1.0
                assert await cluster.metric("gateway_engine_ejections_total") == 1.0
                assert (await cluster.complete())[0] == 503

    asyncio.run(run())
