"""A gateway serves, lists and changes the adapters of a cluster, over real HTTP."""

import asyncio

import msgspec
import pytest
from corun.runtime.cli.main import main
from corun.runtime.cluster.wire import AdapterChange, Ensure
from corun.runtime.server.errors import HttpError
from support.gateways import (
    BASE,
    GatewayCluster,
    ScriptedEngine,
    answer_at_once,
    entry_of,
    in_cluster,
    refuse,
)

pytestmark = pytest.mark.usefixtures("own_logging")


def asked(cluster: GatewayCluster) -> list[tuple[str, str, int]]:
    """Return recorded loads: engine, adapter and revision."""
    return [(one.engine_id, one.adapter.name, one.adapter.revision) for one in cluster.controller.asked]


def code_of(answer: tuple[int, bytes]) -> tuple[int, str]:
    return answer[0], msgspec.json.decode(answer[1])["error"]["code"]


def test_an_engine_is_asked_once_however_many_wait() -> None:
    async def work(cluster: GatewayCluster) -> None:
        opens = asyncio.Event()

        async def wait(asked: Ensure) -> None:
            await opens.wait()

        cluster.controller.on_ensure = wait
        waiting = [asyncio.ensure_future(cluster.complete(model="x")) for _ in range(5)]
        waiting.append(asyncio.ensure_future(cluster.complete(model=f"{BASE}:x")))
        await asyncio.sleep(0.1)
        assert not cluster.engines[0].received
        waiting.pop(0).cancel()  # the first client leaves
        await asyncio.sleep(0.05)
        opens.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 5
        assert asked(cluster) == [("e0", "x", 1)]
        assert (await cluster.complete(model="x"))[0] == 200
        assert len(asked(cluster)) == 1
        # It is loaded again at a new revision, and then by a new process of the engine.
        await cluster.controller.publish(adapters=(entry_of("x", 2),))
        assert (await cluster.complete(model="x"))[0] == 200
        assert asked(cluster)[1:] == [("e0", "x", 2)]
        cluster.engines[0].incarnation = "two"
        await cluster.state_read()
        assert (await cluster.complete(model="x"))[0] == 200
        assert len(asked(cluster)) == 3

    in_cluster(work, ScriptedEngine("e0"), adapters=(entry_of("x"),))


def test_an_engine_that_cannot_serve_an_adapter_is_left_once() -> None:
    async def work(cluster: GatewayCluster) -> None:
        cluster.engines[1].queued_tokens = 10_000
        await cluster.state_read()
        full = HttpError(503, "the disk is full", code="no_space")

        async def refuse_first(asked: Ensure) -> None:
            if asked.engine_id == "e0":
                raise full

        cluster.controller.on_ensure = refuse_first
        assert (await cluster.complete(model="x"))[0] == 200
        assert [engine_id for engine_id, *_ in asked(cluster)] == ["e0", "e1"]

        async def refuse_all(asked: Ensure) -> None:
            raise HttpError(400, "rank 999 is too large", code="adapter_failed")

        cluster.controller.on_ensure = refuse_all
        await cluster.controller.publish(adapters=(entry_of("y"),))
        assert code_of(await cluster.complete(model="y")) == (400, "adapter_failed")

    in_cluster(work, ScriptedEngine("e0"), ScriptedEngine("e1"), adapters=(entry_of("x"),))


def test_an_adapter_that_an_engine_has_dropped_is_asked_for_again() -> None:
    async def work(cluster: GatewayCluster) -> None:
        (engine,) = cluster.engines
        assert (await cluster.complete(model="x"))[0] == 200
        missing = refuse(404, "model_not_found")

        async def once_more(request: object) -> object:
            engine.answer = answer_at_once
            return await missing(request)  # type: ignore[arg-type]

        engine.answer = once_more  # type: ignore[assignment]
        assert (await cluster.complete(model="x"))[0] == 200
        assert len(asked(cluster)) == 2
        await cluster.state_read()
        del engine.adapters["x"]  # and its state shows it
        await cluster.state_read()
        assert (await cluster.complete(model="x"))[0] == 200
        assert len(asked(cluster)) == 3

    in_cluster(work, ScriptedEngine("e0"), adapters=(entry_of("x"),))


def test_an_engine_loads_all_adapters_of_one_request() -> None:
    async def work(cluster: GatewayCluster) -> None:
        (engine,) = cluster.engines
        lora = [{"name": name, "scale": 0.5} for name in ("x", "y")]
        assert (await cluster.complete(lora=lora))[0] == 200
        assert asked(cluster) == [("e0", "y", 1), ("e0", "x", 1)], "the largest first"
        assert msgspec.json.decode(engine.received[-1].body)["lora"] == lora
        await cluster.controller.publish(adapters=(entry_of("x", 2),))
        assert (await cluster.complete(lora=lora))[0] == 200
        assert asked(cluster)[2:] == [("e0", "x", 2)]
        missing = refuse(404, "model_not_found")

        async def once_more(request: object) -> object:
            engine.answer = answer_at_once
            return await missing(request)  # type: ignore[arg-type]

        engine.answer = once_more  # type: ignore[assignment]
        assert (await cluster.complete(lora=lora))[0] == 200
        assert len(asked(cluster)) == 5, "either may be the one that it has dropped"
        status, body = await cluster.complete(lora=[*lora, {"name": "z"}])
        assert code_of((status, body)) == (404, "model_not_found")
        assert msgspec.json.decode(body)["error"]["param"] == "lora"

    in_cluster(work, ScriptedEngine("e0"), adapters=(entry_of("x", rank=4), entry_of("y", rank=8)))


def test_names_that_cannot_be_served_are_refused_here() -> None:
    async def work(cluster: GatewayCluster) -> None:
        status, body = await cluster.complete(model="ware-house")
        assert code_of((status, body)) == (404, "model_not_found")
        assert b"warehouse" in body
        assert code_of(await cluster.complete(model="loads")) == (503, "adapter_unavailable")
        status, body = await cluster.complete(model="broken")
        assert code_of((status, body)) == (400, "adapter_failed") and b"no such file" in body
        await cluster.controller.publish(removed_adapters={"warehouse": 2})
        assert code_of(await cluster.complete(model="warehouse")) == (404, "model_not_found")
        assert not cluster.engines[0].received

    in_cluster(
        work,
        ScriptedEngine("e0"),
        adapters=(
            entry_of("warehouse"),
            entry_of("loads", state="loading"),
            entry_of("broken", state="failed", reason="no such file"),
        ),
    )


def test_adapters_are_listed_with_copies_and_levels() -> None:
    async def work(cluster: GatewayCluster) -> None:
        await cluster.complete(model="x")
        await cluster.state_read()
        _, models = await cluster.get("/v1/models")
        assert [(one["id"], one["parent"]) for one in models["data"]] == [
            (BASE, None),
            ("x", BASE),
            ("y", BASE),
        ]
        assert (await cluster.get("/v1/models/x"))[1]["root"] == "/adapters/x"
        _, page = await cluster.get("/v1/lora_adapters?limit=1")
        assert page["has_more"] and page["num_adapters"] == 2
        (x,) = page["data"]
        assert (x["name"], x["level"], x["engines"]) == ("x", "host", {"e0": "host"})
        status, y = await cluster.get("/v1/lora_adapters/y")
        assert status == 200 and (y["copies"], y["engines"]) == (["agent"], {})
        assert (await cluster.get("/v1/lora_adapters/z"))[0] == 404

    in_cluster(work, ScriptedEngine("e0"), adapters=(entry_of("x"), entry_of("y", digest="digest-on-agent")))


def test_the_command_shows_what_a_gateway_knows(capsys: pytest.CaptureFixture[str]) -> None:
    async def shown(cluster: GatewayCluster, *options: str) -> list[list[str]]:
        arguments = ("adapters", "--url", cluster.url, *options)
        assert await asyncio.to_thread(main, arguments) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    async def work(cluster: GatewayCluster) -> None:
        await cluster.complete(model="x")
        await cluster.state_read()
        heading = ["name", "level", "rank", "size", "engines", "files", "at"]
        x = ["x", "host", "8", "0.0", "MiB", "e0", "host", "-"]
        y = ["y", "disk", "8", "0.0", "MiB", "-", "agent"]
        z = ["z", "disk", "8", "0.0", "MiB", "-", "-", "failed,", "no", "such", "file"]
        *lines, summary = await shown(cluster)
        assert lines == [heading, x, y, z]
        assert (summary[:4], summary[-2:]) == (["3", "adapters;", "as", "of"], ["s", "ago"])
        *lines, summary = await shown(cluster, "--level", "host")
        assert lines == [heading, x] and summary[:4] == ["1", "of", "3", "adapters;"]

    in_cluster(
        work,
        ScriptedEngine("e0"),
        adapters=(
            entry_of("x"),
            entry_of("y", digest="digest-on-agent"),
            entry_of("z", state="failed", reason="no such file"),
        ),
    )


def test_changes_go_to_the_controller_with_an_administrators_key_only() -> None:
    async def post(cluster: GatewayCluster, key: str, path: str, **fields: object) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        async with cluster.session.post(cluster.url + path, json=fields, headers=headers) as response:
            return response.status

    async def work(cluster: GatewayCluster) -> None:
        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        assert await post(cluster, "user", load, lora_name="x", lora_path="/x") == 403
        assert await post(cluster, "cluster-key", load, lora_name="x", lora_path="/x") == 401
        assert await post(cluster, "cluster-key", "/v1/completions", prompt="x") == 401
        assert await post(cluster, "user", "/v1/completions", prompt="x") == 200
        fields = {"lora_name": "x", "lora_path": "/x", "load_inplace": True}
        assert await post(cluster, "admin", load, **fields) == 200
        assert await post(cluster, "admin", load, lora_name="x", pinned=True) == 200
        assert await post(cluster, "admin", unload, lora_name="x") == 200
        assert await post(cluster, "admin", load, lora_name="x") == 400
        assert cluster.controller.changes == [
            AdapterChange(action="load", name="x", path="/x", load_inplace=True),
            AdapterChange(action="pin", name="x", pinned=True),
            AdapterChange(action="unload", name="x"),
        ]

    in_cluster(work, ScriptedEngine("e0"), api_key=("user",), admin_key=("admin",))
