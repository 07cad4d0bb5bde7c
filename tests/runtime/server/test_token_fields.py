"""Fields of a request about tokens, and the tokens and counts in its answer."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EXPECTED = Callable[..., str]
ANSWERED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = http.post(path, json={"max_tokens": 7} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def stream(http: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = http.post(path, json={"max_tokens": 7, "stream": True} | fields)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def ids(text: str) -> list[int]:
    return list(map(ord, text))


def test_usage_in_every_chunk(http: httpx.Client, expected_text: EXPECTED) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, fields, num_prompt in (
        (COMPLETIONS, {"prompt": "hello"}, 5),
        (CHAT, {"messages": ANSWERED[:1]}, len("<user>hi<assistant>")),
    ):
        chunks = stream(http, path, **fields, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[-3:] == [6, 7, 7]
        assert counts == sorted(counts)
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {num_prompt}
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        plain = stream(http, path, **fields, stream_options={"include_usage": True})
        assert [chunk["choices"] for chunk in plain] == [chunk["choices"] for chunk in chunks]
        assert plain[-1]["usage"] == chunks[-1]["usage"]


def test_usage_in_every_chunk_is_of_all_prompts_and_choices(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields: dict[str, Any] = {"prompt": ["one", "three"], "n": 2, "stream_options": options}
    chunks = stream(http, COMPLETIONS, **fields)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 28
    assert chunks[-1]["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"include_usage": False}])
def test_no_usage_unless_included(http: httpx.Client, options: dict[str, bool]) -> None:
    chunks = stream(http, COMPLETIONS, prompt="hello", stream_options=options)
    assert all("usage" not in chunk for chunk in chunks)


def test_token_ids_of_completions(http: httpx.Client, expected_text: EXPECTED) -> None:
    fields: dict[str, Any] = {"prompt": ["one", "three"], "n": 2, "return_token_ids": True}
    choices = post(http, COMPLETIONS, **fields)["choices"]
    assert [choice["token_ids"] for choice in choices] == [ids(one["text"]) for one in choices]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        ids(prompt) for prompt in ("one", "one", "three", "three")
    ]
    streamed: list[list[int]] = [[], [], [], []]
    prompts: dict[int, list[int]] = {}
    for chunk in stream(http, COMPLETIONS, **fields):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            assert prompts.setdefault(choice["index"], choice["prompt_token_ids"])
    assert streamed == [choice["token_ids"] for choice in choices]
    assert prompts == {one["index"]: one["prompt_token_ids"] for one in choices}
    plain = post(http, COMPLETIONS, prompt="one")
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


def test_token_ids_of_chats(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"messages": ANSWERED[:1], "n": 2, "return_token_ids": True}
    whole = post(http, CHAT, **fields)
    assert whole["prompt_token_ids"] == ids("<user>hi<assistant>")
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["token_ids"] for choice in whole["choices"]] == [ids(text) for text in texts]
    chunks = stream(http, CHAT, **fields)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed: list[list[int]] = [[], []]
    for choice in (chunk["choices"][0] for chunk in chunks):
        streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == [choice["token_ids"] for choice in whole["choices"]]
    assert "prompt_token_ids" not in post(http, CHAT, messages=ANSWERED[:1])


def test_log_probabilities_of_the_prompt(http: httpx.Client) -> None:
    shown = [None, {str(ord("i")): {"logprob": -0.5, "rank": 3, "decoded_token": "i"}}]
    for path, fields in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": ANSWERED[:1]})):
        body = post(http, path, **fields, n=2, prompt_logprobs=1)
        choices = body["choices"] if path == COMPLETIONS else [body]
        for one in choices:
            assert len(one["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
        if path == COMPLETIONS:
            assert [choice["prompt_logprobs"] for choice in choices] == [shown, shown]
        plain = post(http, path, **fields)
        assert "prompt_logprobs" not in plain and "prompt_logprobs" not in plain["choices"][0]


def test_special_tokens(http: httpx.Client, engine: Any) -> None:
    for given in (None, True, False):
        post(http, COMPLETIONS, prompt="hi", add_special_tokens=given)
    assert engine.seen_special_tokens == [True, True, False]
    for given in (None, True, False):
        post(http, CHAT, messages=ANSWERED[:1], add_special_tokens=given)
    assert [prompt[0] == 1 for prompt, *_ in engine.seen[3:]] == [False, True, False]


def test_a_continued_message(http: httpx.Client, engine: Any) -> None:
    for fields, prompt in (
        ({}, "<user>hi<assistant>He</s><assistant>"),
        ({"continue_final_message": False}, "<user>hi<assistant>He</s><assistant>"),
        ({"add_generation_prompt": False}, "<user>hi<assistant>He</s>"),
        ({"continue_final_message": True}, "<user>hi<assistant>He"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<user>hi<assistant>He"),
    ):
        post(http, CHAT, messages=ANSWERED, **fields)
        assert "".join(map(chr, engine.seen[-1][0])) == prompt


def test_a_prompt_is_cut_from_the_left(http: httpx.Client, expected_text: EXPECTED) -> None:
    fields: dict[str, Any] = {"prompt": "hello world", "echo": True, "return_token_ids": True}
    (choice,) = post(http, COMPLETIONS, **fields, truncate_prompt_tokens=5)["choices"]
    assert choice["prompt_token_ids"] == ids("world")
    assert choice["text"] == "world" + expected_text("world", 7)
    chunks = stream(http, COMPLETIONS, **fields, truncate_prompt_tokens=5)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    (choice,) = post(http, COMPLETIONS, **fields, truncate_prompt_tokens=50)["choices"]
    assert choice["text"].startswith("hello world")
    body = post(http, CHAT, messages=ANSWERED, truncate_prompt_tokens=3, return_token_ids=True)
    assert body["prompt_token_ids"] == ids("nt>")


def test_a_prompt_is_cut_to_what_fits(http: httpx.Client) -> None:
    for max_tokens, num_kept in ((7, 4089), (None, 4080), (5000, 1)):
        body = {"prompt": "x" * 9000, "truncate_prompt_tokens": -1, "max_tokens": max_tokens}
        assert post(http, COMPLETIONS, **body)["usage"]["prompt_tokens"] == num_kept


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_prompt_is_scored_without_a_token(http: httpx.Client, engine: Any, name: str) -> None:
    fields: dict[str, Any] = {"prompt": ["hello", "to"], "echo": True, "n": 2, "max_tokens": None}
    fields[name] = 0
    options: dict[str, Any] = {"include_usage": True}
    asked: list[tuple[dict[str, Any], int]]
    asked = [({}, 0), ({"logprobs": 1}, 1), ({"prompt_logprobs": 3}, 3)]
    for scores, num_scored in asked:
        body = post(http, COMPLETIONS, **fields, **scores)
        assert engine.seen[-1][1].prompt_logprobs == num_scored
        assert [one["text"] for one in body["choices"]] == ["hello", "hello", "to", "to"]
        for choice in body["choices"]:
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
            assert ("prompt_logprobs" in choice) == ("prompt_logprobs" in scores)
        logprobs = body["choices"][0]["logprobs"]
        if "logprobs" in scores:
            assert logprobs["token_logprobs"] == [None, *[-0.5] * 4]
        else:
            assert logprobs is None
        assert body["usage"]["completion_tokens"] == 0
        chunks = stream(http, COMPLETIONS, **fields, **scores, stream_options=options)
        streamed = [one for chunk in chunks for one in chunk["choices"]]
        assert sorted(streamed, key=lambda one: one["index"]) == body["choices"]
        assert chunks[-1]["usage"] == body["usage"]


def test_rules_for_tokens_reach_the_engine(http: httpx.Client, engine: Any) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": ANSWERED[:1]})):
        rules = {"logit_bias": {"5": 2, "07": -1.5}, "bad_words": ["x"], "allowed_token_ids": [5, 7]}
        post(http, path, **prompt, **rules)
        params = engine.seen[-1][1]
        assert params.logit_bias == {5: 2.0, 7: -1.5}
        assert (params.bad_words, params.allowed_token_ids) == (("x",), (5, 7))


@pytest.mark.parametrize(
    ("rules", "param"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ],
)
def test_rules_that_cannot_be(http: httpx.Client, rules: dict[str, Any], param: str) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "a"} | rules)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
