"""``--request-log`` of a real server: a line for each kind of end, and its count."""

import json
import shutil
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.demo import chat_prompt, demo_adapters_path, demo_model_path
from support.serving import Served, wait_until

# Longer than any of these tests takes.
MAX_MODEL_LEN = 32768
LONG = {"prompt": "a", "max_tokens": 30000, "ignore_eos": True}
SECRET = "hush hush"


class Logged:
    """A server and its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model = path.parent / "demo"
        shutil.copytree(demo_model_path(), model)
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = MAX_MODEL_LEN
        (model / "config.json").write_text(json.dumps(config))
        self.server = Served(
            *(str(model), "--lora-dir", str(demo_adapters_path()), "--cpu-threads", "1"),
            *("--request-log", str(path), "--max-num-seqs", "2", "--max-num-waiting", "2"),
        )
        self.num_read = 0

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def next(self, number: int = 1) -> list[dict[str, Any]]:
        """Return the new records, which must be ``number``."""
        wait_until(lambda: len(self.lines()) >= self.num_read + number)
        found = self.lines()[self.num_read :]
        assert len(found) == number
        self.num_read += number
        return found

    def post(self, **fields: Any) -> httpx.Response:
        return self.server.post("/v1/completions", {"prompt": chat_prompt(SECRET)} | fields)

    def leave_when(self, expected: tuple[int, int], **fields: Any) -> None:
        """Send a request, and disconnect once ``expected`` requests run and wait."""
        with self.begin(**fields):
            wait_until(partial(self.has, expected))

    def begin(self, **fields: Any) -> socket.socket:
        body = json.dumps(LONG | fields).encode()
        port = int(self.server.url.rpartition(":")[2])
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        return sock

    def has(self, expected: tuple[int, int]) -> bool:
        metrics = self.server.metrics()
        found = metrics["corun:num_requests_running"], metrics["corun:num_requests_waiting"]
        return found == expected

    def counts(self) -> Counter[str]:
        text = httpx.get(self.server.url + "/metrics", timeout=20).text
        name = 'corun:request_success_total{finished_reason="'
        lines = [line for line in text.splitlines() if line.startswith(name)]
        found = {line[len(name) :].partition('"')[0]: line.rpartition(" ")[2] for line in lines}
        return Counter({reason: int(float(value)) for reason, value in found.items()})


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    found = Logged(tmp_path_factory.mktemp("log") / "requests.jsonl")
    with found.server:
        yield found


def ends(record: dict[str, Any]) -> list[tuple[str, int]]:
    return [
        (choice["finish_reason"], choice["output_tokens"])
        for prompt in record["prompts"]
        for choice in prompt["choices"]
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_answers(logged: Logged, stream: bool) -> None:
    before = logged.counts()
    logged.post(model="upper", max_tokens=30, stream=stream)
    (record,) = logged.next()
    assert (record["adapter"], record["outcome"], record["status"]) == ("upper", "finished", 200)
    (prompt,) = record["prompts"]
    assert len(prompt["adapter_version"]) >= 32
    assert prompt["prompt_tokens"] > prompt["cached_tokens"] >= prompt["host_cached_tokens"]
    assert 0 < prompt["first_token_s"] <= prompt["total_s"] <= record["total_s"]
    (choice,) = prompt["choices"]
    assert (choice["finish_reason"], choice["output_tokens"]) == ("stop", len("HUSH HUSH") + 1)
    assert choice["predicted_output_tokens"] >= 1
    assert 0 < sum(choice["parts_s"].values()) <= prompt["first_token_s"]
    logged.post(max_tokens=3, n=2, stream=stream, ignore_eos=True)
    (record,) = logged.next()
    assert ends(record) == [("length", 3)] * 2
    assert record["adapter"] is record["prompts"][0]["adapter_version"] is None
    logged.post(model="upper", max_tokens=30, stop="SH", stream=stream)
    (record,) = logged.next()
    assert ends(record) == [("stop", 4)]
    assert logged.counts() - before == Counter(stop=2, length=2)
    text = logged.path.read_text()
    assert SECRET not in text and SECRET.upper() not in text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_request_runs(logged: Logged, stream: bool) -> None:
    before = logged.counts()
    logged.leave_when((2, 0), n=2, stream=stream)
    (record,) = logged.next()
    assert (record["outcome"], record["error"]) == ("abort", "client_gone")
    assert record["status"] == (200 if stream else None)
    assert [reason for reason, _ in ends(record)] == ["abort", "abort"]
    for choice in record["prompts"][0]["choices"]:
        assert choice["parts_s"]
    assert logged.counts() - before == Counter(abort=2)
    wait_until(partial(logged.has, (0, 0)))


def test_a_client_that_leaves_the_queue_and_one_that_is_not_let_in(logged: Logged) -> None:
    before = logged.counts()
    with logged.begin(n=2):
        wait_until(partial(logged.has, (2, 0)))
        with logged.begin():
            wait_until(partial(logged.has, (2, 1)))
            assert logged.post(n=2).status_code == 429
            (refused,) = logged.next()
        (waited,) = logged.next()
    assert (refused["outcome"], refused["error"]) == ("refused", "overloaded")
    assert (refused["status"], refused["prompts"]) == (429, [])
    assert ends(waited) == [("abort", 0)]
    (prompt,) = waited["prompts"]
    assert prompt["first_token_s"] is None
    parts_s = prompt["choices"][0]["parts_s"]
    assert max(parts_s, key=lambda part: float(parts_s[part])) == "order"
    logged.next()  # of those that ran
    assert logged.counts() - before == Counter(refused=1, abort=3)
    wait_until(partial(logged.has, (0, 0)))


def test_requests_that_are_refused(logged: Logged) -> None:
    before = logged.counts()
    for fields, code in (
        ({"model": "nothing"}, "model_not_found"),
        ({"prompt": "x" * MAX_MODEL_LEN}, "context_length_exceeded"),
        ({"n": 5}, "too_many_sequences"),
        ({"max_tokens": 0}, "invalid_request_error"),
    ):
        answer = logged.post(**fields)
        (record,) = logged.next()
        assert (record["outcome"], record["error"]) == ("refused", code)
        assert (record["status"], record["id"]) == (answer.status_code, answer.headers["x-request-id"])
    assert logged.counts() - before == Counter(refused=4)


def test_an_engine_that_is_killed(logged: Logged) -> None:
    """The last test: the server ends with it."""
    server = logged.server
    threads = [
        threading.Thread(target=server.post, args=("/v1/completions", LONG | {"n": n})) for n in (2, 1)
    ]
    for thread, state in zip(threads, ((2, 0), (2, 1)), strict=True):  # in this order
        thread.start()
        wait_until(partial(logged.has, state), timeout_s=60.0)
    server.engine.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join()
    server.process.wait(20)
    for record in logged.next(2):
        assert (record["outcome"], record["error"], record["status"]) == ("error", "engine_dead", 503)
        assert {reason for reason, _ in ends(record)} == {"error"}
