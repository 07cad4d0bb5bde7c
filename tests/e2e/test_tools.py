"""Tools with a real model, whose answers are random but for the grammar of its calls."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.answer_samples import ADD
from support.serving import Served

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<tool_call></tool_call>{% endif %}{% for m in messages %}<|user|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["km", "mile"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "convert", "parameters": SMALL}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "convert"}}
QUESTION = {"role": "user", "content": "hi"}
BODY = {"messages": [QUESTION], "tools": TOOLS, "temperature": 1.5, "max_tokens": 200}
OPTIONS = ("--cpu-threads", "1", "--memory-gib", "0.1")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path: Path = tmp_path_factory.mktemp("template") / "chat_template.jinja"
    path.write_text(TEMPLATE)
    with Served("--chat-template", str(path), *OPTIONS) as served, served.client() as http:
        yield http


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json=BODY | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def check_conversion(function: dict[str, Any]) -> None:
    assert function["name"] == "convert"
    arguments = json.loads(function["arguments"])
    assert arguments.keys() == {"x", "unit"}
    assert type(arguments["x"]) is int and 0 <= arguments["x"] <= 99
    assert arguments["unit"] in ("km", "mile")


@pytest.mark.parametrize("seed", range(4))
def test_a_named_function_is_called_with_valid_arguments(http: httpx.Client, seed: int) -> None:
    body = post(http, tool_choice=NAMED, seed=seed, parallel_tool_calls=False)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    check_conversion(call["function"])


def test_required_calls_are_valid_in_each_choice(http: httpx.Client) -> None:
    body = post(http, tool_choice="required", n=4, seed=1, parallel_tool_calls=False)
    for choice in body["choices"]:
        (call,) = choice["message"]["tool_calls"]
        if call["function"]["name"] == "convert":
            check_conversion(call["function"])
        else:
            assert call["function"] == {"name": "now", "arguments": "{}"}


def test_a_stream_has_the_same_call(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"tool_choice": NAMED, "seed": 3, "parallel_tool_calls": False}
    (whole,) = post(http, **fields)["choices"][0]["message"]["tool_calls"]
    pieces: list[dict[str, Any]] = []
    with http.stream("POST", CHAT, json=BODY | fields | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    pieces += choice["delta"].get("tool_calls", ())
    assert pieces[0]["function"]["name"] == whole["function"]["name"]
    assert len(pieces) > 2  # arguments arrive as they are written
    text = "".join(piece["function"]["arguments"] for piece in pieces)
    assert text == whole["function"]["arguments"]


def test_a_conversation_goes_on_after_a_call(http: httpx.Client) -> None:
    first = post(http, tool_choice=NAMED, seed=0, parallel_tool_calls=False)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1.6"}
    body = post(http, messages=[QUESTION, message, result], max_tokens=8)
    assert body["choices"][0]["finish_reason"] in ("length", "stop")


def test_keywords_that_are_not_served_are_named(http: httpx.Client) -> None:
    schema = ADD | {"properties": {"x": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    fields = {"messages": [QUESTION], "tools": tools, "tool_choice": "required"}
    response = http.post(CHAT, json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "tools"
    assert "uniqueItems" in error["message"]
