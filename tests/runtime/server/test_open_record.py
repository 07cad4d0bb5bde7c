"""Each request that generates makes one record, for any end, and is counted once."""

import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.errors import EngineDeadError
from corun.runtime.server.request_log import RequestLog
from corun.runtime.server.request_records import ChoiceRecord, HttpRequestRecord, PromptRecord
from prometheus_client.parser import text_string_to_metric_families
from support.product import ROOT

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SECRET = "never-to-be-logged"
WAIT = Callable[..., None]


class Watched:
    """A server, with its records and the counts from them."""

    def __init__(self, server: Any, path: Path, wait_until: WAIT) -> None:
        self.server = server
        self.engine = server.engine
        self._path = path
        self._wait_until = wait_until
        self._num_read = 0
        self._before = self._counts()

    def post(self, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
        body = {"prompt": SECRET, "max_tokens": 10} if path == COMPLETIONS else {}
        return httpx.post(self.server.url + path, json=body | fields, timeout=20)

    def raw_post(self, **fields: Any) -> socket.socket:
        """Send a request over a socket that the test can close."""
        body = json.dumps({"prompt": SECRET, "max_tokens": 40} | fields).encode()
        return self.raw(body, len(body))

    def raw(self, body: bytes, num_bytes: int) -> socket.socket:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n"
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=20)
        sock.sendall(head.encode() + body)
        return sock

    def record(self, **counts: int) -> dict[str, Any]:
        """Return the only new record; its counts must be ``counts``."""
        self._wait_until(lambda: len(self._lines()) > self._num_read)
        (line,) = self._lines()[self._num_read :]
        self._num_read += 1
        before, self._before = self._before, self._counts()
        assert self._before - before == Counter(counts), line
        assert SECRET not in line
        record: dict[str, Any] = json.loads(line)
        return record

    def check_nothing_more(self) -> None:
        assert len(self._lines()) == self._num_read
        assert self._counts() == self._before

    def _lines(self) -> list[str]:
        return self._path.read_text().splitlines(keepends=False)

    def _counts(self) -> Counter[str]:
        text = httpx.get(self.server.url + "/metrics", timeout=20).text
        return Counter(
            {
                sample.labels["finished_reason"]: int(sample.value)
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == "corun:request_success_total"
            }
        )


@pytest.fixture
def watched(
    start_server: Callable[..., Any], engine: Any, tmp_path: Path, wait_until: WAIT
) -> Iterator[Watched]:
    path = tmp_path / "log"
    log = RequestLog(str(path), max_bytes=1 << 20)
    server = start_server(type(engine)())
    server.state.request_log = log
    server.engine.held.clear()
    found = Watched(server, path, wait_until)
    yield found
    found.check_nothing_more()
    log.close()


def fields_of(record: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(record[name] for name in names)


def reasons(record: dict[str, Any]) -> list[str]:
    return [choice["finish_reason"] for one in record["prompts"] for choice in one["choices"]]


@pytest.mark.parametrize("stream", [True, False])
def test_answers(watched: Watched, stream: bool) -> None:
    answer = watched.post(model="digits", stream=stream)
    record = watched.record(length=1)
    assert answer.headers["x-request-id"] == record["id"]
    names = ("route", "model", "adapter", "stream", "outcome", "status", "error")
    assert fields_of(record, *names) == (COMPLETIONS, "digits", "digits", stream, "finished", 200, None)
    assert record["arrived_at"] > 1_700_000_000
    (prompt,) = record["prompts"]
    assert prompt["prompt_tokens"] == len(SECRET)
    assert 0 <= prompt["first_token_s"] <= prompt["total_s"] <= record["total_s"]
    assert prompt["choices"] == [
        {
            "finish_reason": "length",
            "output_tokens": 10,
            "predicted_output_tokens": 50,
            "parts_s": {"kv_memory": 0.5, "compute": 0.25},
            "start_strategy": "assisted",
            "start_reason": "told to",
            "preemptions": 2,
            "squashes": 1,
        }
    ]
    watched.post(stop="€", prompt=["a", "b"], n=2, max_tokens=40, stream=stream)
    assert reasons(watched.record(stop=4)) == ["stop"] * 4
    watched.post(CHAT, messages=[{"role": "user", "content": SECRET}], max_tokens=3)
    assert watched.record(length=1)["route"] == CHAT
    watched.post(max_tokens=0, echo=True, stream=stream)
    (prompt,) = watched.record(length=1)["prompts"]
    assert prompt["choices"][0]["output_tokens"] == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_first", [True, False])
def test_clients_that_leave(watched: Watched, wait_until: WAIT, stream: bool, after_first: bool) -> None:
    watched.engine.hold_after_first = after_first
    watched.engine.held.set()
    with watched.raw_post(stream=stream, n=2) as sock:
        wait_until(lambda: watched.engine.num_open == 1)
        if stream and after_first:
            assert sock.recv(12) == b"HTTP/1.1 200"
    record = watched.record(abort=2)
    assert fields_of(record, "outcome", "error") == ("abort", "client_gone")
    assert record["status"] == (200 if stream and after_first else None)
    (prompt,) = record["prompts"]
    if not after_first:
        assert prompt["first_token_s"] is None
        assert prompt["choices"][0]["output_tokens"] == 0
    assert prompt["choices"][0]["parts_s"] == {"kv_memory": 0.5, "compute": 0.25}


def test_a_client_that_leaves_while_it_sends(watched: Watched, wait_until: WAIT) -> None:
    with watched.raw(b"{", 100):
        wait_until(lambda: len(watched.server.state.open_requests) == 1)
    record = watched.record(abort=1)
    assert fields_of(record, "outcome", "status", "model", "prompts") == ("abort", None, None, [])


@pytest.mark.parametrize(
    ("fields", "status", "code", "model"),
    [
        ({"prompt": 5}, 400, "invalid_type", None),
        ({"model": "nobody"}, 404, "model_not_found", "nobody"),
        ({"model": "m" * 9000}, 404, "model_not_found", "m" * 256),
        ({"model": "upper", "max_tokens": -1}, 400, "invalid_request_error", "upper"),
        # They are counted before the body is read.
        ({"model": "upper", "stop": ["x"] * 17}, 400, "invalid_request_error", None),
        ({"model": "broken"}, 400, "adapter_failed", "broken"),
    ],
)
def test_requests_that_are_refused(
    watched: Watched, fields: dict[str, Any], status: int, code: str, model: str | None
) -> None:
    answer = watched.post(**fields)
    assert answer.status_code == status
    record = watched.record(refused=1)
    assert answer.headers["x-request-id"] == record["id"]
    assert fields_of(record, "outcome", "status", "error", "model", "prompts") == (
        "refused",
        status,
        code,
        model,
        [],
    )


def test_full_queues(watched: Watched) -> None:
    watched.engine.max_open = 0
    assert watched.post(n=3).status_code == 429
    record = watched.record(refused=1)
    assert fields_of(record, "outcome", "status", "error") == ("refused", 429, "overloaded")
    watched.engine.max_open = 1
    watched.engine.held.set()
    assert watched.post(prompt=["a", "b"]).status_code == 429
    record = watched.record(abort=1)  # the prompt that the engine had received
    assert fields_of(record, "outcome", "status", "error") == ("refused", 429, "overloaded")


@pytest.mark.parametrize("stream", [True, False])
def test_steps_that_fail(watched: Watched, stream: bool) -> None:
    watched.engine.fail_after_tokens = 6
    watched.post(n=2, stream=stream)
    record = watched.record(error=2)
    status = 200 if stream else 500
    assert fields_of(record, "outcome", "status", "error") == ("error", status, "internal_error")


def test_an_engine_that_is_lost(watched: Watched, wait_until: WAIT) -> None:
    watched.engine.held.set()
    with watched.raw_post():
        wait_until(lambda: watched.engine.num_open == 1)
        watched.engine.error = EngineDeadError("killed")
        record = watched.record(error=1)
    assert fields_of(record, "outcome", "status", "error") == ("error", 503, "engine_dead")
    assert watched.post().status_code == 503
    assert fields_of(watched.record(error=1), "error", "prompts") == ("engine_dead", [])


def test_a_server_that_ends(watched: Watched) -> None:
    watched.server.state.draining = True
    assert watched.post().status_code == 503
    record = watched.record(error=1)
    assert fields_of(record, "outcome", "status", "error") == ("error", 503, "shutting_down")


def test_what_does_not_generate_makes_none(watched: Watched) -> None:
    httpx.get(watched.server.url + "/v1/models", timeout=20)
    httpx.get(watched.server.url + COMPLETIONS, timeout=20)
    watched.check_nothing_more()


def test_the_documents_name_all_fields() -> None:
    text = (ROOT / "runtime" / "server" / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Records\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE)
    prompts, choices = "prompts[].", "prompts[].choices[]."
    assert named == [
        *HttpRequestRecord.__struct_fields__,
        *(prompts + name for name in PromptRecord.__struct_fields__ if name != "choices"),
        *(choices + name for name in ChoiceRecord.__struct_fields__),
    ]
