"""Supervises an agent until it is killed: ``python -m support.supervising``, settings on stdin.

Each line of its output is the agent's state, as JSON.
"""

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from corun.runtime.cluster.machines.supervised import AgentSupervisor, SupervisedAgent
from corun.runtime.cluster.settings import NodeSettings
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig

from .launching import BARE_ENGINE, DEADLINE_S, KEY
from .processes import is_alive

TESTS = Path(__file__).parents[1]


def node_settings(directory: Path, controller_url: str, **fields: object) -> NodeSettings:
    """Return settings of an agent with one bare engine."""
    values: dict[str, object] = {
        "cluster_key": KEY,
        "controller_url": controller_url,
        "state_dir": str(directory),
        "adapter_cache_bytes": 1 << 30,
        "engine": EngineConfig(model="m"),
        "serve": ServeConfig(drain_timeout_s=2.0),
        "unpinned": True,
        "host": "127.0.0.1",
        "engine_command": BARE_ENGINE,
        "unsupervised_s": 60.0,
    }
    return msgspec.convert(values | fields, NodeSettings)


class SupervisingProcess:
    """A process that supervises an agent, as an actor does."""

    def __init__(self, settings: NodeSettings) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.supervising"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=TESTS,
        )
        assert self._process.stdin is not None
        with self._process.stdin:
            self._process.stdin.write(msgspec.json.encode(settings))

    def until(self, state: str) -> SupervisedAgent:
        """Wait until the agent is in ``state``, and return it."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + DEADLINE_S
        for line in self._process.stdout:
            agent = msgspec.json.decode(line, type=SupervisedAgent)
            if agent.state == state:
                return agent
            assert time.monotonic() < deadline_s, agent
        raise AssertionError("it has ended")

    def kill(self) -> None:
        """Kill the process, as Ray kills an actor."""
        self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def wait_gone(pid: int) -> None:
    """Wait until a process has ended that is no child of this one."""
    deadline_s = time.monotonic() + DEADLINE_S
    while is_alive(pid):
        assert time.monotonic() < deadline_s, pid
        time.sleep(0.05)


if __name__ == "__main__":
    supervisor = AgentSupervisor(msgspec.json.decode(sys.stdin.buffer.read(), type=NodeSettings))
    while True:
        sys.stdout.write(msgspec.json.encode(supervisor.agent()).decode() + "\n")
        sys.stdout.flush()
        time.sleep(0.05)
