"""An agent that outlives who holds it: real processes, and bare engines."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from corun.runtime.cluster.machines.held import ENDED, FAILED, RUNNING, AgentPlace, HeldAgent
from corun.runtime.cluster.settings import NodeSettings
from corun.runtime.cluster.wire import AGENT_END_PATH, EndAgent
from corun.runtime.config.engine import EngineConfig
from support.holding import Holding, node_settings, wait_gone
from support.launching import DEADLINE_S, KEY

NOWHERE = "http://127.0.0.1:1"  # a controller that is away


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[NodeSettings]:
    """Of agents that are not left behind, whatever fails."""
    yield node_settings(tmp_path, NOWHERE)
    for path in tmp_path.glob("*/*/place.json"):
        pid = msgspec.json.decode(path.read_bytes(), type=AgentPlace).pid
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
            wait_gone(pid)


def place_of(agent: HeldAgent) -> AgentPlace:
    assert agent.place is not None
    return agent.place


def test_the_next_holder_finds_it_as_it_is(settings: NodeSettings) -> None:
    with Holding(settings) as first:
        before = first.until(RUNNING)
        assert before.agent_id == "127.0.0.1"
        with Holding(settings) as beside:  # another agent, since the first is held
            other = beside.until(RUNNING)
            assert other.agent_id == "127.0.0.1.1" and place_of(other).pid != place_of(before).pid
    with Holding(settings) as second:
        assert second.until(RUNNING) == before


def test_it_begins_again_but_when_it_was_told_to_end(settings: NodeSettings) -> None:
    with Holding(settings) as first:
        pid = place_of(first.until(RUNNING)).pid
        os.kill(pid, signal.SIGKILL)
        first.until(FAILED)
        place = place_of(first.until(RUNNING))
        assert place.pid != pid
        answer = httpx.post(
            place.url + AGENT_END_PATH, headers={"Authorization": f"Bearer {KEY}"},
            content=msgspec.json.encode(EndAgent(agent_id="127.0.0.1")), timeout=DEADLINE_S,
        )  # fmt: skip
        assert answer.status_code == 200
        assert first.until(ENDED).place is None
    with Holding(settings) as second:  # as when its machine is there again
        assert place_of(second.until(RUNNING)).pid != place.pid


def test_one_of_other_options_ends_and_gives_way(settings: NodeSettings) -> None:
    with Holding(settings) as first:
        pid = place_of(first.until(RUNNING)).pid
    other = msgspec.structs.replace(settings, engine=EngineConfig(model="other"))
    with Holding(other) as second:
        again = second.until(RUNNING)
        assert again.agent_id == "127.0.0.1" and place_of(again).pid != pid
        wait_gone(pid)


def test_unheld_for_long_it_ends(settings: NodeSettings) -> None:
    with Holding(msgspec.structs.replace(settings, unheld_s=1.0)) as holding:
        pid = place_of(holding.until(RUNNING)).pid
        engines = psutil.Process(pid).children()
    wait_gone(pid)
    for engine in engines:
        wait_gone(engine.pid)


def test_what_cannot_begin_says_why(settings: NodeSettings) -> None:
    words = "import sys; sys.exit('corun: error: there is no such model')"
    bad = msgspec.structs.replace(settings, engine_command=(sys.executable, "-c", words))
    with Holding(bad) as holding:
        failed = holding.until(FAILED)
    assert failed.reason is not None and "ended before it was ready" in failed.reason
