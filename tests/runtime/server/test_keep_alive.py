"""Streams that are silent for long get comments, which clients do not see."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import FakeEngine, expected_text

COMMENT = ": keep-alive"
BODY = {"prompt": "hello", "max_tokens": 6, "stream": True}


@pytest.fixture
def silent(start_server: Callable[..., Any]) -> Iterator[Any]:
    """A server with an engine that is silent until the test releases it."""
    engine = FakeEngine()
    engine.held.set()
    yield start_server(engine, sse_keep_alive_s=0.02)
    engine.held.clear()


@pytest.mark.parametrize("hold_after_first", [True, False])
def test_comments_while_nothing_comes(silent: Any, hold_after_first: bool) -> None:
    silent.engine.hold_after_first = hold_after_first
    url = f"{silent.url}/v1/completions"
    with httpx.stream("POST", url, json=BODY, timeout=20) as response:
        lines = response.iter_lines()
        first = [next(lines) for _ in range(8)]
        assert first.count(COMMENT) >= 3
        assert first[0].startswith("data: " if hold_after_first else COMMENT)
        silent.engine.held.clear()
        events = [line for line in (*first, *lines) if line.startswith("data: {")]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == expected_text("hello", 6)


def test_an_error_after_a_comment_is_an_event(silent: Any) -> None:
    silent.engine.hold_after_first = False
    url = f"{silent.url}/v1/completions"
    with httpx.stream("POST", url, json=BODY, timeout=20) as response:
        lines = response.iter_lines()
        assert (response.status_code, next(lines)) == (200, COMMENT)
        silent.engine.fail_after_tokens = 0
        silent.engine.held.clear()
        *_, event = (line for line in lines if line.startswith("data: "))
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "the step fell over"


def test_the_openai_client_does_not_see_them(silent: Any) -> None:
    silent.engine.hold_after_first = False
    with openai.OpenAI(base_url=silent.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="hello", max_tokens=6, stream=True)
        silent.engine.held.clear()
        assert "".join(chunk.choices[0].text for chunk in stream) == expected_text("hello", 6)


def test_none_when_told_so(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(), sse_keep_alive_s=0)
    assert COMMENT not in httpx.post(f"{server.url}/v1/completions", json=BODY).text
