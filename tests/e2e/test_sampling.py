"""Sampling options over HTTP with the real engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from corun.runtime.demo import chat_prompt
from support.demo_answers import BASE
from support.serving import ANSWER_TIMEOUT_S, Served, wait_until

STORY = "One evening the old"
_END_ID = 260  # of <|end|>


def complete(server: Served, **body: Any) -> dict[str, Any]:
    """Send one request for completions and return the answer."""
    answer = server.post("/v1/completions", {"model": BASE, "prompt": STORY, **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda c: c["index"])]


def test_max_tokens_and_ignore_eos(server: Served) -> None:
    body = {"prompt": chat_prompt("hello"), "model": "upper", "max_tokens": 30}
    assert texts(complete(server, **body)) == ["HELLO"]
    longer = complete(server, **body, ignore_eos=True)
    assert longer["usage"]["completion_tokens"] == 30
    assert longer["choices"][0]["finish_reason"] == "length"
    assert texts(longer)[0].startswith("HELLO")
    shorter = complete(server, **{**body, "max_tokens": 3})
    assert texts(shorter) == ["HEL"]
    assert shorter["choices"][0]["finish_reason"] == "length"


def test_min_tokens(server: Served) -> None:
    body = {"prompt": chat_prompt("hello"), "model": "upper", "max_tokens": 30}
    answer = complete(server, **body, min_tokens=20)
    assert answer["usage"]["completion_tokens"] >= 20
    assert texts(answer)[0].startswith("HELLO")


def test_penalties(server: Served) -> None:
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = texts(complete(server, **body))[0]
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        varied = texts(complete(server, **body, **{penalty: 2.0}))[0]
        assert len(set(varied)) > len(set(plain)), penalty


def test_stop(server: Served) -> None:
    body = {"prompt": chat_prompt("one two three"), "model": "upper", "max_tokens": 30}
    answer = complete(server, **body, stop=[" TH", "never"])
    assert texts(answer) == ["ONE TWO"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == " TH"
    kept = complete(server, **body, stop=" TH", include_stop_str_in_output=True)
    assert texts(kept) == ["ONE TWO TH"]


@pytest.mark.parametrize("skip", [True, False])
def test_stop_strings_with_special_tokens(server: Served, skip: bool) -> None:
    body = {
        "prompt": chat_prompt("hello"),
        "model": "upper",
        "max_tokens": 30,
        "logprobs": 0,
        "skip_special_tokens": skip,
    }
    for stop, text in (("<|end|>", "HELLO"), ("LO<|end|>", "HEL"), (["never", "O<|end|>"], "HELL")):
        answer = complete(server, **body, stop=stop, n=2)
        assert texts(answer) == [text, text]
        assert answer["usage"]["completion_tokens"] == 2 * len("HELLO+")
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == (stop if isinstance(stop, str) else stop[1])
        assert choice["logprobs"]["tokens"] == [*"HELLO", "<|end|>"]
    # The same if the token ends no sequence and is sampled again.
    drawn = body | {"ignore_eos": True, "logit_bias": {str(_END_ID): 100}, "stop": "<|end|><|end|>"}
    for include, text in ((False, ""), (True, "<|end|><|end|>")):
        answer = complete(server, **drawn, include_stop_str_in_output=include)
        assert texts(answer) == [text]
        assert answer["usage"]["completion_tokens"] == 2
    later = complete(server, **drawn, min_tokens=5)
    assert later["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("skip", [True, False])
def test_stop_strings_with_special_tokens_in_streams_of_chats(server: Served, skip: bool) -> None:
    body = {
        "model": "upper",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stop": "LO<|end|>",
        "ignore_eos": True,
        "max_tokens": 30,
        "skip_special_tokens": skip,
        "stream_options": {"include_usage": True},
    }
    answer = server.post("/v1/chat/completions", body)
    chunks = [json.loads(line[5:]) for line in answer.text.splitlines() if "{" in line]
    choices = [one["choices"][0] for one in chunks if one["choices"]]
    assert "".join(one["delta"].get("content") or "" for one in choices) == "HEL"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "LO<|end|>")
    assert chunks[-1]["usage"]["completion_tokens"] == len("HELLO+")


def test_logprobs(server: Served) -> None:
    body = {"prompt": chat_prompt("hello"), "model": "upper", "max_tokens": 4, "temperature": 0}
    choice = complete(server, **body, logprobs=3)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("HELL")
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, logprob, top in rows:
        assert logprob <= 0
        assert logprob == top[token] == max(top.values())
        assert 3 <= len(top) <= 4


def test_chat_logprobs(server: Served) -> None:
    body = {
        "model": "upper",
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = server.post("/v1/chat/completions", body).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content][:2] == ["H", "I"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


def test_choices_with_a_seed_repeat(server: Served) -> None:
    body = {"n": 2, "seed": 7, "temperature": 1.0, "max_tokens": 24}
    first = complete(server, **body)
    assert texts(first) == texts(complete(server, **body))
    assert texts(first)[0] != texts(first)[1]
    assert texts(first) != texts(complete(server, **{**body, "seed": 8}))
    assert first["usage"]["completion_tokens"] <= 48


def test_seeded_text_does_not_depend_on_the_batch(server: Served) -> None:
    bodies = [
        {"model": model, "prompt": STORY, "seed": seed, "temperature": 1.0, "max_tokens": 16}
        for seed in range(6)
        for model in (BASE, "upper", "reverse")
    ]
    alone = [texts(complete(server, **body)) for body in bodies]

    async def together() -> list[list[str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
            posts = (client.post("/v1/completions", json=body) for body in bodies)
            return [texts(answer.json()) for answer in await asyncio.gather(*posts)]

    assert asyncio.run(together()) == alone


def test_several_prompts_and_token_ids(server: Served) -> None:
    first, second = chat_prompt("hello"), chat_prompt("two words")
    body = {"model": "upper", "max_tokens": 20, "temperature": 0}
    both = complete(server, **body, prompt=[first, second])
    assert texts(both) == ["HELLO", "TWO WORDS"]
    ids = server.post("/tokenize", {"prompt": first}).json()["tokens"]
    assert texts(complete(server, **body, prompt=ids)) == ["HELLO"]
    twice = complete(server, **body, prompt=[ids, ids], n=2, seed=1)
    assert texts(twice) == ["HELLO"] * 4
    assert twice["usage"]["prompt_tokens"] == 2 * len(ids)


@pytest.mark.parametrize(
    ("body", "status", "parts"),
    [
        ({"prompt": "a" * 600}, 400, ["600", "512"]),
        ({"prompt": [1, 99999]}, 400, ["99999", "261"]),
        ({"prompt": ""}, 400, ["empty"]),
        ({"max_tokens": -1}, 400, ["max_tokens", "-1"]),
        ({"temperature": 1e9}, 400, ["temperature"]),
        ({"best_of": 3}, 400, ["best_of"]),
        ({"min_tokens": 2, "stop_token_ids": list(range(262))}, 400, ["no token can be drawn", "min_tokens"]),
        ({"model": "nothing"}, 404, ["nothing"]),
    ],
)
def test_wrong_requests(server: Served, body: dict[str, Any], status: int, parts: list[str]) -> None:
    answer = server.post("/v1/completions", {"model": BASE, "prompt": "a", **body})
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    for part in parts:
        assert part in message


def test_clients_that_leave_free_what_they_used(server: Served) -> None:
    num_streams, max_tokens = 8, 480
    before = server.metrics()

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
            await asyncio.gather(*(read_first_event(client, max_tokens) for _ in range(num_streams)))

    asyncio.run(leave())
    wait_until(lambda: server.metrics()["corun:num_requests_running"] == 0)
    after = server.metrics()
    assert after["corun:kv_cache_usage_perc"] == 0
    assert after["corun:num_requests_waiting"] == 0
    name = "corun:generation_tokens_total"
    assert 0 < after[name] - before[name] < num_streams * max_tokens


async def read_first_event(client: httpx.AsyncClient, max_tokens: int) -> None:
    """Start a long stream, and close the connection when it has begun."""
    body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            assert line.startswith("data: ")
            break


def test_rules_for_tokens(server: Served) -> None:
    body = {"prompt": chat_prompt("hello"), "model": "upper", "max_tokens": 30, "temperature": 0}
    assert texts(complete(server, **body, bad_words=["L"])) != ["HELLO"]
    assert "L" not in texts(complete(server, **body, bad_words=["L"]))[0]
    tokens = server.post("/tokenize", {"prompt": "XY", "add_special_tokens": False}).json()["tokens"]
    only = texts(complete(server, **body, allowed_token_ids=tokens, ignore_eos=True))[0]
    assert set(only) <= set("XY") and len(only) == 30
    biased = texts(complete(server, **body, logit_bias={str(tokens[0]): 100}, ignore_eos=True))[0]
    assert biased == "X" * 30
    for rules, message in (
        ({"logit_bias": {"99999": 1}}, "names token 99999"),
        ({"allowed_token_ids": [99999]}, "names token 99999"),
        ({"logit_bias": {str(key): 1 for key in range(1025)}}, "--max-logit-bias"),
        ({"allowed_token_ids": tokens[:1], "bad_words": ["X"]}, "no token can be drawn"),
    ):
        answer = server.post("/v1/completions", body | rules)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]


def test_a_multiple_choice_task_is_scored_as_evaluations_do_it(server: Served) -> None:
    """Echo with log-probabilities: those of a prompt are those that its continuation had."""
    prompt = chat_prompt("hello")
    body = {"model": "upper", "temperature": 0, "logprobs": 2}
    said = complete(server, **body, prompt=prompt, max_tokens=5, ignore_eos=True)["choices"][0]
    scored = complete(server, **body, prompt=prompt + said["text"], echo=True, max_tokens=1)
    columns = scored["choices"][0]["logprobs"]
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    assert len({len(column) for column in columns.values()}) == 1
    num = len(said["logprobs"]["tokens"])
    before = slice(-1 - num, -1)  # followed by the one token that is always generated
    assert columns["tokens"][before] == said["logprobs"]["tokens"]
    for found, expected in zip(
        columns["token_logprobs"][before], said["logprobs"]["token_logprobs"], strict=True
    ):
        assert abs(found - expected) < 1e-2  # in bfloat16, and in other batches
    assert scored["choices"][0]["text"].startswith(prompt + said["text"])
    # The same without a token: again where the prefix is in the cache, several at once, with n.
    alone = {**body, "prompt": [prompt + said["text"], prompt], "echo": True, "max_tokens": 0}
    complete(server, **{**body, "prompt": prompt + said["text"], "max_tokens": 1})
    for _ in range(2):
        answer = complete(server, **alone, n=2)
        assert answer["usage"]["completion_tokens"] == 0
        assert [one["text"] for one in answer["choices"][::2]] == alone["prompt"]
        for choice, expected in zip(answer["choices"], [columns] * 2, strict=False):
            assert choice["finish_reason"] == "length"
            assert choice["logprobs"]["tokens"] == expected["tokens"][:-1]
            for found, known in zip(
                choice["logprobs"]["token_logprobs"][1:], expected["token_logprobs"][1:-1], strict=True
            ):
                assert abs(found - known) < 1e-2
    plain = complete(server, model="upper", prompt=prompt, echo=True, max_tokens=0, stop="e")
    assert texts(plain) == [prompt]
