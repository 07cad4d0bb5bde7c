"""Bodies of /v1/messages as bodies of chats, and which are refused."""

from typing import Any

import pytest
from corun.runtime.errors import RequestError
from corun.runtime.server.anthropic_chat import chat_body_of
from corun.runtime.server.anthropic_fields import AnthropicRequest
from corun.runtime.server.body import read_model

HI = {"role": "user", "content": "hi"}
TURNS: list[Any] = [
    HI,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "think", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}]},
            {"type": "text", "text": "and?"},
        ],
    },
]


def body_of(**fields: Any) -> dict[str, Any]:
    return chat_body_of(read_model(AnthropicRequest, {"messages": [HI]} | fields))


def test_a_system_message() -> None:
    blocks = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    for system in ("be brief", blocks):
        first, second = body_of(system=system)["messages"]
        assert first == {"role": "system", "content": system}
        assert second == {"role": "user", "content": [{"type": "text", "text": "hi"}]}


def test_calls_and_their_results() -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
    _, assistant, result, user = body_of(messages=TURNS)["messages"]
    assert assistant == {
        "role": "assistant",
        "reasoning_content": "think",
        "tool_calls": [call],
        "content": [{"type": "text", "text": "I look"}],
    }
    one = [{"type": "text", "text": "one"}]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": one}
    assert user == {"role": "user", "content": [{"type": "text", "text": "and?"}]}


def test_results_alone_are_the_whole_turn() -> None:
    empty = {"type": "tool_result", "tool_use_id": "c1"}
    messages = body_of(messages=[HI, {"role": "user", "content": [empty]}])["messages"]
    assert messages[1:] == [{"role": "tool", "tool_call_id": "c1", "content": ""}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_tools(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    body = body_of(tools=[tool], tool_choice=choice)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert {name: body[name] for name in expected} == expected


def test_other_fields() -> None:
    schema = {"type": "object"}
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    body = body_of(
        max_tokens=5, stop_sequences=["x"], stream=True, thinking={"type": "disabled"}, output_config=form
    )
    assert (body["max_tokens"], body["stop"]) == (5, ["x"])
    assert body["stream_options"] == {"include_usage": True}
    assert (body["enable_thinking"], body["reasoning_effort"]) == (False, "low")
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"schema": schema}}
    assert "enable_thinking" not in body_of(thinking={"type": "adaptive"})


IMAGE = {"type": "image", "source": {"type": "base64"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "{}"}],
                    }
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        body_of(**fields)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)
