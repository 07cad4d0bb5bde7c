"""The heartbeat of an engine continues while a step computes, and says whether the engine hangs.

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
    COMPILE_S,
    LOST_AFTER,
    HangState,
    HangWatch,
    Heartbeat,
    LoopActivity,
    Signs,
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


LIMIT_S = 30.0
WORKING, RESTING, COMPILING = LoopActivity.WORKING, LoopActivity.RESTING, LoopActivity.COMPILING


class Looks:
    """An engine's signs as a watch sees them, once a second."""

    def __init__(self) -> None:
        self.watch = HangWatch(LIMIT_S)
        self._now_s = 1000.0
        self._signs = Signs(0, 0, RESTING, 0, 0, 0)
        self.watch.look(self._signs, self._now_s)

    def go(
        self,
        duration_s: float,
        activity: LoopActivity,
        *,
        beats: bool = True,
        advances: bool = False,
        step_s: float = 1.0,
    ) -> set[HangState]:
        """Look until ``duration_s`` has passed; return the states that were seen."""
        states = set()
        for _ in range(round(duration_s / step_s)):
            self._now_s += step_s
            signs = self._signs
            self._signs = signs._replace(
                num_beats=signs.num_beats + beats,
                num_advances=signs.num_advances + advances,
                activity=activity,
            )
            self.watch.look(self._signs, self._now_s)
            states.add(self.watch.state)
        return states


def test_work_without_progress_is_a_stall_at_the_limit_and_lost_at_four_times_of_it() -> None:
    looks = Looks()
    assert looks.go(LIMIT_S - 1, WORKING) == {HangState.MOVING}
    assert looks.go(1, WORKING) == {HangState.STALLED}
    assert looks.watch.stalled_s == LIMIT_S
    assert looks.go((LOST_AFTER - 1) * LIMIT_S - 1, WORKING) == {HangState.STALLED}
    assert looks.go(1, WORKING) == {HangState.LOST}
    assert looks.watch.lost_s == looks.watch.stalled_s == LOST_AFTER * LIMIT_S


def test_any_progress_ends_a_stall() -> None:
    looks = Looks()
    looks.go(2 * LIMIT_S, WORKING)
    assert looks.watch.state is HangState.STALLED
    assert looks.go(1, WORKING, advances=True) == {HangState.MOVING}
    assert looks.watch.stalled_s == 0
    assert looks.go(LIMIT_S - 1, WORKING) == {HangState.MOVING}


def test_rest_is_no_stall_and_ends_one() -> None:
    looks = Looks()
    assert looks.go(100 * LIMIT_S, RESTING) == {HangState.MOVING}
    looks.go(LIMIT_S, WORKING)
    assert looks.go(1, RESTING) == {HangState.MOVING}


def test_a_step_of_any_length_with_progress_is_no_stall() -> None:
    looks = Looks()
    for _ in range(20):
        assert looks.go(LIMIT_S - 1, WORKING) == {HangState.MOVING}
        assert looks.go(1, WORKING, advances=True) == {HangState.MOVING}


def test_one_kernel_may_be_compiled_for_ten_minutes() -> None:
    looks = Looks()
    looks.go(1, WORKING, advances=True)
    assert looks.go(COMPILE_S + LIMIT_S - 1, COMPILING) == {HangState.MOVING}
    assert looks.go(1, COMPILING) == {HangState.STALLED}
    assert "compiler" in looks.watch.describe()


@pytest.mark.parametrize("activity", list(LoopActivity))
def test_a_process_without_heartbeats_is_stalled_with_and_without_work(activity: LoopActivity) -> None:
    looks = Looks()
    assert looks.go(LIMIT_S - 1, activity, beats=False) == {HangState.MOVING}
    assert HangState.STALLED in looks.go(2, activity, beats=False)
    assert "no heartbeat" in looks.watch.describe()
    assert HangState.LOST in looks.go(LOST_AFTER * LIMIT_S, activity, beats=False)


def test_a_stopped_process_that_goes_on_is_ready_again() -> None:
    looks = Looks()
    looks.go(2 * LIMIT_S, RESTING, beats=False)
    assert looks.watch.state is HangState.STALLED
    assert looks.go(1, RESTING) == {HangState.MOVING}


def test_a_stop_below_the_limit_is_no_stall() -> None:
    looks = Looks()
    looks.go(1, WORKING, advances=True)
    assert looks.go(LIMIT_S - 2, WORKING, beats=False) == {HangState.MOVING}
    assert looks.go(1, WORKING, advances=True) == {HangState.MOVING}


def test_progress_counts_as_a_heartbeat() -> None:
    looks = Looks()
    assert looks.go(2 * LIMIT_S, WORKING, beats=False, advances=True) == {HangState.MOVING}


def test_the_time_in_which_the_watch_itself_was_stopped_does_not_count() -> None:
    looks = Looks()
    looks.go(1, WORKING, advances=True)
    assert looks.go(3600, WORKING, beats=False, step_s=3600) == {HangState.MOVING}
    assert looks.watch.stalled_s <= 2


def test_a_heartbeat_that_is_due_is_not_missing() -> None:
    watch = HangWatch(0.2)
    for number in range(100):
        # The watch looks much more often than the heart beats.
        watch.look(Signs(number // 12, 0, RESTING, 0, 0, 0), number * watch.interval_s)
        assert watch.state is HangState.MOVING


def test_the_reason_says_where_the_engine_stands() -> None:
    watch = HangWatch(LIMIT_S)
    watch.look(Signs(0, 5, WORKING, 12, 7, 0), 0.0)
    for second in range(1, 31):
        watch.look(Signs(second, 5, WORKING, 12, 7, 0), float(second))
    assert watch.describe() == (
        "the engine has made no progress for 30 s in turn 12, layer 7 of the pass: a kernel, a "
        "copy or a call of the driver does not return"
    )
