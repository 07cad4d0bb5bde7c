"""Recorded requests of other projects' clients (``tests/clients``) are answered as they expect."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine

RECORDED = Path(__file__).parents[2] / "clients" / "recorded"
REQUESTS = [
    pytest.param(request, id=f"{path.stem}-{number}")
    for path in sorted(RECORDED.glob("*.json"))
    for number, request in enumerate(json.loads(path.read_text()))
]


def events_of(text: str) -> list[Any]:
    """Return the events of a complete stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data")]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line) for line in lines[:-1]]


def check_response(response: httpx.Response, *, is_stream: bool) -> None:
    """An answer of /v1/responses has ended, with items."""
    answer = response.text if not is_stream else response.text.rpartition("data: ")[2]
    ended = json.loads(answer)
    ended = ended["response"] if is_stream else ended
    assert ended["status"] in ("completed", "incomplete") and ended["output"]


@pytest.mark.parametrize("request_sent", REQUESTS)
def test_recorded(http: httpx.Client, engine: FakeEngine, request_sent: dict[str, Any]) -> None:
    engine.chat_template = "<tool_call> </tool_call> <think> </think>"
    body = request_sent["body"]
    if body:
        body["model"] = "upper"  # which the fake engine has
    response = http.request(request_sent["method"], request_sent["path"], json=body)
    assert response.status_code == 200, response.text
    if request_sent["path"] == "/v1/responses":
        check_response(response, is_stream=bool(body.get("stream")))
        return
    if request_sent["path"] == "/v1/messages":
        has_ended = "message_stop" in response.text if body.get("stream") else response.json()
        assert has_ended and "stop_reason" in response.text
        return
    if not request_sent["path"].endswith("/completions"):
        assert response.text
        return
    answers = events_of(response.text) if body.get("stream") else [response.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert any(choice["finish_reason"] for choice in choices)
    is_chat = request_sent["path"].endswith("/chat/completions")
    part = ("delta" if body.get("stream") else "message") if is_chat else "text"
    assert all(part in choice for choice in choices)
    with_usage = not body.get("stream") or (body.get("stream_options") or {}).get("include_usage")
    assert ("usage" in answers[-1]) == bool(with_usage)
