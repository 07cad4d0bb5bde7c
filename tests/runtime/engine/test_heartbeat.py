"""The heartbeat of an engine continues while a step computes, and stops with its process.

Beside it the engine's thread publishes its progress.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.channel_client import ChannelClient
from corun.runtime.engine.client import ProcessClient, ThreadClient
from corun.runtime.engine.heartbeat import (
    BEAT_INTERVAL_S,
    Heartbeat,
    LoopActivity,
    beating,
    open_heartbeat_file,
)
from corun.runtime.engine.messages import AddRequest, AddRequests, FromEngine
from corun.runtime.errors import EngineDeadError
from corun.runtime.sampling import SamplingParams
from support.fake_core import FACTORY, LONG

TIMEOUT_S = 20.0


def test_two_processes_share_the_number_of_a_file() -> None:
    with open_heartbeat_file() as file:
        counts, looks = Heartbeat(file.fileno()), Heartbeat(file.fileno())
    assert looks.num_beats == 0
    counts.beat()
    counts.beat()
    assert looks.num_beats == 2


def test_the_reader_sees_turns_layers_and_compilations() -> None:
    with open_heartbeat_file() as file:
        engine, reader = Heartbeat(file.fileno()), Heartbeat(file.fileno())
    assert reader.signs() == (0, 0, LoopActivity.RESTING, 0, 0, 0)
    engine.begin_turn()
    engine.begin_layer(0)
    engine.advance()
    engine.begin_layer(1)
    assert reader.signs() == (0, 3, LoopActivity.WORKING, 1, 2, 0)
    engine.end_turn(7)
    engine.begin_turn()
    assert reader.signs() == (0, 10, LoopActivity.WORKING, 2, 0, 0)
    engine.rest()
    assert reader.signs().activity is LoopActivity.RESTING


def test_a_compilation_inside_another_one_does_not_end_it() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin_turn()
    heartbeat.begin_compilation()
    heartbeat.begin_compilation()
    heartbeat.end_compilation()
    signs = heartbeat.signs()
    assert signs.activity is LoopActivity.COMPILING and (signs.num_advances, signs.num_kernels) == (3, 1)
    heartbeat.end_compilation()
    assert heartbeat.signs().activity is LoopActivity.WORKING
    assert heartbeat.signs().num_kernels == 2


def test_nobody_beats_any_more_when_it_has_ended() -> None:
    heartbeat, before = Heartbeat(), set(threading.enumerate())
    with beating(heartbeat):
        deadline_s = time.monotonic() + TIMEOUT_S
        while heartbeat.num_beats < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("kind", [ProcessClient, ThreadClient])
def test_a_long_step_does_not_stop_it(
    kind: Callable[..., ChannelClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    async def run() -> None:
        client = kind(EngineConfig(model="fake"), factory=FACTORY)
        assert client.num_heartbeats == 0
        told: list[FromEngine] = []
        await client.start(told.append, lambda error: None)
        try:
            told.clear()
            request = AddRequest(1, tuple(LONG.encode()), SamplingParams(seed=1, max_tokens=1))
            client.send(AddRequests((request,)))
            before = client.num_heartbeats
            await _until(lambda: client.num_heartbeats > before + 1 or bool(told))
            assert not told, "the step has ended"
            await _until(lambda: bool(told))
        finally:
            await client.close()

    asyncio.run(run())


def test_a_stopped_process_has_none_and_goes_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    async def run() -> None:
        client = ProcessClient(EngineConfig(model="fake"), factory=FACTORY)
        deaths: list[EngineDeadError] = []
        await client.start(lambda message: None, deaths.append)
        try:
            assert client.pid is not None
            await _until(lambda: client.num_heartbeats > 0)
            os.kill(client.pid, signal.SIGSTOP)
            # Until it has reached all threads.
            os.waitid(os.P_PID, client.pid, os.WSTOPPED | os.WNOWAIT)
            stopped_at = client.num_heartbeats
            await asyncio.sleep(4 * BEAT_INTERVAL_S)
            assert client.num_heartbeats == stopped_at
            assert not deaths
            os.kill(client.pid, signal.SIGCONT)
            await _until(lambda: client.num_heartbeats > stopped_at)
        finally:
            await client.close()

    asyncio.run(run())


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)
