"""The engine's loop, with a core without a model: where it sleeps, and until when."""

import selectors
import socket
import threading
import time
from typing import Any

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.channel import Channel
from corun.runtime.engine.heartbeat import Heartbeat, LoopActivity
from corun.runtime.engine.loop import EngineLoop
from corun.runtime.engine.messages import FromEngine, Shutdown, ToEngine
from corun.runtime.scheduler.events import RequestUpdate
from support.fake_core import FakeAssembly, FakeCore

_PATIENCE_S = 10.0  # before a loop that sleeps for ever is ended


class WakingCore(FakeCore):
    """Has a deadline, and shuts the loop down once it was woken."""

    def __init__(self, deadline_s: float | None, peer: Channel[FromEngine]) -> None:
        super().__init__(EngineConfig(), {})
        self._deadline_s = deadline_s
        self._peer = peer
        self.num_turns = 0
        self.woken_s: float | None = None

    def wake_at_s(self) -> float | None:
        return self._deadline_s

    def step(self) -> list[RequestUpdate]:
        self.num_turns += 1
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self.woken_s = time.monotonic()
            self._deadline_s = None
            self._peer.send(Shutdown())
        return super().step()


def run_loop(wait_s: float, heartbeat: Heartbeat) -> WakingCore:
    """Run a loop with a core that has its deadline in ``wait_s``, until it was woken."""
    ours, theirs = socket.socketpair()
    peer: Channel[FromEngine] = Channel(ours, FromEngine)
    channel: Channel[ToEngine] = Channel(theirs, ToEngine)
    assembly = FakeAssembly(EngineConfig())
    assembly.core.close()
    assembly.core = core = WakingCore(time.monotonic() + wait_s, peer)
    watchdog = threading.Timer(_PATIENCE_S, ours.shutdown, (socket.SHUT_RDWR,))
    watchdog.start()
    try:
        EngineLoop(assembly, channel, heartbeat).run()
    finally:
        watchdog.cancel()
        assembly.close()
        channel.close()
        peer.close()
    return core


@pytest.mark.parametrize("wait_s", [0.05, -1.0])
def test_a_deadline_of_the_core_gets_a_turn_and_nobody_spins(wait_s: float) -> None:
    started_s = time.monotonic()
    heartbeat = Heartbeat()
    core = run_loop(wait_s, heartbeat)
    assert core.woken_s is not None, "the engine was not woken"
    assert core.woken_s >= started_s + wait_s
    # One at the start, one when it is time; a clock of another resolution may cost one more.
    assert core.num_turns <= 3
    assert heartbeat.signs().turn == core.num_turns + 1  # the last one is shut down before its step


@pytest.mark.parametrize("waits_for_device", [False, True])
def test_a_loop_that_sleeps_rests_unless_it_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, *, waits_for_device: bool
) -> None:
    monkeypatch.setattr(FakeCore, "awaits_device", waits_for_device)
    seen: list[LoopActivity] = []
    heartbeat = Heartbeat()
    select = selectors.DefaultSelector.select

    def looks(selector: selectors.DefaultSelector, timeout: float | None = None) -> Any:
        seen.append(heartbeat.signs().activity)
        return select(selector, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", looks)
    run_loop(0.3, heartbeat)  # long enough for it to come to its rest
    assert set(seen) == {LoopActivity.WORKING if waits_for_device else LoopActivity.RESTING}
