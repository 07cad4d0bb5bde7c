"""``/v1/messages`` over HTTP: answers, streams, keys and errors."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from corun.runtime.config.serve import ServeConfig
from corun.runtime.server.access import Access
from corun.runtime.server.anthropic_blocks import AnthropicBlocks, AnthropicEvent
from corun.runtime.tools.parts import AnswerPart, CallHead, PartKind

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
PROMPT = "<system>be brief<user>hi<assistant>"


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named twice."""
    events = []
    for event in filter(None, text.split("\n\n")):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        msgspec.json.decode(json.dumps(events[-1]), type=AnthropicEvent)  # as /openapi.json says
    return events


def test_answer(http: httpx.Client) -> None:
    body = {"messages": HI, "system": "be brief", "model": "upper", "stop_sequences": ["€"]}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    message = answer.json()
    assert message["content"] == [{"type": "text", "text": "upper/0/sistant>"}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "upper")
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "€")
    assert message["usage"]["input_tokens"] == len(PROMPT)


def test_stream(http: httpx.Client, engine: Any, expected_text: Callable[..., str]) -> None:
    engine.tokens_per_output = 1
    events = events_of(http.post(PATH, json={"messages": HI, "stream": True, "max_tokens": 4}).text)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events[2:-3])
    assert text == expected_text("<user>hi<assistant>", 4)
    assert events[0]["message"]["usage"]["input_tokens"] == len("<user>hi<assistant>")
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[-2]["usage"]["output_tokens"] == 4


def test_blocks() -> None:
    writer = AnthropicBlocks()
    parts = [
        AnswerPart(PartKind.REASONING, "x"),
        AnswerPart(PartKind.CONTENT, "y"),
        AnswerPart(PartKind.CALL, "", 0, CallHead("c1", "f")),
        AnswerPart(PartKind.CALL, '{"a":1}'),
    ]
    events = [*writer.add(parts), *writer.end(is_complete=True)]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2]
    assert json.loads(msgspec.json.encode(writer.blocks)) == [
        {"type": "thinking", "thinking": "x", "signature": ""},
        {"type": "text", "text": "y"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
    ]


def test_a_key_in_the_header_of_its_clients(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), access=Access.of(ServeConfig(api_key=("k",))))
    with httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"messages": HI, "max_tokens": 1}
        assert http.post(PATH, json=body, headers={"x-api-key": "k"}).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}):
            assert http.post(PATH, json=body, headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"model": "none"}, "model"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(http: httpx.Client, fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = http.post(PATH, json={"messages": HI, "stream": stream} | fields)
    assert answer.json()["error"]["param"] == param, answer.text
    assert answer.status_code == (404 if param == "model" else 400)


def test_a_stream_that_fails(http: httpx.Client, engine: Any) -> None:
    engine.fail_after_tokens = 2
    engine.tokens_per_output = 1
    last = events_of(http.post(PATH, json={"messages": HI, "stream": True}).text)[-1]
    assert last["type"] == "error" and last["error"]["message"]
