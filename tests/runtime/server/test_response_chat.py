"""``/v1/responses``: its bodies as bodies of chats, and its answers, streams and errors over HTTP."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from corun.runtime.errors import NotServedError, RequestError
from corun.runtime.server.body import read_model
from corun.runtime.server.response_chat import FIELD_NAMES, chat_body
from corun.runtime.server.response_fields import ResponsesRequest
from corun.runtime.server.response_objects import ResponseEvent
from corun.runtime.server.translation import names_of_fields
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

TURN: list[Any] = [
    {"role": "user", "content": "hi"},
    {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "think"}],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a":1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "one"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
]


def body_of(**fields: Any) -> dict[str, Any]:
    return chat_body(read_model(ResponsesRequest, {"input": "hi"} | fields))


def test_a_text_and_instructions() -> None:
    assert body_of(instructions="be brief")["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_items_of_a_turn_are_one_message() -> None:
    calls = [
        {"type": "function", "id": "c1", "function": {"name": "f", "arguments": "{}"}},
        {"type": "function", "id": "c2", "function": {"name": "g", "arguments": '{"a":1}'}},
    ]
    assert body_of(input=TURN)["messages"] == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning_content": "think",
            "content": [{"type": "text", "text": "I look"}],
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
    ]


def test_reasoning_without_its_text_is_left_out() -> None:
    sealed = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}
    assert len(body_of(input=[TURN[0], sealed])["messages"]) == 1


def test_tools() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    choice = {"type": "function", "name": "f"}
    body = body_of(tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body["parallel_tool_calls"] is False
    allowed = body_of(
        tools=[tool], tool_choice={"type": "allowed_tools", "mode": "required", "tools": [choice]}
    )
    inner = {"mode": "required", "tools": [body["tool_choice"]]}
    assert allowed["tool_choice"] == {"type": "allowed_tools", "allowed_tools": inner}
    assert body_of(tools=[], tool_choice="required")["tool_choice"] == "required"


def test_form_of_the_text() -> None:
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    body = body_of(text={"format": {"type": "json_schema"} | schema, "verbosity": "low"})
    assert body["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert body["verbosity"] == "low"
    assert body_of(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}


def test_other_fields() -> None:
    body = body_of(max_output_tokens=5, reasoning={"effort": "high"}, top_k=3, stream=True)
    assert body["max_completion_tokens"] == 5 and body["reasoning_effort"] == "high"
    assert body["top_k"] == 3 and body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        body_of(**fields)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


@pytest.mark.parametrize(
    ("param", "here"),
    [
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("reasoning_effort", "reasoning.effort"),
        ("tools[1].function.name", "tools[1].name"),
        ("messages", "input"),
        ("temperature", "temperature"),
    ],
)
def test_errors_name_the_fields_of_this_route(param: str, here: str) -> None:
    with pytest.raises(NotServedError) as caught, names_of_fields(FIELD_NAMES):
        raise NotServedError(f"{param} is wrong", param=param)
    assert (caught.value.param, str(caught.value)) == (here, f"{here} is wrong")


def test_an_error_of_a_message_names_no_item() -> None:
    with pytest.raises(RequestError) as caught, names_of_fields(FIELD_NAMES):
        raise RequestError("messages[7].tool_calls is wrong", param="messages[7].tool_calls")
    assert caught.value.param == "input"
    assert str(caught.value) == "input, as a chat: messages[7].tool_calls is wrong"


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
