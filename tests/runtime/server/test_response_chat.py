"""Bodies of /v1/responses as bodies of chats, and which are refused."""

from typing import Any

import pytest
from corun.runtime.errors import NotServedError, RequestError
from corun.runtime.server.body import read_model
from corun.runtime.server.response_chat import FIELD_NAMES, chat_body
from corun.runtime.server.response_fields import ResponsesRequest
from corun.runtime.server.translation import names_of_fields

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
