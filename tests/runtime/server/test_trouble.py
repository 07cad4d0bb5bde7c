"""Clients that disconnect or do not read, an engine that fails or is full, wrong keys."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from corun.runtime.errors import EngineDeadError

WAIT = Callable[..., None]


@contextmanager
def raw_post(server: Any, path: str, **fields: Any) -> Iterator[socket.socket]:
    """Send a request over a plain socket and leave the answer to the test."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(head.encode() + body)
        yield sock


def stream_lines(http: httpx.Client, **fields: Any) -> list[str]:
    body = {"prompt": "hello", "max_tokens": 40, "stream": True} | fields
    return [line for line in http.post("/v1/completions", json=body).text.split("\n\n") if line]


@pytest.mark.parametrize("prompt", ["hello", ["hello", "you"]])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels(server: Any, engine: Any, wait_until: WAIT, prompt: Any, stream: bool) -> None:
    engine.held.set()
    num_prompts = 1 if isinstance(prompt, str) else len(prompt)
    with raw_post(server, "/v1/completions", prompt=prompt, max_tokens=40, stream=stream) as sock:
        wait_until(lambda: engine.num_open == num_prompts)
        assert len(server.state.open_requests) == 1
        if stream:
            assert sock.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: engine.num_open == 0 and not len(server.state.open_requests))
    assert engine.num_aborted == num_prompts


def test_disconnect_before_the_first_token(server: Any, engine: Any, wait_until: WAIT) -> None:
    engine.hold_after_first = False
    engine.held.set()
    with raw_post(server, "/v1/completions", prompt="hello", stream=True):
        wait_until(lambda: engine.num_open == 1)
    wait_until(lambda: engine.num_open == 0)
    assert engine.num_aborted == 1


def test_client_that_leaves_while_sending(server: Any, wait_until: WAIT) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(head)
        wait_until(lambda: len(server.state.open_requests) == 1)
    wait_until(lambda: not len(server.state.open_requests))


def test_slow_client_holds_up_nobody(server: Any, engine: Any, http: httpx.Client, wait_until: WAIT) -> None:
    engine.tokens_per_output = 1
    messages = [{"role": "user", "content": "hi"}]
    fields = {"messages": messages, "n": 32, "stream": True, "max_tokens": 3000}
    with raw_post(server, "/v1/chat/completions", **fields):  # does not read
        wait_until(server.is_writing_paused)
        for _ in range(5):
            body = {"prompt": "hello", "max_tokens": 40}
            assert http.post("/v1/completions", json=body).status_code == 200
        assert engine.num_open == 1  # it waits for the client instead of piling up
        assert server.is_writing_paused()
    wait_until(lambda: engine.num_open == 0)


def test_overload(http: httpx.Client, engine: Any) -> None:
    engine.max_open = 0
    for stream in (False, True):
        response = http.post("/v1/completions", json={"prompt": "hi", "stream": stream})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert "--max-num-waiting" in error["message"]


def test_one_prompt_of_several_refused(http: httpx.Client, engine: Any, wait_until: WAIT) -> None:
    engine.max_open = 1
    engine.held.set()
    response = http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert response.status_code == 429
    wait_until(lambda: engine.num_open == 0)
    assert engine.num_aborted == 1


def test_failure_in_a_stream(http: httpx.Client, engine: Any) -> None:
    engine.fail_after_tokens = 6
    lines = stream_lines(http)
    assert json.loads(lines[0].removeprefix("data: "))["choices"]
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["message"] == "the step fell over"
    assert error["type"] == "internal_server_error"
    engine.fail_after_tokens = None
    assert stream_lines(http)[-1] == "data: [DONE]"


def test_failure_of_a_whole_answer(http: httpx.Client, engine: Any) -> None:
    engine.fail_after_tokens = 6
    response = http.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the step fell over"


def test_openai_client_sees_the_error_in_a_stream(server: Any, engine: Any) -> None:
    engine.fail_after_tokens = 6
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError, match="the step fell over"),
    ):
        list(client.completions.create(model="tiny", prompt="hello", stream=True))


def test_our_bugs_show_nothing_of_the_inside(
    http: httpx.Client, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "list_loras", broken)
    for response in (
        http.post("/v1/completions", json={"prompt": "hi", "model": "x"}),
        http.get("/v1/models"),
    ):
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]


def test_dead_engine(http: httpx.Client, engine: Any) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    engine.error = EngineDeadError("killed by SIGKILL")
    for path in ("/health", "/ready"):
        response = http.get(path)
        assert response.status_code == 503
        assert "SIGKILL" in response.text
    response = http.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"


def test_an_engine_that_hangs_is_alive_and_not_ready(http: httpx.Client, engine: Any) -> None:
    engine.stall(29)
    assert http.get("/ready").status_code == 200
    engine.stall(31)
    response = http.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_hung"
    message = response.json()["error"]["message"]
    assert message.startswith("the engine has made no progress for 31 s in turn 7, layer 3")
    assert http.get("/health").status_code == 200
    assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
    engine.stall(0)
    assert http.get("/ready").status_code == 200


def test_draining_refuses_new_requests(http: httpx.Client, server: Any) -> None:
    server.state.draining = True
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 503
    response = http.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"
    assert response.headers["connection"] == "close"
