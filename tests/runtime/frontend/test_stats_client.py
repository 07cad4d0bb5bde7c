"""Statistics of an engine on request: one open question, a new answer in time or the latest."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.channel_client import OnDeath, OnMessage
from corun.runtime.engine.heartbeat import HangWatch
from corun.runtime.engine.messages import EngineLoad, EngineStats, Ready, ReportStats, ToEngine
from corun.runtime.errors import EngineDeadError
from corun.runtime.frontend.engine_watch import StatsClient

LONG_S = 60.0
NEW = EngineStats(num_steps=7)


class Asked:
    """An engine that answers when the test does."""

    num_heartbeats = 0
    hang_watch = HangWatch(limit_s=30.0)

    config = EngineConfig(model="none")

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.is_dead = False

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> Ready:
        raise NotImplementedError

    def send(self, message: ToEngine) -> None:
        if self.is_dead:
            raise EngineDeadError("gone")
        self.sent.append(message)

    async def close(self) -> None:
        raise NotImplementedError


Test = Callable[[StatsClient, Asked], Awaitable[None]]


def run(test: Test) -> None:
    async def body() -> None:
        engine = Asked()
        await test(StatsClient(engine), engine)

    asyncio.run(body())


def test_two_ask_once_and_both_are_answered() -> None:
    async def test(stats: StatsClient, engine: Asked) -> None:
        waiting = [asyncio.create_task(stats.refresh(LONG_S)) for _ in range(2)]
        await asyncio.sleep(0)
        assert engine.sent == [ReportStats()]
        stats.apply(NEW)
        assert await asyncio.gather(*waiting) == [NEW, NEW]
        again = asyncio.create_task(stats.refresh(LONG_S))
        await asyncio.sleep(0)
        assert engine.sent == [ReportStats()] * 2
        stats.apply(EngineStats())
        assert await again == EngineStats()

    run(test)


def test_who_asks_for_the_next_time_waits_for_nothing() -> None:
    async def test(stats: StatsClient, engine: Asked) -> None:
        stats.ask()
        stats.ask()
        assert engine.sent == [ReportStats()]
        stats.apply(NEW)
        assert stats.latest == NEW
        engine.is_dead = True
        stats.ask()

    run(test)


def test_a_busy_engine_is_not_asked_again() -> None:
    async def test(stats: StatsClient, engine: Asked) -> None:
        stats.apply(NEW)
        for _ in range(3):
            assert await stats.refresh(0.001) == NEW
        assert engine.sent == [ReportStats()]
        stats.apply(EngineStats())
        assert stats.latest == EngineStats()
        assert await stats.refresh(0.001) == EngineStats()
        assert engine.sent == [ReportStats()] * 2

    run(test)


def test_the_load_comes_with_each_turn_and_the_rest_stays() -> None:
    async def test(stats: StatsClient, engine: Asked) -> None:
        stats.apply(NEW)
        age_s = stats.age_s
        stats.apply_load(EngineLoad(num_waiting=3, num_running=2, kv_blocks_used=5))
        assert stats.latest == EngineStats(num_steps=7, num_waiting=3, num_running=2, kv_blocks_used=5)
        assert stats.age_s >= age_s  # it is that of the oldest
        stats.apply(NEW)
        assert stats.latest == NEW

    run(test)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_dead_engine_holds_nobody_up(is_known: bool) -> None:
    async def test(stats: StatsClient, engine: Asked) -> None:
        stats.apply(NEW)
        engine.is_dead = is_known
        waiting = asyncio.create_task(stats.refresh(LONG_S))
        await asyncio.sleep(0)
        stats.stop_waiting()
        assert await waiting == NEW

    run(test)
