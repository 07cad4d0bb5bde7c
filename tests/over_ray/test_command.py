"""``corun cluster --ray`` with real engines: answers, ends and restarts."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from corun.runtime.cluster.wire import STATUS_PATH, ClusterStatus
from corun.runtime.demo import chat_prompt, demo_adapters_path
from support.demo_answers import ADAPTERS, MAX_TOKENS, questions
from support.ray_cluster import RayCluster, supervised_agents
from support.serving import ANSWER_TIMEOUT_S, START_TIMEOUT_S, corun_command, wait_until

pytestmark = pytest.mark.ray
NUM_ENGINES = 2
# Without compilation engines start fast.
PLAIN = """
    --linear-backend plain --attention-backend torch --lora-backend torch --fused-kernels off
    --decode-graphs off --unpinned --device cpu --memory-gib 0.25 --cpu-threads 1
""".split()
_URL = re.compile(r"serving .* at (http://\S+)/v1$", re.MULTILINE)


class Command:
    """The command as a process, with its log in a file."""

    def __init__(self, state_dir: Path, address: str, *arguments: str) -> None:
        self.state_dir = state_dir
        self._log_path = state_dir.with_name(f"log-{time.monotonic_ns()}")
        options = [
            *("--port", "0"),
            *("--state-dir", str(state_dir)),
            *("--ray", address),
            *("--engines", str(NUM_ENGINES)),
            *PLAIN,
            *arguments,
        ]
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen([*corun_command("cluster"), *options], stderr=log)

    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    def ready(self) -> str:
        """Return the URL once all engines are ready."""
        wait_until(lambda: self.process.poll() is not None or bool(_URL.search(self.log())), START_TIMEOUT_S)
        found = _URL.search(self.log())
        assert found is not None, self.log()
        wait_until(lambda: len(self.status().engines) == NUM_ENGINES, START_TIMEOUT_S)
        return found[1]

    def status(self) -> ClusterStatus:
        place = msgspec.json.decode((self.state_dir / "cluster.json").read_bytes())
        url = place["controller_url"] + STATUS_PATH
        answer = httpx.get(url, headers=self.headers(), timeout=ANSWER_TIMEOUT_S)
        return msgspec.json.decode(answer.content, type=ClusterStatus)

    def headers(self) -> dict[str, str]:
        """Return headers with the cluster's key."""
        key = (self.state_dir / "cluster.key").read_text(encoding="ascii").strip()
        return {"Authorization": f"Bearer {key}"}

    def keeper(self) -> psutil.Process:
        """Return its process that connects to Ray."""
        module = "corun.runtime.cluster.machines.nodes"
        children = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [one for one in children if module in one.cmdline()]
        return found

    def error(self) -> str:
        """Wait for exit status 2, and return the one line of its error."""
        assert self.process.wait(START_TIMEOUT_S) == 2, self.log()
        lines = [line for line in self.log().splitlines() if line.startswith("corun: error: ")]
        assert len(lines) == 1, self.log()
        return lines[0]

    def close(self) -> None:
        """End the cluster in order."""
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(START_TIMEOUT_S) == 0, self.log()


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    with RayCluster(2) as cluster:
        yield cluster


def tokens(url: str, headers: dict[str, str], model: str, text: str) -> list[str]:
    """Return the tokens of an answer."""
    body = {
        "model": model,
        "prompt": chat_prompt(text),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": 0,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    found: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return found


def test_answers_are_those_of_its_engines_and_nothing_is_left(ray: RayCluster, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    command = Command(tmp_path / "state", ray.address, "--lora-dir", str(demo_adapters_path()))
    try:
        url = command.ready()
        status = command.status()
        engines = [engine.url for engine in status.engines]
        assert len({agent.url for agent in status.agents if agent.engines}) == NUM_ENGINES
        policies = {os.sched_getscheduler(one.id) for one in command.keeper().threads()}
        assert policies == {os.SCHED_IDLE}
        for adapter in ADAPTERS:
            (question,) = questions(adapter, adapter, 1)
            through = [tokens(url, {}, adapter, question.text) for _ in range(4)]
            assert "".join(through[0]).removesuffix("<|end|>") == question.answer
            direct = [
                tokens(engine, command.headers(), adapter, question.text)
                for engine in engines
                if _serves(engine, command.headers(), adapter)
            ]
            assert direct and all(one == through[0] for one in [*through, *direct])
    finally:
        command.close()
    assert supervised_agents() == []
    assert set(Path("/dev/shm").iterdir()) <= before


def test_engines_outlive_a_command_that_is_killed_and_the_next_one_finds_them(
    ray: RayCluster, tmp_path: Path
) -> None:
    first = Command(tmp_path / "state", ray.address)
    first.ready()
    engines = {one.engine_id: one.url for one in first.status().engines}
    other = Command(tmp_path / "other", ray.address)
    assert "a cluster 'corun' runs already" in other.error()
    agents = sorted(one.pid for one in supervised_agents())
    first.process.kill()
    first.process.wait()
    for url in engines.values():
        (question,) = questions("upper", "upper", 1)
        assert tokens(url, first.headers(), _base(url, first.headers()), question.text)
    second = Command(tmp_path / "state", ray.address)
    try:
        second.ready()
        assert {one.engine_id: one.url for one in second.status().engines} == engines
        assert sorted(one.pid for one in supervised_agents()) == agents
    finally:
        second.close()
    assert supervised_agents() == []


def test_an_address_that_does_not_answer_is_one_line(ray: RayCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a port of another program
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert f"--ray {address}" in Command(tmp_path / "a", address).error()
    assert supervised_agents() == []


def _serves(url: str, headers: dict[str, str], name: str) -> bool:
    models = httpx.get(f"{url}/v1/models", headers=headers, timeout=ANSWER_TIMEOUT_S).json()
    return any(one["id"] == name for one in models["data"])


def _base(url: str, headers: dict[str, str]) -> str:
    models = httpx.get(f"{url}/v1/models", headers=headers, timeout=ANSWER_TIMEOUT_S).json()
    found: str = models["data"][0]["id"]
    return found
