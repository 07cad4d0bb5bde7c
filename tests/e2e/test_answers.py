"""The answers of the served demo: correct, and the same in every form of request."""

import json
from typing import Any

import httpx
import pytest
from corun.runtime.demo import chat_prompt
from demo.tasks import unseen_examples
from openai import NotFoundError, OpenAI
from support.demo_answers import ADAPTERS, ALL_ADAPTERS, BASE, Question, ask_all, questions, share_right
from support.serving import Served

NUM_EXAMPLES = 50


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_adapters_are_right_and_the_base_is_not(server: Served) -> None:
    asked = {
        (model, task): questions(model, task, NUM_EXAMPLES) for task in ADAPTERS for model in (task, BASE)
    }
    texts = iter(ask_all(server.url, [question for group in asked.values() for question in group]))
    for (model, task), group in asked.items():
        share = share_right(group, [next(texts) for _ in group])
        if model == BASE:
            assert share <= 0.2, (task, share)
        else:
            assert share >= 0.8, (task, share)


def test_streams_of_many_adapters_at_once(server: Served) -> None:
    asked = [question for task in ADAPTERS for question in questions(task, task, 8, seed=1)]
    alone = [ask_all(server.url, [question])[0] for question in asked[::8]]
    texts = ask_all(server.url, asked, stream=True)
    assert texts[::8] == alone
    assert texts == ask_all(server.url, asked)
    assert share_right(asked, texts) >= 0.8


def test_models(client: OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {BASE, *ALL_ADAPTERS}
    for name in ALL_ADAPTERS:
        fields = models[name].to_dict()
        assert fields["parent"] == BASE
        assert str(fields["root"]).endswith(name)


def test_names_with_the_base_in_front(server: Served) -> None:
    text, answer = unseen_examples("upper", 1, 3)[0]
    plain, prefixed = ask_all(
        server.url, [Question("upper", text, answer), Question(f"{BASE}:upper", text, answer)]
    )
    assert plain == prefixed


def test_unknown_names(client: OpenAI) -> None:
    for name in ("uper", f"{BASE}:uper"):
        with pytest.raises(NotFoundError, match="upper"):
            client.completions.create(model=name, prompt="a")


def test_chat_is_a_completion_of_the_template(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="reverse", messages=[{"role": "user", "content": "planet"}], max_tokens=20
    )
    completion = client.completions.create(model="reverse", prompt=chat_prompt("planet"), max_tokens=20)
    assert chat.choices[0].message.content == completion.choices[0].text == "tenalp"
    assert chat.choices[0].finish_reason == completion.choices[0].finish_reason == "stop"
    for usage in (chat.usage, completion.usage):
        assert usage is not None
        assert usage.prompt_tokens == len("planet") + 2
        assert usage.completion_tokens == len("tenalp") + 1
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_system_message_asks_the_base_for_the_same(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=BASE,
        messages=[{"role": "system", "content": "upper"}, {"role": "user", "content": "hello world"}],
    )
    assert answer.choices[0].message.content == "HELLO WORLD"


def read_events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of one stream as received."""
    events = []
    with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        events.append(json.loads(line.removeprefix("data: ")))
    return events


@pytest.mark.parametrize("model", [BASE, "vowels"])
def test_completion_events(server: Served, model: str) -> None:
    body = {"model": model, "prompt": chat_prompt("a café in the evening"), "max_tokens": 40, "logprobs": 2}
    whole = server.post("/v1/completions", body).json()
    events = read_events(server.url, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert len(events) > 5
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    # The second time the prompt is known, but for its last block.
    found = usage.pop("prompt_tokens_details")["cached_tokens"]
    assert whole["usage"].pop("prompt_tokens_details")["cached_tokens"] <= found
    assert 0 < found < usage["prompt_tokens"]
    assert usage == whole["usage"]
    parts = [event["choices"][0] for event in events[:-1]]
    assert "".join(part["text"] for part in parts) == whole["choices"][0]["text"]
    assert [part["finish_reason"] for part in parts][-1] == whole["choices"][0]["finish_reason"]
    tokens = [token for part in parts for token in (part["logprobs"] or {}).get("tokens", [])]
    assert tokens == whole["choices"][0]["logprobs"]["tokens"]


def test_chat_events(server: Served) -> None:
    body = {"model": "add", "messages": [{"role": "user", "content": "12+34"}]}
    events = read_events(server.url, "/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == "46"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({event["id"] for event in events}) == 1


def test_metrics_move(server: Served) -> None:
    before = server.metrics()
    assert ask_all(server.url, [Question("upper", "evening", "EVENING")]) == ["EVENING"]
    after = server.metrics()

    def moved(name: str) -> float:
        return after[f"corun:{name}"] - before[f"corun:{name}"]

    assert moved("prompt_tokens_total") == len("evening") + 2
    assert moved("generation_tokens_total") == len("EVENING") + 1
    assert moved("request_success_total") == 1
    assert moved("engine_steps_total") >= 2
    assert moved("prompt_tokens_by_source_total") == moved("prompt_tokens_total")
    assert moved("prefix_cache_queries_total") == moved("prompt_tokens_total")
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert moved(f"{name}_count") == 1
        assert moved(f"{name}_sum") > 0
    assert after["corun:engine_alive"] == 1
    assert after["corun:num_requests_running"] == 0
    assert after["corun:kv_cache_usage_perc"] == 0
    assert after["corun:lora_adapter_loaded"] == len(ALL_ADAPTERS)
