"""Structure, tools, reasoning and responses over HTTP, with a model whose answers are known."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from clients.openai_tools_script import CHECKS
from support.scripted_model import save_scripted_model
from support.serving import ANSWER_TIMEOUT_S, Served


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = tmp_path_factory.mktemp("models") / "scripted"
    save_scripted_model(model)
    with (
        Served(str(model), "--dtype", "float32", "--cpu-threads", "1") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("check", CHECKS)
def test_openai(client: openai.OpenAI, check: Callable[[openai.OpenAI, str], None]) -> None:
    check(client, "scripted")


def test_messages_of_anthropic(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    user = {"role": "user", "content": "How is the weather in Paris?"}
    body: dict[str, Any] = {
        "max_tokens": 100,
        "messages": [user],
        "tools": [{"name": "get_weather", "input_schema": schema}],
    }
    url = str(client.base_url) + "messages"
    called = httpx.post(url, json=body, timeout=ANSWER_TIMEOUT_S).json()
    (call,) = called["content"]
    assert (called["stop_reason"], call["input"]) == ("tool_use", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
    assistant = {"role": "assistant", "content": called["content"]}
    messages = [user, assistant, {"role": "user", "content": [result]}]
    told = httpx.post(url, json=body | {"messages": messages}, timeout=ANSWER_TIMEOUT_S).json()
    assert told["content"] == [{"type": "text", "text": "It is sunny."}]
    forced = body | {"tool_choice": {"type": "any"}, "stream": True}
    text = httpx.post(url, json=forced, timeout=ANSWER_TIMEOUT_S).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    pieces = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
    assert json.loads("".join(pieces)).keys() == {"city"}
