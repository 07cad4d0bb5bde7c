"""``corun cluster`` as users run it: two real engines behind one URL, and processes are killed."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from corun.runtime.cluster.wire import STATUS_PATH, ClusterStatus
from corun.runtime.demo import chat_prompt, demo_adapters_path
from support.demo_answers import ADAPTERS, ALL_ADAPTERS, BASE, MAX_TOKENS, questions
from support.processes import running_below
from support.serving import ANSWER_TIMEOUT_S, START_TIMEOUT_S, corun_command, wait_until

ADMIN_KEY, API_KEY = "the-admin's", "a-client's"
# Nothing is compiled, so that engines start and restart quickly.
PLAIN = """
    --linear-backend plain --attention-backend torch --lora-backend torch --fused-kernels off
    --decode-graphs off
""".split()
_URL = re.compile(r"serving .* at (http://\S+)/v1$", re.MULTILINE)


class CommandedCluster:
    """The command in a process of its own, its log in a file."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.state_dir = directory / "state"
        self._log_path = directory / "log"
        options = ["--port", "0", "--state-dir", str(self.state_dir), *arguments]
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen([*corun_command("cluster"), *options], stderr=log)
        self.url = ""

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (found := _URL.search(self.log())) is None:
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log()
            time.sleep(0.05)
        self.url = found[1]

    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    def client(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=ANSWER_TIMEOUT_S)

    def children(self, name: str) -> list[psutil.Process]:
        """Processes of one of the command's modules."""
        module = f"corun.runtime.cluster.{name}"
        return running_below(module, self.process.pid, recursive=True)

    def status(self) -> ClusterStatus:
        """The controller's status, requested as from other machines."""
        place = msgspec.json.decode((self.state_dir / "cluster.json").read_bytes())
        key = (self.state_dir / "cluster.key").read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        url = place["controller_url"] + STATUS_PATH
        answer = httpx.get(url, headers=headers, timeout=ANSWER_TIMEOUT_S)
        return msgspec.json.decode(answer.content, type=ClusterStatus)

    def num_engines(self) -> int:
        try:
            return sum(not engine.is_draining for engine in self.status().engines)
        except (httpx.HTTPError, msgspec.DecodeError):
            return 0

    def run(self, *arguments: str) -> str:
        """What ``corun cluster ...`` prints of it."""
        command = corun_command("cluster", *arguments, "--state-dir", str(self.state_dir))
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its children end with it
            self.process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandedCluster]:
    found = CommandedCluster(
        tmp_path_factory.mktemp("cluster"),
        *"--engines 2 --unpinned --device cpu --memory-gib 0.25 --cpu-threads 1".split(),
        *"--router least-tokens --gateways 2".split(),
        *("--api-key", API_KEY),
        *("--admin-key", ADMIN_KEY),
        "--health-needs-key",
        *PLAIN,
    )
    try:
        found.wait_ready()
        wait_until(lambda: found.num_engines() == 2, START_TIMEOUT_S)
        yield found
    finally:
        found.close()


def answer(client: httpx.Client, model: str, text: str, **fields: Any) -> str:
    """Return a model's answer; its status must be 200."""
    body = {"model": model, "prompt": chat_prompt(text), "max_tokens": MAX_TOKENS, "temperature": 0}
    response = client.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    found = response.json()["choices"][0]["text"]
    assert isinstance(found, str)
    return found


def load(client: httpx.Client, name: str, path: Path, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return client.post("/v1/load_lora_adapter", json=body)


def test_it_looks_like_one_server(cluster: CommandedCluster) -> None:
    with cluster.client(API_KEY) as client:
        models = {one["id"] for one in client.get("/v1/models").json()["data"]}
        assert models == {BASE, *ALL_ADAPTERS}
        for adapter in ADAPTERS:
            for question in questions(adapter, adapter, 4):
                assert answer(client, adapter, question.text) == question.answer
            little = [{"name": name, "scale": 1e-4} for name in ADAPTERS if name != adapter]
            mix = [*little[:3], {"name": adapter}]
            assert answer(client, BASE, question.text, lora=mix) == question.answer
    assert httpx.get(f"{cluster.url}/v1/models").status_code == 401
    served = [engine.url for engine in cluster.status().engines]
    # Clients' keys are not valid at engines.
    with cluster.client(API_KEY) as client:
        assert client.get(f"{served[0]}/v1/models").status_code == 401


def test_status_says_what_there_is(cluster: CommandedCluster) -> None:
    lines = cluster.run("status").splitlines()
    assert lines[0].endswith("2 gateways, placement sticky")
    assert sum(line.startswith("engine ") and "ready" in line for line in lines) == 2
    assert "  2 engines without workers, on shared cores (--unpinned)" in lines
    for adapter in ADAPTERS:
        assert any(line.startswith(f"adapter {adapter}  ready, rank ") for line in lines)


def test_a_name_is_loaded_replaced_and_unloaded_everywhere(cluster: CommandedCluster, tmp_path: Path) -> None:
    for name in ("upper", "reverse"):
        shutil.copytree(demo_adapters_path() / name, tmp_path / name)
    (question,) = questions("mine", "upper", 1)
    with cluster.client(API_KEY) as client, cluster.client(ADMIN_KEY) as admin:
        assert load(client, "mine", tmp_path / "upper").status_code == 403
        assert load(admin, "mine", tmp_path / "upper").status_code == 200
        for _ in range(6):
            assert answer(client, "mine", question.text) == question.answer
        assert load(admin, "mine", tmp_path / "upper").status_code == 200  # it is there
        refused = load(admin, "mine", tmp_path / "reverse")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_exists")
        shutil.rmtree(tmp_path / "upper")  # the cluster has its files by now
        done = load(admin, "mine", tmp_path / "reverse", load_inplace=True)
        assert done.status_code == 200
        shutil.rmtree(tmp_path / "reverse")
        reverse = answer(client, "reverse", question.text)
        assert reverse != question.answer
        for _ in range(6):
            assert answer(client, "mine", question.text) == reverse
        done = admin.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert done.status_code == 200
        for _ in range(4):
            body = {"model": "mine", "prompt": "x"}
            assert client.post("/v1/completions", json=body).status_code == 404


def test_a_directory_that_cannot_be_served_is_refused(cluster: CommandedCluster, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(demo_adapters_path() / "upper", bad)
    config = bad / "adapter_config.json"
    config.write_text(config.read_text().replace("q_proj", "no_proj"))
    with cluster.client(ADMIN_KEY) as admin:
        for path, words in ((bad, "does not fit the model"), (tmp_path / "none", "no such")):
            refused = load(admin, "bad", path)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert words in message and str(path) in message


def test_tokens_do_not_need_the_controller_which_comes_back(cluster: CommandedCluster) -> None:
    (question,) = questions("upper", "upper", 1)
    (controller,) = cluster.children("controller")
    controller.send_signal(signal.SIGKILL)
    with cluster.client(API_KEY) as client:
        for adapter in ADAPTERS:
            answer(client, adapter, question.text)
        # Engines are known from the saved state, agents once they have reported.
        wait_until(lambda: cluster.num_engines() == 2 and bool(cluster.status().agents), 20)
        names = {one["id"] for one in client.get("/v1/models").json()["data"]}
    assert {one.name for one in cluster.status().adapters} == set(ALL_ADAPTERS) == names - {BASE}


@pytest.mark.full  # an engine that hangs and a server that is started again have tests of their own
def test_an_engine_that_hangs_is_started_again(tmp_path: Path) -> None:
    found = CommandedCluster(
        tmp_path,
        *"--engines 1 --unpinned --device cpu --memory-gib 0.25 --cpu-threads 1 --engine-hang-s 2".split(),
        *PLAIN,
    )
    try:
        found.wait_ready()
        wait_until(lambda: found.num_engines() == 1, START_TIMEOUT_S)
        (server,) = (engine.pid for engine in found.status().agents[0].engines)
        (stopped,) = running_below("corun.runtime.engine.process", server, recursive=True)
        stopped.send_signal(signal.SIGSTOP)
        # Its server gives it up and ends, and the agent starts another one.
        wait_until(lambda: "ended (exit status 3); restarting" in found.log(), 60)
        with found.client(API_KEY) as client:
            body = {"model": BASE, "prompt": "a", "max_tokens": 1}
            wait_until(lambda: client.post("/v1/completions", json=body).status_code == 200, START_TIMEOUT_S)
        assert not stopped.is_running()
    finally:
        found.close()


def test_an_engine_that_is_killed_costs_nothing(cluster: CommandedCluster) -> None:
    """The last test but one: the shutdown test finds another engine starting."""
    (question,) = questions("upper", "upper", 1)
    (agent,) = cluster.status().agents
    killed = agent.engines[0]
    os.kill(killed.pid, signal.SIGKILL)
    with cluster.client(API_KEY) as client:
        for _ in range(10):
            assert answer(client, "upper", question.text) == question.answer
    wait_until(lambda: f"{killed.engine_id}  starting" in cluster.run("status"), 20)


def test_its_end_leaves_nothing(cluster: CommandedCluster) -> None:
    """The last of these tests."""
    below = psutil.Process(cluster.process.pid).children(recursive=True)
    assert below
    cluster.process.terminate()
    assert cluster.process.wait(60) == 0, cluster.log()
    assert not [one for one in below if one.is_running()]
    assert not (cluster.state_dir / "cluster.json").exists()
    assert "Traceback" not in cluster.log()
