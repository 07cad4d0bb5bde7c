"""``/v1/responses`` over HTTP: answers, streams and errors, as OpenAI's client reads them."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from corun.runtime.server.response_objects import ResponseEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
PATH = "/v1/responses"


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named twice."""
    events = []
    for event in filter(None, text.split("\n\n")):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_answer(http: httpx.Client, engine: Any) -> None:
    body = {"input": "hi", "instructions": "be brief", "model": "upper", "metadata": {"a": "b"}}
    answer = http.post(PATH, json=body | {"stop": "€"})
    assert answer.status_code == 200
    response = Response.model_validate(answer.json())
    assert response.output_text == "upper/0/sistant>"
    assert (response.status, response.model) == ("completed", "upper")
    assert response.metadata == {"a": "b"} and response.id.startswith("resp-")
    prompt = "<system>be brief<user>hi<assistant>"
    assert response.usage is not None
    assert response.usage.input_tokens == len(prompt)
    ((prompt_ids, _, adapter, _),) = engine.seen
    assert (len(prompt_ids), adapter) == (len(prompt), "upper")


def test_stream(http: httpx.Client, engine: Any, expected_text: Callable[..., str]) -> None:
    engine.tokens_per_output = 1
    answer = http.post(PATH, json={"input": "hi", "stream": True, "max_output_tokens": 4})
    events = events_of(answer.text)
    for event in events:
        EVENTS.validate_python(event)
        msgspec.json.decode(json.dumps(event), type=ResponseEvent)  # as /openapi.json says
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = expected_text("<user>hi<assistant>", 4)
    assert "".join(event["delta"] for event in events[4:-4]) == text
    last = Response.model_validate(events[-1]["response"])
    assert last.output_text == text and last.usage is not None and last.usage.output_tokens == 4
    assert last.incomplete_details is not None
    assert last.incomplete_details.reason == "max_output_tokens"


def test_client(client: openai.OpenAI) -> None:
    text = "base/0/sistant>"
    stop = {"stop": "€"}
    whole = client.responses.create(model="tiny", input="hi", extra_body=stop)
    assert whole.output_text == text and whole.status == "completed"
    with client.responses.stream(model="tiny", input="hi", extra_body=stop) as stream:
        assert stream.get_final_response().output_text == text
    history: Any = [{"role": "user", "content": "hi"}, *whole.output, {"role": "user", "content": "x"}]
    again = client.responses.create(model="tiny", input=history, max_output_tokens=3)
    assert again.usage is not None
    assert again.usage.input_tokens == len(f"<user>hi<assistant>{text}<user>x<assistant>")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp-1"}, "not_served", "previous_response_id"),
        ({"conversation": "c"}, "not_served", "conversation"),
        ({"background": True}, "not_served", "background"),
        ({"store": True}, "not_served", "store"),
        ({"tools": [{"type": "web_search"}]}, "not_served", "tools[0].type"),
        ({"messages": []}, "not_served", "messages"),
        ({"max_tokens": 3}, "not_served", "max_tokens"),
        ({"input": []}, "empty_messages", "input"),
        ({"input": "refuse me"}, "invalid_request_error", "input"),
        ({"max_output_tokens": -1}, "invalid_request_error", "max_output_tokens"),
        ({"max_output_token": 1}, "unknown_field", "max_output_token"),
        ({"temperature": -1.0}, "invalid_request_error", "temperature"),
        ({"model": "none"}, "model_not_found", "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(http: httpx.Client, fields: dict[str, Any], code: str, param: str, stream: bool) -> None:
    answer = http.post(PATH, json={"input": "hi", "stream": stream} | fields)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert answer.status_code == (404 if param == "model" else 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "background": False, "include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": None, "summary": "auto"}, "truncation": "disabled"},
        {"stream_options": {"include_obfuscation": False}, "previous_response_id": None},
        {"text": {"format": {"type": "text"}}, "service_tier": "auto", "user": "me"},
    ],
)
def test_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post(PATH, json={"input": "hi"} | fields)
    assert answer.status_code == 200, answer.text


def test_a_stream_that_fails(http: httpx.Client, engine: Any) -> None:
    engine.fail_after_tokens = 2
    engine.tokens_per_output = 1
    events = events_of(http.post(PATH, json={"input": "hi", "stream": True}).text)
    EVENTS.validate_python(events[-1])
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"]["code"] == "server_error" and response["error"]["message"]
