"""An engine that hangs, in a process and in a thread: noticed, ready again, or given up."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.channel_client import ChannelClient
from corun.runtime.engine.client import ProcessClient, ThreadClient
from corun.runtime.engine.messages import AddRequest, AddRequests, FromEngine, StepOutputs
from corun.runtime.errors import EngineDeadError, EngineHungError
from corun.runtime.sampling import SamplingParams
from support.fake_core import COPYING, FACTORY, LAYER_S, LAYERS, NUM_LAYERS, SILENT, STUCK, UNSTUCK

TIMEOUT_S = 30.0
SHORT_S = 0.4  # a limit for engines that hang
LONG_S = NUM_LAYERS * LAYER_S / 1.5  # one that a step exceeds, and none of its layers

both = pytest.mark.parametrize("kind", [ProcessClient, ThreadClient])


@pytest.fixture(autouse=True)
def _factory_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Threads that were given up end as soon as their step returns."""
    before = set(threading.enumerate())
    UNSTUCK.clear()
    yield
    UNSTUCK.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


class Session:
    """A client with what it has received, and whether its engine has ever counted as hung."""

    def __init__(self, client: ChannelClient) -> None:
        self.client = client
        self.deaths: list[EngineDeadError] = []
        self.ended: set[int] = set()
        self.hangs: list[str] = []

    def take(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self.ended |= {one.request_id for one in message.updates if one.finish_reason}

    def ask(self, text: str) -> None:
        params = SamplingParams(seed=1, max_tokens=1)
        self.client.send(AddRequests((AddRequest(1, tuple(text.encode()), params),)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                reason = self.client.hang_watch.reason
                if reason is not None:
                    self.hangs.append(reason)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def session(kind: Callable[..., ChannelClient], limit_s: float) -> AsyncIterator[Session]:
    config = EngineConfig(model="fake", engine_hang_s=limit_s)
    one = Session(kind(config, factory=FACTORY))
    await one.client.start(one.take, one.deaths.append)
    try:
        yield one
    finally:
        async with asyncio.timeout(TIMEOUT_S):
            await one.client.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def pid_of(one: Session) -> int:
    assert isinstance(one.client, ProcessClient) and one.client.pid is not None
    return one.client.pid


@both
@pytest.mark.parametrize("text", [STUCK, COPYING])
def test_an_engine_that_waits_for_ever_is_given_up(
    kind: Callable[..., ChannelClient], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with session(kind, SHORT_S) as one:
            one.ask(text)
            await one.until(lambda: bool(one.deaths))
            assert one.hangs and "has made no progress" in one.hangs[0]
            (death,) = one.deaths
            assert isinstance(death, EngineHungError) and "--engine-hang-s" in str(death)
            with pytest.raises(EngineDeadError, match="no progress"):
                one.ask("more")
            if kind is ProcessClient:
                assert not psutil.pid_exists(pid_of(one))

    run(test)
    said = [one for one in caplog.records if "progress" in one.message]
    levels = [one.levelname for one in said]
    # On a busy machine it may make progress again meanwhile, which is said too.
    assert levels[levels.index("ERROR") - 1] == "WARNING", levels
    assert all("engine" in one.message for one in said)


def test_the_log_has_the_stack_of_the_thread_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with session(ThreadClient, SHORT_S) as one:
            one.ask(STUCK)
            await one.until(lambda: bool(one.deaths))

    run(test)
    assert "in _advance" in caplog.text


def test_the_log_has_the_stacks_of_the_process_that_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with session(ProcessClient, SHORT_S) as one:
            one.ask(STUCK)
            await one.until(lambda: bool(one.deaths))

    run(test)
    assert "in _advance" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", SILENT], ids=["idle", "waiting"])
def test_a_stopped_process_is_given_up_with_and_without_requests(text: str) -> None:
    async def test() -> None:
        async with session(ProcessClient, SHORT_S) as one:
            if text:
                one.ask(text)
            os.kill(pid_of(one), signal.SIGSTOP)
            await one.until(lambda: bool(one.deaths))
            assert "no heartbeat" in one.hangs[-1]
            assert isinstance(one.deaths[0], EngineHungError)
            assert not psutil.pid_exists(pid_of(one))

    run(test)


def test_a_process_that_goes_on_in_time_is_ready_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def test() -> None:
        async with session(ProcessClient, limit_s=2.0) as one:
            os.kill(pid_of(one), signal.SIGSTOP)
            await one.until(lambda: one.client.hang_watch.reason is not None)
            assert one.client.hang_watch.stalled_s >= 2.0
            os.kill(pid_of(one), signal.SIGCONT)
            await one.until(lambda: one.client.hang_watch.reason is None)
            assert one.client.hang_watch.stalled_s < 2.0
            one.ask("x")
            await one.until(lambda: 1 in one.ended)
            assert not one.deaths

    run(test)
    assert "makes progress again" in caplog.text


@both
@pytest.mark.parametrize("text", [LAYERS, SILENT])
def test_a_long_step_with_progress_and_rest_are_no_hang(
    kind: Callable[..., ChannelClient], text: str
) -> None:
    async def test() -> None:
        async with session(kind, LONG_S) as one:
            one.ask(text)
            if text == LAYERS:
                await one.until(lambda: 1 in one.ended)
            else:
                until_s = asyncio.get_running_loop().time() + 2 * LONG_S
                await one.until(lambda: asyncio.get_running_loop().time() >= until_s)
            assert one.hangs == [] and one.deaths == []

    run(test)
