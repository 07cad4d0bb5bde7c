"""A server whose engine hangs: a kernel that does not return, a stopped process, a long step."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from corun.runtime.exit_codes import EXIT_ENGINE_HUNG
from support.residue import named_segments
from support.serving import Served, wait_until
from support.stuck_server import STUCK, StuckServer

LIMIT_S = 2.0
SHORT_LIMIT_S = 1.0  # for an engine that is given up
LAYER_S = 0.6  # five of them take longer than the limit
# Nothing is compiled, so that the engine starts quickly, and its layers are modules.
PLAIN = """
    --device cpu --cpu-threads 1 --memory-gib 0.25 --linear-backend plain --attention-backend
    torch --lora-backend torch --fused-kernels off --decode-graphs off
""".split()
BODY = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
TIMEOUT_S = 60.0


class Streamed:
    """A stream in a thread, and its lines."""

    def __init__(self, server: Served) -> None:
        self.lines: list[str] = []
        self._url = server.url + "/v1/completions"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def join(self) -> list[str]:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.lines

    def _read(self) -> None:
        body = {**BODY, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=TIMEOUT_S) as response:
            self.lines += [line for line in response.iter_lines() if line]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[float], StuckServer]]:
    servers = []

    def run(limit_s: float) -> StuckServer:
        servers.append(StuckServer(tmp_path / "what", "--engine-hang-s", str(limit_s), *PLAIN))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


def readiness(server: Served) -> tuple[int, dict[str, Any]]:
    response = httpx.get(server.url + "/ready", timeout=TIMEOUT_S)
    return response.status_code, response.json()


def until_ready(server: Served, *, is_ready: bool = True) -> None:
    wait_until(lambda: readiness(server)[0] == (200 if is_ready else 503), TIMEOUT_S)


def assert_given_up(server: Served, stream: Streamed, words: str) -> None:
    """The stream ends with a reason, the process with a code, and nothing is left."""
    error = json.loads(stream.join()[-1].removeprefix("data: "))["error"]
    assert error["code"] == "engine_dead"
    assert "no progress" in error["message"] and words in error["message"]
    assert server.process.wait(TIMEOUT_S) == EXIT_ENGINE_HUNG
    _, alive = psutil.wait_procs(server.processes, timeout=10)
    assert not alive
    assert not named_segments(*(process.pid for process in server.processes))
    for part in ("It is not ready meanwhile", "--engine-hang-s", "is killed", "exit code 3"):
        wait_until(partial(logs, server, part))


def logs(server: Served, part: str) -> bool:
    return any(part in line for line in server.log_lines)


def test_a_stopped_process(start: Callable[[float], StuckServer]) -> None:
    server = start(SHORT_LIMIT_S)
    server.engine.send_signal(signal.SIGSTOP)
    stream = Streamed(server)
    until_ready(server, is_ready=False)
    assert_given_up(server, stream, "no heartbeat")


def test_an_engine_that_goes_on_is_slow_and_then_stuck(start: Callable[[float], StuckServer]) -> None:
    server = start(LIMIT_S)
    goes_on(server)
    is_slow(server)
    does_not_return(server)


def goes_on(server: StuckServer) -> None:
    """It is stopped, and continued in time."""
    server.engine.send_signal(signal.SIGSTOP)
    stream = Streamed(server)
    until_ready(server, is_ready=False)
    server.engine.send_signal(signal.SIGCONT)
    until_ready(server)
    assert stream.join()[-1] == "data: [DONE]"
    wait_until(partial(logs, server, "makes progress again"))
    assert server.metrics()["corun:engine_stalled_seconds"] == 0


def is_slow(server: StuckServer) -> None:
    """Each layer of a step is in time, the step is not."""
    server.delay(str(LAYER_S))
    started_s = time.monotonic()
    slow = Streamed(server)
    seen = set()
    while time.monotonic() < started_s + 3 * LIMIT_S:
        seen.add(readiness(server)[0])
        time.sleep(0.05)
    server.delay("")
    assert slow.join()[-1] == "data: [DONE]"
    assert seen == {200}


def does_not_return(server: StuckServer) -> None:
    """A kernel hangs, and the engine is given up."""
    server.delay(STUCK)
    stream = Streamed(server)
    until_ready(server, is_ready=False)
    _, body = readiness(server)
    assert body["error"]["code"] == "engine_hung" and "layer 1 " in body["error"]["message"]
    assert server.metrics()["corun:engine_stalled_seconds"] >= LIMIT_S
    assert httpx.get(server.url + "/health").status_code == 200
    assert_given_up(server, stream, "layer 1 ")
    wait_until(partial(logs, server, "in forward_when_let"))  # where it stands
