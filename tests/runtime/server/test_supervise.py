"""The ends of a server: drained, timed out, at once, or because its engine died."""

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from corun.runtime.errors import EngineDeadError, EngineHungError
from corun.runtime.exit_codes import EXIT_ENGINE_HUNG

WAIT = Callable[..., None]
START = Callable[..., Any]


class Posted:
    """A request for completions on its way, in a thread."""

    def __init__(self, server: Any, **fields: Any) -> None:
        body = {"prompt": "hello", "max_tokens": 40} | fields
        self._thread = threading.Thread(target=self._post, args=(server.url, body))
        self._thread.start()

    def _post(self, url: str, body: dict[str, Any]) -> None:
        self._response = httpx.post(url + "/v1/completions", json=body, timeout=20)

    def result(self) -> httpx.Response:
        self._thread.join(timeout=20)
        return self._response


def last_event(response: httpx.Response) -> str:
    return response.text.split("\n\n")[-2].removeprefix("data: ")


def test_idle_server_stops(supervised: START) -> None:
    server = supervised(drain_timeout_s=5)
    assert httpx.get(server.url + "/health").status_code == 200
    server.signal()
    assert server.join() == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url + "/health")


def test_running_requests_finish(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=20)
    server.engine.held.set()
    posted = [Posted(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.engine.num_open == 2)
    server.signal()
    wait_until(lambda: server.state.draining)
    assert httpx.get(server.url + "/ready").status_code == 503
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}).status_code == 503
    server.engine.held.clear()
    whole, streamed = (one.result() for one in posted)
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert last_event(streamed) == "[DONE]"
    assert server.join() == 0


def check_cut(server: Any, posted: list[Posted]) -> None:
    whole, streamed = (one.result() for one in posted)
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "shutting_down"
    error = json.loads(last_event(streamed))["error"]
    assert error["code"] == "shutting_down"
    assert "--drain-timeout-s" in error["message"]
    assert server.join() == 0
    assert server.engine.num_open == 0


def test_requests_are_cut_at_the_deadline(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=0.1)
    server.engine.held.set()
    posted = [Posted(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.engine.num_open == 2)
    server.signal()
    check_cut(server, posted)


def test_second_signal_cuts_at_once(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=1000)
    server.engine.held.set()
    posted = [Posted(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.engine.num_open == 2)
    server.signal()
    wait_until(lambda: server.state.draining)
    server.signal()
    check_cut(server, posted)


@pytest.mark.parametrize("silently", [False, True])
def test_engine_death(supervised: START, wait_until: WAIT, silently: bool) -> None:
    server = supervised(drain_timeout_s=1000)
    server.engine.held.set()
    server.engine.dies_silently = silently
    posted = [Posted(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.engine.num_continued >= 2)
    server.engine.error = EngineDeadError("the engine process 7 was killed by SIGKILL")
    whole, streamed = (one.result() for one in posted)
    assert whole.status_code == 503
    assert "SIGKILL" in whole.json()["error"]["message"]
    assert json.loads(last_event(streamed))["error"]["code"] == "engine_dead"
    assert server.join() == 1


def test_an_engine_that_hangs_has_an_exit_code_of_its_own(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=1000)
    server.engine.held.set()
    posted = Posted(server, stream=True)
    wait_until(lambda: server.engine.num_continued >= 1)
    server.engine.error = EngineHungError("the engine has made no progress for 120 s")
    error = json.loads(last_event(posted.result()))["error"]
    assert "no progress for 120 s" in error["message"]
    assert server.join() == EXIT_ENGINE_HUNG


def test_engine_death_while_draining(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=1000)
    server.engine.held.set()
    posted = Posted(server)
    wait_until(lambda: server.engine.num_open == 1)
    server.signal()
    wait_until(lambda: server.state.draining)
    server.engine.error = EngineDeadError("killed")
    assert posted.result().status_code == 503
    assert server.join() == 1
