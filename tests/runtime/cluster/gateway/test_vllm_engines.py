"""Controller and gateway in front of vLLM servers: adapters, reloads and faults.

The servers answer as recorded. Those that are stopped or killed are processes.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession
from corun.runtime.cluster.gateway import links
from corun.runtime.cluster.gateway.run import run_gateway
from corun.runtime.cluster.http.calls import make_session
from corun.runtime.cluster.settings import GatewaySettings
from corun.runtime.config.serve import ServeConfig
from corun.runtime.server.errors import HttpError
from support.adapter_files import write_adapter
from support.agents import KEY, serving
from support.clusters import free_ports
from support.fake_cluster import RunningCluster, eventually, running_controller
from support.recorded_vllm import BASE, RecordedVllm, VllmOptions, VllmProcess, vllm_card

DEADLINE_S = 30.0
STREAM = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True}


class Front:
    """A gateway and its controller."""

    def __init__(self, url: str, session: ClientSession, controller: RunningCluster) -> None:
        self.url = url
        self.session = session
        self.controller = controller

    async def add(self, url: str) -> None:
        """Add an engine, and wait until it gets requests."""
        card = vllm_card(url)
        number = await self.num_usable()
        await self.controller.engines("add", url=url, foreign=card.foreign)
        await self.usable(number + 1)

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        """Send a completion request; return status and answer."""
        body = {"prompt": "Once upon a time", "max_tokens": 3} | fields
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            return response.status, await response.json()

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[ClientResponse]:
        """Return a stream that has begun."""
        async with self.session.post(f"{self.url}/v1/completions", json=STREAM) as response:
            await response.content.readany()
            yield response

    async def usable(self, number: int) -> None:
        """Wait until ``number`` engines get requests."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.num_usable() != number:
                await asyncio.sleep(0.02)

    async def num_usable(self) -> int:
        """Return the number of engines that get requests."""
        return round(await self.metric("gateway_engine_usable"))

    async def metric(self, name: str) -> float:
        """Return the sum of a metric family."""
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(one.rpartition(" ")[2]) for one in lines if f"corun:{name}{{" in one)


def in_front(tmp_path: Path, work: Callable[[Front], Awaitable[None]]) -> None:
    async def run() -> None:
        (port,) = free_ports(1)
        serve = ServeConfig(port=port, allow_runtime_lora_updating=True, drain_timeout_s=1.0)
        async with running_controller(tmp_path / "state") as controller:
            settings = GatewaySettings(
                cluster_key=KEY,
                gateway_id="g",
                controller_url=controller.url,
                router="predicted",
                num_gateways=1,
                serve=serve,
            )
            stop = asyncio.Event()
            running = asyncio.ensure_future(run_gateway(settings, stop))
            async with make_session(KEY) as session:
                front = Front(f"http://127.0.0.1:{port}", session, controller)
                try:
                    await _connected(front)
                    await work(front)
                finally:
                    stop.set()
                    await running

    asyncio.run(run())


async def _connected(front: Front) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(OSError):
                if await front.metric("gateway_hears_controller"):
                    return
            await asyncio.sleep(0.02)


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["text"]
    return text


@contextlib.asynccontextmanager
async def recorded(**options: Any) -> AsyncIterator[RecordedVllm]:
    server = RecordedVllm(VllmOptions(key=KEY, **options))
    async with serving(server.app()) as server.url:
        yield server


def test_requests_go_straight_to_it_and_answers_look_like_ours(tmp_path: Path) -> None:
    async def work(front: Front) -> None:
        async with recorded() as server:
            await front.add(server.url)
            source = write_adapter(tmp_path / "source")
            await front.controller.load("sql", str(source))
            status, answer = await front.complete(model="sql", predicted_output_tokens=3)
            assert (status, answer["model"]) == (200, "sql")
            assert server.bodies[-1]["model"].startswith("sql@")
            status, answer = await front.complete(model=BASE)
            assert (status, answer["model"], text_of(answer)) == (200, BASE, "base t t")
            status, answer = await front.complete(model="nobody")
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            number = len(server.bodies)
            for lora in ([{"name": "sql"}], [{"id": 0}]):  # which it would not look at
                status, answer = await front.complete(lora=lora)
                assert (status, answer["error"]["code"]) == (400, "not_served")
                assert answer["error"]["param"] == "lora" and len(server.bodies) == number
            status, answer = await front.complete(prompt="x" * 600)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            async with front.session.get(f"{front.url}/v1/models") as response:
                models = [one["id"] for one in (await response.json())["data"]]
            assert models == [BASE, "sql"]
            url = f"{front.url}/v1/lora_adapters/sql"
            await eventually_shown(front, url, {server.url: "device"})

    in_front(tmp_path, work)


async def eventually_shown(front: Front, url: str, engines: dict[str, str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with front.session.get(url) as response:
                if (await response.json())["engines"] == engines:
                    return
            await asyncio.sleep(0.02)


def test_a_reload_never_answers_with_the_former_content(tmp_path: Path) -> None:
    """The prompt is the same, and vLLM caches its KV by the adapter's name."""

    async def work(front: Front) -> None:
        async with recorded() as first, recorded() as second:
            await front.add(first.url)
            await front.add(second.url)
            former = ""
            for seed in range(4):
                source = write_adapter(tmp_path / str(seed), seed=seed)
                await front.controller.load("sql", str(source), load_inplace=True)
                asked = [front.complete(model="sql") for _ in range(8)]
                answers = await asyncio.gather(*asked)
                (content,) = {text_of(answer) for _, answer in answers}
                assert content != former
                former = content
            assert first.bodies and second.bodies
            await front.controller.unload("sql")
            assert (await front.complete(model="sql"))[0] == 404
            assert not first.loaded and not second.loaded

    in_front(tmp_path, work)


def test_an_adapter_that_it_has_lost_is_loaded_again(tmp_path: Path) -> None:
    async def work(front: Front) -> None:
        async with recorded() as server:
            await front.add(server.url)
            await front.controller.load("sql", str(write_adapter(tmp_path / "source")))
            assert (await front.complete(model="sql"))[0] == 200
            server.loaded.clear()  # another client has unloaded it
            server.started_unix_s += 1.0  # or the server has restarted
            for _ in range(15):  # turns of the loop on which all parts run
                await asyncio.sleep(0.02)
            assert (await front.complete(model="sql"))[0] == 200

    in_front(tmp_path, work)


def test_it_is_asked_how_many_tokens_a_text_has(tmp_path: Path) -> None:
    """A stream without requested usage has no number of prompt tokens."""

    async def work(front: Front) -> None:
        async with recorded() as server:
            await front.add(server.url)
            await front.controller.load("sql", str(write_adapter(tmp_path / "source")))
            body = {"model": "sql", "prompt": "a" * 100, "max_tokens": 2, "stream": True}
            async with front.session.post(f"{front.url}/v1/completions", json=body) as response:
                await response.content.read()
            await eventually(lambda: bool(server.tokenized))
            assert server.tokenized[0]["model"].startswith("sql@")
            assert server.tokenized[0]["prompt"] == "a" * 100

    in_front(tmp_path, work)


def test_adapters_cannot_be_pinned_on_vllm(tmp_path: Path) -> None:
    async def work(front: Front) -> None:
        async with recorded() as server:
            await front.add(server.url)
            source = str(write_adapter(tmp_path / "source"))
            with pytest.raises(HttpError, match="adapters cannot be pinned: engine http") as error:
                await front.controller.load("sql", source, pinned=True)
            assert (error.value.status, error.value.code) == (400, "not_served")
            await front.controller.load("sql", source)

    in_front(tmp_path, work)


def test_a_drained_engine_goes_when_its_requests_have_ended(tmp_path: Path) -> None:
    async def work(front: Front) -> None:
        async with recorded(decode_s=0.004) as server:
            await front.add(server.url)
            async with front.stream() as response:
                await front.controller.engines("remove", engine_id=server.url)
                assert (await front.complete())[0] == 503
                assert b'"error"' not in await response.content.read()
            await front.controller.has_engines(set())

    in_front(tmp_path, work)


def test_costs_are_learned_from_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MIN_ANSWERS", 3)
    monkeypatch.setattr(links, "_PROFILE_EVERY_S", 0.05)

    async def predicted_s(front: Front) -> float:
        """Predicted time of the first token of one more stream."""
        sums = []
        for _ in range(2):
            async with front.session.get(f"{front.url}/metrics") as response:
                sums.append(await response.text())
            if len(sums) == 1:
                async with front.stream() as stream:
                    await stream.content.read()
        before, after = (
            float(re.findall(r"predicted_first_token_seconds_sum\S* (\S+)", one)[0]) for one in sums
        )
        return after - before

    async def work(front: Front) -> None:
        async with recorded(prefill_s=0.2, decode_s=0.001) as server:
            await front.add(server.url)
            assert await predicted_s(front) < 0.1  # assumed
            async with asyncio.timeout(DEADLINE_S):
                while await predicted_s(front) < 0.15:
                    await asyncio.sleep(0.05)

    in_front(tmp_path, work)


@contextlib.asynccontextmanager
async def processes(front: Front, number: int) -> AsyncIterator[list[VllmProcess]]:
    options = VllmOptions(key=KEY, decode_s=0.005)
    servers = [VllmProcess(port, options) for port in free_ports(number)]
    try:
        for server in servers:
            await asyncio.to_thread(server.wait)
            await front.add(server.url)
        yield servers
    finally:
        for server in servers:
            server.close()


def test_a_server_that_is_killed_ends_its_streams_and_comes_back(tmp_path: Path) -> None:
    async def work(front: Front) -> None:
        async with processes(front, 2) as servers:
            async with front.stream() as first, front.stream() as second:
                servers[0].close()
                rests = [await one.content.read() for one in (first, second)]
            codes = [
                json.loads(one.rsplit(b"data: ", 1)[1])["error"]["code"] for one in rests if b'"error"' in one
            ]
            assert codes == ["engine_lost"]  # one stream each: the other one is complete
            assert sum(one.endswith(b"data: [DONE]\n\n") for one in rests) == 1
            await front.usable(1)
            statuses = [(await front.complete())[0] for _ in range(4)]
            assert statuses == [200] * 4
            port = int(servers[0].url.rpartition(":")[2])
            servers[0] = VllmProcess(port, VllmOptions(key=KEY))
            await front.usable(2)

    in_front(tmp_path, work)


def test_a_server_that_is_silent_is_ejected_and_comes_back(tmp_path: Path) -> None:
    async def work(front: Front) -> None:
        async with processes(front, 1) as (server,):
            async with front.stream() as stream:
                os.kill(server.process.pid, signal.SIGSTOP)
                rest = await stream.content.read()
            assert json.loads(rest.rsplit(b"data: ", 1)[1])["error"]["code"] == "engine_lost"
            status, answer = await front.complete()
            assert status == 503 and "is ejected (silent)" in answer["error"]["message"]
            os.kill(server.process.pid, signal.SIGCONT)
            await front.usable(1)
            assert (await front.complete())[0] == 200

    in_front(tmp_path, work)


def test_a_controller_that_begins_again_finds_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with recorded() as server, contextlib.AsyncExitStack() as outlive:
            async with running_controller(tmp_path / "state", outlive) as controller:
                card = vllm_card(server.url)
                await controller.engines("add", url=server.url, foreign=card.foreign)
            async with running_controller(tmp_path / "state", outlive) as controller:
                status = await controller.until(lambda one: bool(one.engines))
                assert status.engines[0].foreign == card.foreign

    asyncio.run(run())
