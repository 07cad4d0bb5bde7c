"""Both clients against a fake engine: real processes and threads, real death."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine import channel_client
from corun.runtime.engine.channel_client import ChannelClient
from corun.runtime.engine.client import ProcessClient, ThreadClient
from corun.runtime.engine.messages import AbortRequests, AddRequest, AddRequests, FromEngine, StepOutputs
from corun.runtime.engine.spawn import spawn_engine
from corun.runtime.errors import EngineDeadError, ModelError
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.events import RequestUpdate
from support import fake_core
from support.fake_core import EOS_ID, FACTORY
from support.processes import running_below

TESTS_DIR = Path(__file__).parents[2]
IDLE_S = 2.0
MAX_IDLE_SHARE = 0.05  # of one core; a busy wait takes all of it
MAX_DEATH_S = 10.0  # a hang is noticed much later


@pytest.fixture(autouse=True)
def _factory_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS_DIR))


class Session:
    """A started client with its messages."""

    def __init__(self, client: ChannelClient) -> None:
        self.client = client
        self.updates: list[RequestUpdate] = []
        self.deaths: list[EngineDeadError] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Session":
        self.ready = await self.client.start(self._take, self._die)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close()

    def ask(self, request_id: int, text: str, **sampling: Any) -> None:
        params = SamplingParams(seed=1, **sampling)
        self.client.send(AddRequests((AddRequest(request_id, tuple(text.encode()), params),)))

    async def wait(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def ended(self) -> set[int]:
        return {update.request_id for update in self.updates if update.finish_reason}

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self.updates += message.updates
        self._changed.set()

    def _die(self, error: EngineDeadError) -> None:
        self.deaths.append(error)
        self._changed.set()


def make_client(kind: str, model: str = "fake") -> ChannelClient:
    config = EngineConfig(model=model, max_num_waiting=8)
    if kind == "process":
        return ProcessClient(config, factory=FACTORY)
    return ThreadClient(config, factory=FACTORY)


both = pytest.mark.parametrize("kind", ["process", "thread"])


@both
def test_requests_run_side_by_side(kind: str) -> None:
    async def run() -> None:
        async with Session(make_client(kind)) as session:
            assert session.ready.model == fake_core.model_info("fake")
            for request_id in range(1, 9):
                session.ask(request_id, f"text {request_id}", max_tokens=50)
            await session.wait(lambda: len(session.ended()) == 8)
            tokens: dict[int, list[int]] = {}
            for update in session.updates:
                tokens.setdefault(update.request_id, []).extend(update.token_ids)
            for request_id, token_ids in tokens.items():
                assert token_ids == [*f"text {request_id}".encode(), EOS_ID]
        assert session.deaths == []

    asyncio.run(run())


def test_a_process_that_is_configured_is_not_configured_again() -> None:
    config = EngineConfig(model="fake", max_num_waiting=8)

    async def run() -> None:
        with contextlib.closing(spawn_engine(factory=FACTORY)) as spawned:
            spawned.configure(config)
            async with Session(ProcessClient(config, spawned=spawned)) as session:
                session.ask(1, "text", max_tokens=50)
                await session.wait(lambda: session.ended() == {1})
                assert session.deaths == []

    asyncio.run(run())


def test_a_process_that_has_ended_may_be_configured() -> None:
    config = EngineConfig(model="fake")

    async def run() -> None:
        with contextlib.closing(spawn_engine(factory="missing:factory")) as spawned:
            spawned.process.kill()
            spawned.process.wait(20)
            spawned.configure(config)
            with pytest.raises(EngineDeadError):
                async with Session(ProcessClient(config, spawned=spawned)):
                    pass

    asyncio.run(run())


@both
def test_a_long_start_goes_on_saying_what_it_does(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_client, "SILENCE_S", fake_core.SILENT_S / 5)
    caplog.set_level("INFO")

    async def run() -> None:
        async with Session(make_client(kind, fake_core.SILENT_MODEL)) as session:
            assert session.ready.model.name == "fake"

    asyncio.run(run())
    assert "still pretending to load (" in caplog.text


def test_a_silent_start_can_be_given_up() -> None:
    async def run() -> None:
        client = make_client("process", fake_core.SILENT_MODEL)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.start(lambda _: None, lambda _: None), 0.3)
        await client.close()

    asyncio.run(run())


@both
def test_uvloop_does_as_well(kind: str) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def run() -> None:
        async with Session(make_client(kind)) as session:
            session.ask(1, "text", max_tokens=50)
            await session.wait(lambda: session.ended() == {1})
            if kind == "process":
                os.kill(pid_of(session), signal.SIGKILL)
                await session.wait(lambda: bool(session.deaths), MAX_DEATH_S)
        assert_nothing_left(session.client)

    uvloop.run(run())


@both
def test_aborts_and_refusals_end_requests(kind: str) -> None:
    async def run() -> None:
        async with Session(make_client(kind)) as session:
            for request_id in range(1, 10):  # one more than may wait
                session.ask(request_id, fake_core.SILENT)
            await session.wait(lambda: session.ended() == {9})
            assert session.updates[-1].error_kind == "OverloadedError"
            session.client.send(AbortRequests((1, 3, 77)))
            await session.wait(lambda: session.ended() == {9, 1, 3})
            assert session.updates[-1].finish_reason == "abort"

    asyncio.run(run())


@both
def test_a_failed_request_leaves_the_engine_alone(kind: str) -> None:
    async def run() -> None:
        async with Session(make_client(kind)) as session:
            session.ask(1, fake_core.FAIL)
            session.ask(2, "fine")
            await session.wait(lambda: session.ended() == {1, 2})
            assert {update.error_kind for update in session.updates} == {None, "StepFailedError"}

    asyncio.run(run())


@both
@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (fake_core.FAILING_MODEL, ModelError, "cannot load"),
        (fake_core.BROKEN_MODEL, EngineDeadError, "ZeroDivisionError: a bug while loading"),
    ],
)
def test_a_failed_start_is_raised(kind: str, model: str, error: type[Exception], text: str) -> None:
    async def run() -> None:
        session = Session(make_client(kind, model))
        with pytest.raises(error, match=text):
            await session.__aenter__()
        assert session.deaths == []
        assert_nothing_left(session.client)

    asyncio.run(run())


@both
def test_a_crash_is_reported_once(kind: str) -> None:
    async def run() -> None:
        async with Session(make_client(kind)) as session:
            session.ask(1, fake_core.CRASH)
            await session.wait(lambda: bool(session.deaths))
            with pytest.raises(EngineDeadError):
                session.ask(2, "too late")
            assert_nothing_left(session.client)
        assert len(session.deaths) == 1
        if kind == "process":
            assert "exited with status 1" in str(session.deaths[0])

    asyncio.run(run())


@both
def test_close_is_idempotent_and_silent(kind: str) -> None:
    async def run() -> None:
        async with Session(make_client(kind)) as session:
            session.ask(1, fake_core.SILENT)
        await session.client.close()
        assert session.deaths == []
        assert_nothing_left(session.client)
        with pytest.raises(EngineDeadError):
            session.ask(2, "too late")

    asyncio.run(run())


@both
def test_a_start_can_be_cancelled(kind: str) -> None:
    async def run() -> None:
        session = Session(make_client(kind, fake_core.SLOW_MODEL))
        starting = asyncio.create_task(session.__aenter__())
        await asyncio.sleep(0.3)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert_nothing_left(session.client)

    asyncio.run(run())


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_process_is_noticed_and_reaped(sent: signal.Signals) -> None:
    async def run() -> None:
        async with Session(make_client("process")) as session:
            session.ask(1, fake_core.SILENT)
            session.ask(2, "some text", ignore_eos=True, max_tokens=4000)
            await session.wait(lambda: bool(session.updates))
            os.kill(pid_of(session), sent)
            await session.wait(lambda: bool(session.deaths), MAX_DEATH_S)
            assert f"was killed by {sent.name}" in str(session.deaths[0])
            assert_nothing_left(session.client)

    asyncio.run(run())


def test_the_process_ignores_signals_meant_for_the_group() -> None:
    async def run() -> None:
        async with Session(make_client("process")) as session:
            os.kill(pid_of(session), signal.SIGTERM)
            os.kill(pid_of(session), signal.SIGINT)
            session.ask(1, "still here", max_tokens=20)
            await session.wait(lambda: session.ended() == {1})

    asyncio.run(run())


def test_a_stuck_process_is_killed_on_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corun.runtime.engine.channel_client.EXIT_GRACE_S", 0.2)

    async def run() -> None:
        async with Session(make_client("process")) as session:
            os.kill(pid_of(session), signal.SIGSTOP)
        assert_nothing_left(session.client)

    asyncio.run(run())


def test_an_idle_process_uses_nothing() -> None:
    async def run() -> float:
        async with Session(make_client("process")) as session:
            session.ask(1, "warm up", max_tokens=5)
            session.ask(2, fake_core.SILENT)  # open, but waiting for its executor
            await session.wait(lambda: 1 in session.ended())
            process = psutil.Process(pid_of(session))
            before = process.cpu_times()
            await asyncio.sleep(IDLE_S)
            after = process.cpu_times()
            return (after.user + after.system) - (before.user + before.system)

    assert asyncio.run(run()) / IDLE_S <= MAX_IDLE_SHARE


def test_the_thread_changes_nothing_that_others_share() -> None:
    async def run() -> None:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        async with Session(make_client("thread")) as session:
            session.ask(1, "hello", max_tokens=9)
            await session.wait(lambda: session.ended() == {1})
            assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers

    asyncio.run(run())


def pid_of(session: Session) -> int:
    assert isinstance(session.client, ProcessClient)
    assert session.client.pid is not None
    return session.client.pid


def assert_nothing_left(client: ChannelClient) -> None:
    if isinstance(client, ProcessClient):
        assert client.pid is not None
        assert not psutil.pid_exists(client.pid)
        assert not running_below("corun.runtime.engine.process")
    else:
        import threading

        assert "corun-engine" not in {thread.name for thread in threading.enumerate()}
