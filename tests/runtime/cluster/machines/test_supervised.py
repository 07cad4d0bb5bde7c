"""An agent that outlives its supervisor: real processes, and bare engines."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from corun.runtime.cluster.machines.supervised import ENDED, FAILED, RUNNING, AgentLocation, SupervisedAgent
from corun.runtime.cluster.settings import NodeSettings
from corun.runtime.cluster.wire import AGENT_END_PATH, EndAgent
from corun.runtime.config.engine import EngineConfig
from support.launching import DEADLINE_S, KEY
from support.supervising import SupervisingProcess, node_settings, wait_gone

NOWHERE = "http://127.0.0.1:1"  # no controller listens there


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[NodeSettings]:
    """Settings of agents; processes that a failed test leaves behind are killed."""
    yield node_settings(tmp_path, NOWHERE)
    for path in tmp_path.glob("*/*/place.json"):
        pid = msgspec.json.decode(path.read_bytes(), type=AgentLocation).pid
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
            wait_gone(pid)


def location_of(agent: SupervisedAgent) -> AgentLocation:
    assert agent.location is not None
    return agent.location


def test_the_next_supervisor_finds_it_as_it_is(settings: NodeSettings) -> None:
    with SupervisingProcess(settings) as first:
        before = first.until(RUNNING)
        assert before.agent_id == "127.0.0.1"
        with SupervisingProcess(settings) as beside:  # another agent, since the first has a supervisor
            other = beside.until(RUNNING)
            assert other.agent_id == "127.0.0.1.1" and location_of(other).pid != location_of(before).pid
    with SupervisingProcess(settings) as second:
        assert second.until(RUNNING) == before


def test_it_is_restarted_unless_it_ended_on_request(settings: NodeSettings) -> None:
    with SupervisingProcess(settings) as first:
        pid = location_of(first.until(RUNNING)).pid
        os.kill(pid, signal.SIGKILL)
        first.until(FAILED)
        location = location_of(first.until(RUNNING))
        assert location.pid != pid
        answer = httpx.post(
            location.url + AGENT_END_PATH,
            headers={"Authorization": f"Bearer {KEY}"},
            content=msgspec.json.encode(EndAgent(agent_id="127.0.0.1")),
            timeout=DEADLINE_S,
        )
        assert answer.status_code == 200
        assert first.until(ENDED).location is None
    with SupervisingProcess(settings) as second:  # as after a restart of its machine
        assert location_of(second.until(RUNNING)).pid != location.pid


def test_one_of_other_options_ends_and_gives_way(settings: NodeSettings) -> None:
    with SupervisingProcess(settings) as first:
        pid = location_of(first.until(RUNNING)).pid
    other = msgspec.structs.replace(settings, engine=EngineConfig(model="other"))
    with SupervisingProcess(other) as second:
        again = second.until(RUNNING)
        assert again.agent_id == "127.0.0.1" and location_of(again).pid != pid
        wait_gone(pid)


def test_unsupervised_for_long_it_ends(settings: NodeSettings) -> None:
    with SupervisingProcess(msgspec.structs.replace(settings, unsupervised_s=1.0)) as process:
        pid = location_of(process.until(RUNNING)).pid
        engines = psutil.Process(pid).children()
    wait_gone(pid)
    for engine in engines:
        wait_gone(engine.pid)


def test_what_cannot_begin_says_why(settings: NodeSettings) -> None:
    words = "import sys; sys.exit('corun: error: there is no such model')"
    bad = msgspec.structs.replace(settings, engine_command=(sys.executable, "-c", words))
    with SupervisingProcess(bad) as process:
        failed = process.until(FAILED)
    assert failed.reason is not None and "ended before it was ready" in failed.reason
