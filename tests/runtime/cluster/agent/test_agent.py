"""An agent with bare engines, as its controller and gateways see it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web
from corun.runtime.cluster.agent import report
from corun.runtime.cluster.agent.run import run_agent
from corun.runtime.cluster.division import EngineShare, MachineDivision
from corun.runtime.cluster.http.calls import call, make_session
from corun.runtime.cluster.http.serving import cluster_key_check, make_app, struct_response
from corun.runtime.cluster.launch.launcher import DRAINING, READY
from corun.runtime.cluster.settings import AgentSettings
from corun.runtime.cluster.wire import (
    AGENT_CHECK_PATH,
    AGENT_END_PATH,
    AGENT_ENGINES_PATH,
    AGENT_ENSURE_PATH,
    AGENT_JOIN_PATH,
    AGENT_PIN_PATH,
    AGENT_UNLOAD_PATH,
    AGENTS_PATH,
    AdapterEntry,
    AgentOrders,
    AgentReport,
    CheckAdapter,
    CheckedAdapter,
    EndAgent,
    EngineChange,
    EngineStatus,
    Ensure,
    Ensured,
    Join,
    Pin,
    Unload,
)
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.server.errors import HttpError
from support.adapter_files import CONFIG, write_adapter
from support.agents import KEY, serving
from support.launching import BARE_ENGINE, DEADLINE_S, received_by


class Controlled:
    """An agent, and the controller that it reports to."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.orders = AgentOrders()
        self.is_away = False
        self.report: AgentReport | None = None
        self._heard = asyncio.Event()

    async def on_report(self, request: web.Request) -> web.StreamResponse:
        """Answer a report with orders."""
        if self.is_away:
            raise HttpError(503, "away", code="away")
        self.report = msgspec.json.decode(await request.read(), type=AgentReport)
        self._heard.set()
        return struct_response(self.orders)

    async def reported(self, condition: Callable[[AgentReport], bool]) -> AgentReport:
        """Return the first report that fits."""
        async with asyncio.timeout(DEADLINE_S):
            while self.report is None or not condition(self.report):
                self._heard.clear()
                await self._heard.wait()
        return self.report

    async def ask(self, path: str, body: msgspec.Struct, kind: Any) -> Any:
        """Call the agent; return its answer."""
        assert self.report is not None
        return await call(self.session, self.report.url + path, body, kind, timeout_s=DEADLINE_S)

    async def engine(self, engine_id: str = "m-0") -> EngineStatus:
        """Return an engine that is ready."""
        report = await self.reported(lambda report: _state(report, engine_id) == READY)
        (engine,) = (one for one in report.engines if one.engine_id == engine_id)
        return engine

    async def ensure(self, entry: AdapterEntry, engine_id: str = "m-0") -> Ensured:
        """Have an engine serve it."""
        answer = await self.ask(AGENT_ENSURE_PATH, Ensure(engine_id=engine_id, adapter=entry), Ensured)
        assert isinstance(answer, Ensured)
        return answer

    async def loaded(self, engine_id: str = "m-0") -> dict[str, Any]:
        """Return the adapters of an engine, by name."""
        url = (await self.engine(engine_id)).url
        found = (await asyncio.to_thread(received_by, url))["adapters"]
        assert isinstance(found, dict)
        return found


def _state(report: AgentReport, engine_id: str) -> str | None:
    return next((one.state for one in report.engines if one.engine_id == engine_id), None)


def with_agent(
    path: Path,
    work: Callable[[Controlled], Awaitable[None]],
    *,
    num_engines: int = 1,
    cache_bytes: int = 1 << 30,
    engine: EngineConfig | None = None,
    run_id: str = "run",
) -> int | None:
    """Call ``work`` with a running agent, end it, and return its exit status."""

    async def run() -> int | None:
        async with _controller() as (controlled, url):
            stop = asyncio.Event()
            settings = AgentSettings(
                cluster_key=KEY,
                agent_id="m",
                controller_url=url,
                host="127.0.0.1",
                port=0,
                state_dir=str(path / "state"),
                division=MachineDivision((EngineShare(num_threads=1),) * num_engines, ()),
                adapter_cache_bytes=cache_bytes,
                engine=engine or EngineConfig(model="m"),
                serve=ServeConfig(drain_timeout_s=2.0),
                engine_command=BARE_ENGINE,
                run_id=run_id,
            )
            agent = asyncio.ensure_future(run_agent(settings, stop))
            working = asyncio.ensure_future(work(controlled))
            try:
                await asyncio.wait({agent, working}, return_when=asyncio.FIRST_COMPLETED)
                if not agent.done():
                    await working
            finally:
                working.cancel()
                stop.set()
                await agent
            return agent.result()

    return asyncio.run(run())


@contextlib.asynccontextmanager
async def _controller() -> AsyncIterator[tuple[Controlled, str]]:
    async with make_session(KEY) as session:
        controlled = Controlled(session)
        app = make_app(cluster_key_check(KEY), [web.post(AGENTS_PATH, controlled.on_report)])
        async with serving(app) as url:
            yield controlled, url


async def checked(
    agent: Controlled, source: Path, *, name: str = "x", revision: int = 1, pinned: bool = False
) -> AdapterEntry:
    """Return an entry for a directory that the agent has checked."""
    found = await agent.ask(AGENT_CHECK_PATH, CheckAdapter(path=str(source)), CheckedAdapter)
    return AdapterEntry(
        name=name,
        revision=revision,
        digest=found.digest,
        rank=found.rank,
        num_bytes=found.num_bytes,
        source=str(source),
        pinned=pinned,
    )


def test_a_name_goes_up_in_revisions_and_never_back(tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / name, seed=i) for i, name in enumerate("ab"))

    async def work(agent: Controlled) -> None:
        await agent.engine()
        old = await checked(agent, first)
        assert old.rank == 8 and old.num_bytes > 4096
        ensured = await agent.ensure(old)
        assert ensured.revision == 1
        served = (await agent.loaded())["x"]
        assert served["lora_path"] == str(tmp_path / "state/agent/adapters" / old.digest)
        assert served["load_inplace"]
        new = await checked(agent, second, revision=3, pinned=True)
        assert (await agent.ensure(new)).revision == 3
        assert await agent.ensure(old) == await agent.ensure(new)  # from an old table
        assert (await agent.loaded())["x"]["pinned"]
        await agent.ask(AGENT_PIN_PATH, Pin(name="x", pinned=False), Pin)
        assert not (await agent.loaded())["x"]["pinned"]
        await agent.ask(AGENT_UNLOAD_PATH, Unload(name="x", revision=3), Unload)
        assert "x" in await agent.loaded()  # the unload is older than the load
        await agent.ask(AGENT_UNLOAD_PATH, Unload(name="x", revision=4), Unload)
        assert await agent.loaded() == {}
        with pytest.raises(HttpError, match="'x' is unloaded") as caught:
            await agent.ensure(new)
        assert caught.value.status == 404
        again = msgspec.structs.replace(old, revision=5)
        assert (await agent.ensure(again)).revision == 5

    assert with_agent(tmp_path, work) is None


def test_refusals_name_what_the_user_knows(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a")
    (source / CONFIG).write_text(
        '{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["refuse"]}'
    )

    async def work(agent: Controlled) -> None:
        await agent.engine()
        entry = await checked(agent, source)
        with pytest.raises(HttpError, match=f"{source} does not fit") as caught:
            await agent.ensure(entry)
        assert caught.value.status == 400
        with pytest.raises(HttpError, match="no such adapter directory: /nowhere") as caught:
            await checked(agent, Path("/nowhere"))
        assert (caught.value.status, caught.value.code) == (400, "adapter_refused")
        path = msgspec.structs.replace(entry, digest="../../etc")
        with pytest.raises(HttpError, match="is no digest") as caught:
            await agent.ensure(path)
        assert caught.value.status == 400
        with pytest.raises(HttpError, match="engine 'other' is not ready") as caught:
            await agent.ensure(entry, "other")
        assert caught.value.status == 503
        change = EngineChange(action="drain", engine_id="other")
        with pytest.raises(HttpError, match="no engine 'other'") as caught:
            await agent.ask(AGENT_ENGINES_PATH, change, AgentReport)
        assert caught.value.status == 404

    with_agent(tmp_path, work)


def test_an_engine_that_ends_is_started_again_and_serves_nothing_yet(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a")

    async def work(agent: Controlled) -> None:
        before = await agent.engine()
        entry = await checked(agent, source)
        first = await agent.ensure(entry)
        os.kill(before.pid, signal.SIGKILL)
        await agent.reported(lambda report: report.engines[0].state != READY)
        after = await agent.engine()
        assert (after.num_restarts, after.url != before.url) == (1, True)
        assert await agent.loaded() == {}
        second = await agent.ensure(entry)
        assert second.incarnation != first.incarnation
        assert set(await agent.loaded()) == {"x"}

    with_agent(tmp_path, work)


def test_engines_come_and_go_by_command(tmp_path: Path) -> None:
    async def work(agent: Controlled) -> None:
        await agent.engine()
        add = EngineChange(action="add", num_engines=2)
        await agent.ask(AGENT_ENGINES_PATH, add, AgentReport)
        await agent.engine("m-2")
        drain = EngineChange(action="drain", engine_id="m-0")
        answer = await agent.ask(AGENT_ENGINES_PATH, drain, AgentReport)
        assert _state(answer, "m-0") in (READY, DRAINING)
        await agent.reported(lambda report: _state(report, "m-0") is None)
        await agent.engine("m-1")
        report = await agent.reported(lambda report: len(report.engines) == 2)
        assert [one.num_restarts for one in report.engines] == [0, 0]
        with pytest.raises(HttpError, match="action must be"):
            await agent.ask(AGENT_ENGINES_PATH, EngineChange(action="x"), AgentReport)

    with_agent(tmp_path, work)


async def use(agent: Controlled, engine: EngineStatus, name: str, *, used: bool) -> None:
    """Let requests for a name run, or end."""
    body = {"lora_name": name, "used": used}
    async with agent.session.post(f"{engine.url}/use", json=body):
        pass


def test_content_leaves_engines_before_it_leaves_the_store(tmp_path: Path) -> None:
    sources = [write_adapter(tmp_path / str(i), num_bytes=8192, seed=i) for i in range(3)]

    async def work(agent: Controlled) -> None:
        engine = await agent.engine()
        entries = []
        for number, source in enumerate(sources[:2]):
            entries.append(await checked(agent, source, name=f"n{number}"))
            await agent.ensure(entries[-1])
        await use(agent, engine, "n0", used=True)
        third = await checked(agent, sources[2], name="n2")
        await agent.ensure(third)
        assert set(await agent.loaded()) == {"n0", "n2"}  # n1 was used later, but is not in use
        report = await agent.reported(lambda report: third.digest in report.copies)
        assert set(report.copies) == {entries[0].digest, third.digest}
        agent.orders = AgentOrders(keep=(entries[0].digest, third.digest))
        await agent.reported(lambda report: set(report.keeps) == set(agent.orders.keep))
        with pytest.raises(HttpError, match="2 of 2 adapters must stay") as caught:
            await checked(agent, sources[1], name="n1")
        assert (caught.value.status, caught.value.code) == (507, "store_full")

        agent.orders = AgentOrders()
        await agent.reported(lambda report: not report.keeps)
        await agent.ask(AGENT_UNLOAD_PATH, Unload(name="n0", revision=2), Unload)
        await checked(
            agent, sources[1], name="n1"
        )  # the former content of n0 is in use until its requests end
        report = await agent.reported(lambda report: entries[1].digest in report.copies)
        assert set(report.copies) == {entries[0].digest, entries[1].digest}
        await use(agent, engine, "n0", used=False)
        await agent.reported(lambda report: not report.keeps)
        await checked(agent, sources[2], name="n2")
        report = await agent.reported(lambda report: third.digest in report.copies)
        assert set(report.copies) == {entries[1].digest, third.digest}

    size = sum(path.stat().st_size for path in sources[0].iterdir())
    with_agent(tmp_path, work, cache_bytes=2 * size + 100)


def test_without_its_controller_an_agent_goes_on(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a")

    async def work(agent: Controlled) -> None:
        await agent.engine()
        agent.is_away = True
        entry = await checked(agent, source)
        assert (await agent.ensure(entry)).revision == 1
        agent.is_away = False
        await agent.reported(lambda report: entry.digest in report.copies)

    with_agent(tmp_path, work)


def test_what_an_agent_had_is_there_after_its_end(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a")

    async def fill(agent: Controlled) -> None:
        await agent.engine()
        await checked(agent, source)

    async def look(agent: Controlled) -> None:
        await agent.engine()
        report = await agent.reported(lambda report: bool(report.copies))
        entry = AdapterEntry(
            name="x", revision=1, digest=next(iter(report.copies)), rank=8, num_bytes=0, source="/nowhere"
        )
        await agent.ensure(entry)

    with_agent(tmp_path, fill)
    with_agent(tmp_path, look)


def test_an_agent_that_died_has_the_engines_that_there_were(tmp_path: Path) -> None:
    async def change(agent: Controlled) -> None:
        await agent.engine()
        await agent.ask(AGENT_ENGINES_PATH, EngineChange(action="add"), AgentReport)
        drain = EngineChange(action="drain", engine_id="m-0")
        await agent.ask(AGENT_ENGINES_PATH, drain, AgentReport)

    async def look(agent: Controlled) -> None:
        await agent.engine("m-1")
        await agent.ask(AGENT_ENGINES_PATH, EngineChange(action="add"), AgentReport)
        report = await agent.reported(lambda report: len(report.engines) == 2)
        assert [one.engine_id for one in report.engines] == ["m-1", "m-2"]

    async def restart(agent: Controlled) -> None:
        await agent.engine("m-0")
        assert agent.report is not None and len(agent.report.engines) == 1

    with_agent(tmp_path, change)
    with_agent(tmp_path, look)
    with_agent(tmp_path, restart, run_id="another")


def test_engines_that_cannot_begin_end_the_agent(tmp_path: Path) -> None:
    async def work(agent: Controlled) -> None:
        await asyncio.sleep(DEADLINE_S)

    engine = EngineConfig(model="m", seed=13)
    assert with_agent(tmp_path, work, num_engines=2, engine=engine) == 2


def test_another_controller_is_followed_once_its_own_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_EVERY_S", 0.1)
    monkeypatch.setattr(report, "_LED_S", 1.0)

    async def work(controlled: Controlled) -> None:
        await controlled.engine()
        async with _controller() as (other, url):
            with pytest.raises(HttpError, match="which answers"):
                await controlled.ask(AGENT_JOIN_PATH, Join(controller_url=url), Join)
            controlled.is_away = True
            async with asyncio.timeout(DEADLINE_S):
                while other.report is None:
                    with contextlib.suppress(HttpError):
                        await controlled.ask(AGENT_JOIN_PATH, Join(controller_url=url), Join)
                    await asyncio.sleep(0.1)
            assert other.report.agent_id == "m"

    with_agent(tmp_path, work)


def test_it_ends_in_order_on_request(tmp_path: Path) -> None:
    async def work(controlled: Controlled) -> None:
        pid = (await controlled.engine()).pid
        with pytest.raises(HttpError, match="this is agent m"):
            await controlled.ask(AGENT_END_PATH, EndAgent(agent_id="n"), EndAgent)
        await controlled.ask(AGENT_END_PATH, EndAgent(agent_id="m"), EndAgent)
        async with asyncio.timeout(DEADLINE_S):
            while Path(f"/proc/{pid}").exists():
                await asyncio.sleep(0.02)

    assert with_agent(tmp_path, work) is None
