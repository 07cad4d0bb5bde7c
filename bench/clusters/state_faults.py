"""The controller dies, adapters are replaced, and peers serve wrong files."""

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from corun.runtime.cluster.http.calls import call
from corun.runtime.cluster.http.serving import cluster_key_check, make_app, serve_app
from corun.runtime.cluster.wire import AGENT_FILES_PATH, ENSURE_PATH, AgentReport, Ensure, Ensured
from corun.runtime.server.listening import bind, url_of
from corun.runtime.tasks import cancel_all
from support.latency_engine import save_tiny_adapter

from .engine_faults import RATE_RPS, Figures
from .live import KEY, LiveCluster, until
from .streams import OK, body_maker, load_of

_NUM_RELOADS = 20
_LASTING_S = 31.0  # then it starts again at once, as after a first fault
_PEER_RANK = 2048  # a file of a few hundred kB
_WEIGHTS = "adapter_model.safetensors"


async def controller_kill(cluster: LiveCluster, names: Sequence[str], seed: int) -> Figures:
    """It restarts with adapters, copies and demand, and no request is affected."""
    if seed:
        await asyncio.sleep(_LASTING_S)
    async with load_of(cluster.url, RATE_RPS, body_maker(names), seed) as load:
        await asyncio.sleep(3.0)
        before, tokens = await cluster.status(), _demand(cluster)
        os.kill(cluster.pid_of("controller"), signal.SIGKILL)

        async def back() -> bool:
            after = await cluster.status()
            copies = {one.agent_id: set(one.copies) for one in after.agents}
            return (
                after.adapters == before.adapters
                and copies == {one.agent_id: set(one.copies) for one in before.agents}
                and {one.engine_id for one in after.engines} == {one.engine_id for one in before.engines}
                and _demand(cluster) >= tokens > 0
            )

        back_s = await until(back, 60.0)
        await asyncio.sleep(3.0)
    for one in load.bad():
        print(f"  {one}", flush=True)
    return {"streams": len(load.outcomes), "failed": len(load.bad()), "back s": back_s}


async def rolling_reloads(
    cluster: LiveCluster, contents: Sequence[Path], answers: Sequence[str], body: dict[str, Any]
) -> Figures:
    """A name gets other content, 20 times; requests after the status 200 get the newest."""
    changed: list[tuple[float, str]] = []  # start time and text of each correct answer
    name = body["model"]
    await cluster.load(name, contents[0], inplace=True)
    changed.append((time.monotonic(), answers[0]))
    async with load_of(cluster.url, RATE_RPS, lambda _: body, 0) as load:
        for number in range(1, _NUM_RELOADS + 1):
            await asyncio.sleep(0.5)
            which = number % len(contents)
            await cluster.load(name, contents[which], inplace=True)
            changed.append((time.monotonic(), answers[which]))
        await asyncio.sleep(1.0)
    old = wrong = 0
    for one in load.outcomes:
        if one.kind != OK:
            print(f"  {one}", flush=True)
            continue
        newest = [answer for from_s, answer in changed if from_s < one.started_s][-1:]
        later = [answer for from_s, answer in changed if from_s >= one.started_s]
        wrong += one.text not in answers
        # A change that was under way may be seen before its 200.
        old += one.text not in [*newest, *later]
    return {
        "streams": len(load.outcomes),
        "failed": len(load.bad()),
        "older content": old,
        "unknown content": wrong,
        "reloads": _NUM_RELOADS,
    }


async def bad_peers(cluster: LiveCluster, engine_id: str, folder: Path, seed: int) -> Figures:
    """A peer serves a wrong byte, hangs, or dies in mid-file: the next one is asked."""
    figures: Figures = {}
    for kind in ("wrong byte", "hangs", "dies"):
        name = f"peer-{kind.replace(' ', '-')}-{seed}"
        content = random.Random(name).getrandbits(30)
        source = save_tiny_adapter(folder / name, rank=_PEER_RANK, seed=content)
        await cluster.load(name, source)
        for path in source.iterdir():
            path.unlink()
        status = await cluster.status()
        (entry,) = [one for one in status.adapters if one.name == name]
        (good,) = [one for one in status.agents if entry.digest in one.copies]
        async with _bad_peer(cluster, kind, good.url, entry.digest) as asked:
            began_s = time.monotonic()
            url = cluster.plan.controller_url + ENSURE_PATH
            body = Ensure(engine_id=engine_id, adapter=entry)
            await call(cluster.session, url, body, Ensured, timeout_s=30.0)
            figures[f"{kind} s"] = time.monotonic() - began_s
            assert asked, "the bad peer received no request"
        digests = {
            digest
            for agent in (await cluster.status()).agents
            for digest in agent.copies
            if any(one.engine_id == engine_id for one in agent.engines)
        }
        figures[f"{kind}: without content"] = float(entry.digest not in digests)
    return figures


@contextlib.asynccontextmanager
async def _bad_peer(cluster: LiveCluster, kind: str, good_url: str, digest: str) -> AsyncIterator[list[str]]:
    """An agent that is asked first, and has wrong files. Yields what it was asked for."""
    asked: list[str] = []

    async def fetch(path: str) -> bytes:
        async with cluster.session.get(f"{good_url}{AGENT_FILES_PATH}/{path}") as response:
            return await response.read()

    async def manifest(request: web.Request) -> web.Response:
        return web.Response(body=await fetch(digest), content_type="application/json")

    async def file(request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        data = bytearray(await fetch(f"{digest}/{name}"))
        if name != _WEIGHTS:
            return web.Response(body=bytes(data))
        asked.append(name)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        if kind == "wrong byte":
            data[len(data) // 2] ^= 1
            await response.write(bytes(data))
            return response
        await response.write(bytes(data[: len(data) // 2]))
        if kind == "hangs":
            await asyncio.sleep(60.0)
        assert request.transport is not None
        request.transport.abort()
        return response

    routes = f"{AGENT_FILES_PATH}/{{digest}}"
    app = make_app(cluster_key_check(KEY), [web.get(routes, manifest), web.get(f"{routes}/{{file}}", file)])
    stop = asyncio.Event()
    with bind("127.0.0.1", 0) as sock:
        serving = asyncio.ensure_future(serve_app(app, sock, stop))
        report = AgentReport(
            agent_id="0-bad",
            url=url_of(sock),
            engines=(),
            copies={digest: 0.0},
            store_bytes=1,
            used_bytes=1,
            core_division="",
        )

        async def keep_reporting() -> None:
            while True:
                await cluster.report(report)
                await asyncio.sleep(0.3)

        await cluster.report(report)
        reporting = asyncio.ensure_future(keep_reporting())
        try:
            yield asked
        finally:
            await cancel_all(reporting)
            await cluster.report(_without_copies(report))
            stop.set()
            await serving


def _without_copies(report: AgentReport) -> AgentReport:
    return AgentReport(
        agent_id=report.agent_id,
        url=report.url,
        engines=(),
        copies={},
        store_bytes=1,
        used_bytes=0,
        core_division="",
    )


def _demand(cluster: LiveCluster) -> int:
    """Tokens that the registry has of the last day."""
    assert cluster.plan.controller is not None
    path = Path(cluster.plan.controller.state_dir) / "registry.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        found = db.execute("SELECT SUM(prompt_tokens + output_tokens) FROM demand").fetchone()
    return int(found[0] or 0)
