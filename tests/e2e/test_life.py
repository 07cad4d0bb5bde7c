"""The ends of servers: killed, stopped, orphaned; and the CPU time of idle servers."""

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.demo import demo_adapters_path, demo_model_path
from support.residue import assert_nothing_left, shared_memory_of
from support.serving import Served, wait_until

# A stream that the test ends lasts longer than any of these tests.
MAX_MODEL_LEN = 32768
LONG = {"prompt": "a", "max_tokens": 30000, "ignore_eos": True}
# A stream that finishes lasts longer than some requests, even on a busy machine.
FINISHING = {**LONG, "max_tokens": 2000}
ERROR_WITHIN_S = 10.0  # a hang is noticed much later
MAX_IDLE_CPU_SHARE = 0.05  # of one core; a busy wait takes all of it
IDLE_S = 3.0


class Watched:
    """A stream in a thread: its lines, and when it ended."""

    def __init__(self, server: Served, body: dict[str, Any]) -> None:
        self.status: int | None = None
        self.lines: list[str] = []
        self.ended_s: float | None = None
        self._url = server.url + "/v1/completions"
        self._body = {**body, "stream": True}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
        self.ended_s = time.monotonic()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start servers that are closed when the test ends: the demo, made for long texts."""
    model = tmp_path / "demo"
    shutil.copytree(demo_model_path(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_MODEL_LEN}))
    # One thread: speed does not matter here, and the engine need not measure the best number.
    options = (str(model), "--lora-dir", str(demo_adapters_path()), "--cpu-threads", "1")
    servers = []

    def run(*arguments: str) -> Served:
        servers.append(Served(*options, *arguments))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


def has_requests(server: Served, expected: tuple[int, int]) -> bool:
    """Whether so many requests run and so many wait."""
    metrics = server.metrics()
    found = metrics["corun:num_requests_running"], metrics["corun:num_requests_waiting"]
    return found == expected


def test_overload_and_then_a_killed_engine(start: Callable[..., Served]) -> None:
    server = start("--max-num-seqs", "2", "--max-num-waiting", "2")
    shared_memory = shared_memory_of(server.processes)
    streams = []
    for expected in ((1, 0), (2, 0), (2, 1), (2, 2)):
        streams.append(Watched(server, LONG))
        wait_until(partial(has_requests, server, expected))
    refused = server.post("/v1/completions", LONG)
    assert refused.status_code == 429
    assert "--max-num-waiting" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1

    seen = []  # when /health was asked, and what it said
    server.engine.send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    while server.process.poll() is None and time.monotonic() < killed_s + 30:
        try:
            asked_s = time.monotonic() - killed_s
            seen.append((asked_s, httpx.get(server.url + "/health", timeout=5).status_code))
        except httpx.TransportError:
            break
        time.sleep(0.02)
    for stream in streams:
        stream.join()
        assert stream.ended_s is not None
        assert stream.ended_s - killed_s < ERROR_WITHIN_S
        assert "error" in stream.lines[-1], stream.lines
        assert "killed by SIGKILL" in stream.lines[-1]
    statuses = [status for _, status in seen]
    assert statuses == sorted(statuses) and set(statuses) <= {200, 503}
    assert all(asked_s < ERROR_WITHIN_S for asked_s, status in seen if status == 200)
    assert server.process.wait(60) == 1
    assert_nothing_left(server.processes, shared_memory)
    assert any("the engine has died; the server ends" in line for line in server.log_lines)


def test_sigterm_lets_running_requests_finish(start: Callable[..., Served]) -> None:
    server = start()
    shared_memory = shared_memory_of(server.processes)
    stream = Watched(server, FINISHING)
    wait_until(lambda: len(stream.lines) > 3)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(server.url + "/ready").status_code == 503)
    refused = server.post("/v1/completions", LONG)
    assert refused.status_code == 503
    stream.join()
    assert stream.lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in stream.lines[-2]
    assert server.process.wait(60) == 0
    assert_nothing_left(server.processes, shared_memory)


def test_an_idle_server_rests_and_its_engine_dies_with_it(start: Callable[..., Served]) -> None:
    server = start()
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
    shared_memory = shared_memory_of(server.processes)
    # On a busy machine, what the request began takes a while.
    wait_until(lambda: cpu_share(server, 0.5) <= MAX_IDLE_CPU_SHARE)
    assert cpu_share(server, IDLE_S) <= MAX_IDLE_CPU_SHARE
    server.process.kill()
    server.process.wait()
    assert_nothing_left(server.processes, shared_memory)


def cpu_share(server: Served, during_s: float) -> float:
    """The share of one core that it takes from now on."""
    before_s = server.cpu_seconds()
    time.sleep(during_s)
    return (server.cpu_seconds() - before_s) / during_s
