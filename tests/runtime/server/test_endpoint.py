"""Completions and chat over real HTTP: streamed and not, silent for long, raw and with ``openai``."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import FakeEngine, expected_text

EXPECTED = Callable[..., str]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the JSON of all events; the stream must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 40} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def stream(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 40, "stream": True} | fields
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response)


@pytest.fixture(scope="module")
def client(module_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=module_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(http: httpx.Client, expected_text: EXPECTED) -> None:
    body = complete(http, model="tiny")
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "text": expected_text("hello", 40),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 40,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_equals_whole(http: httpx.Client) -> None:
    whole = complete(http)["choices"][0]
    chunks = stream(http, prompt="hello")
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_prompts_of_every_shape(http: httpx.Client, expected_text: EXPECTED) -> None:
    ids = [ord(character) for character in "hello"]
    for prompt in ("hello", ids, ["hello"], [ids]):
        body = complete(http, prompt=prompt)
        assert [choice["text"] for choice in body["choices"]] == [expected_text("hello", 40)]
    body = complete(http, prompt=["one", "three"], n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [
        expected_text(prompt, 40, choice=index) for prompt in ("one", "three") for index in (0, 1)
    ]
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 160,
        "total_tokens": 168,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_of_many_prompts_and_choices(http: httpx.Client, expected_text: EXPECTED) -> None:
    chunks = stream(http, prompt=["one", "three"], n=2, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 160
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    texts = [""] * 4
    ends = []
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert sorted(ends) == [0, 1, 2, 3]
    assert texts == [
        expected_text(prompt, 40, choice=index) for prompt in ("one", "three") for index in (0, 1)
    ]


def test_timing_when_asked_for(http: httpx.Client) -> None:
    assert "timing" not in complete(http)
    warm = complete(http, return_timing=True)["timing"]
    assert 0 < warm["time_to_first_token_s"] <= warm["total_s"]
    assert warm["adapter_starts"] == [None]
    cold = complete(http, model="digits", prompt=["one", "two"], n=2, return_timing=True)["timing"]
    assert cold["adapter_starts"] == [{"strategy": "assisted", "reason": "told to"}] * 4
    *_, last = stream(http, prompt="hello", model="digits", return_timing=True)
    assert last["choices"] == []
    assert last["timing"]["adapter_starts"] == cold["adapter_starts"][:1]
    assert "usage" not in last
    both = stream(http, prompt="hello", return_timing=True, stream_options={"include_usage": True})
    assert both[-1]["usage"]["completion_tokens"] == 40
    assert both[-1]["timing"]["adapter_starts"] == [None]


def test_timing_says_what_the_engine_waited_for(http: httpx.Client) -> None:
    told = {
        "time_to_first_token_s": 0.75,
        "parts_s": {"kv_memory": 0.5, "compute": 0.25},
        "num_preemptions": 2,
        "num_squashes": 1,
        "predicted_output_tokens": 50,
        "prompt_tokens": {"computed": 5, "cached": 0, "host_cached": 0},
        "output_tokens": 40,
    }
    timing = complete(http, n=2, return_timing=True)["timing"]
    assert timing["engine"] == [told, told]
    *_, last = stream(http, prompt="hello", return_timing=True)
    assert last["timing"]["engine"] == [told]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("asked", [True, None])
def test_a_request_that_fails_says_what_it_waited_for(
    http: httpx.Client, engine: Any, is_stream: bool, asked: bool | None
) -> None:
    engine.fail_after_tokens = 6 if is_stream else 0
    body = {"prompt": "hello", "stream": is_stream, "return_timing": asked}
    text = http.post("/v1/completions", json=body).text
    if is_stream:
        text = [event for event in text.split("\n\n") if event][-1].removeprefix("data: ")
    failed = json.loads(text)
    assert failed["error"]["message"] == "the step fell over"
    assert ("timing" in failed) == bool(asked)
    if asked:
        assert failed["timing"] == {
            "time_to_first_token_s": 0.75,
            "parts_s": {"kv_memory": 0.5, "compute": 0.25},
            "num_preemptions": 2,
            "num_squashes": 1,
            "predicted_output_tokens": 50,
        }


def test_echo(http: httpx.Client, expected_text: EXPECTED) -> None:
    ids = [ord(character) for character in "hello"]
    for prompt in ("hello", ids):
        body = complete(http, prompt=prompt, echo=True)
        assert body["choices"][0]["text"] == "hello" + expected_text("hello", 40)
        chunks = stream(http, prompt=prompt, echo=True)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == "hello" + expected_text("hello", 40)


def test_stop(http: httpx.Client, expected_text: EXPECTED) -> None:
    text = expected_text("hello", 40)
    for stop in ("€", ["never", "€"]):
        choice = complete(http, stop=stop)["choices"][0]
        assert choice["text"] == text[: text.index("€")]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "€")
    last = stream(http, prompt="hello", stop="€")[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "€")


def test_completion_logprobs(http: httpx.Client) -> None:
    logprobs = complete(http, logprobs=3, max_tokens=4)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["b", "a", "s", "e"]
    assert logprobs["token_logprobs"] == [-0.75] * 4
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] == {"b": -0.75, "bytes:\\xe2\\x82": -0.25, "zz": -2.0}
    chunks = stream(http, prompt="hello", logprobs=0, max_tokens=4)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 2, 3]
    assert parts[0]["top_logprobs"][0] == {"b": -0.75}


def test_chat_logprobs(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    fields = {"messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    whole = http.post("/v1/chat/completions", json=fields).json()["choices"][0]["logprobs"]
    assert len(whole["content"]) == 4
    assert whole["content"][0] == {
        "token": "b",
        "logprob": -0.75,
        "bytes": [98],
        "top_logprobs": [
            {"token": "bytes:\\xe2\\x82", "logprob": -0.25, "bytes": [0xE2, 0x82]},
            {"token": "b", "logprob": -0.75, "bytes": [98]},
        ],
    }
    parts = stream(http, "/v1/chat/completions", **fields)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in parts[1:]]
    assert [token for part in streamed for token in part["content"]] == whole["content"]


def test_chat(http: httpx.Client, engine: Any, expected_text: EXPECTED) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    fields = {"messages": messages, "max_completion_tokens": 30}
    body = http.post("/v1/chat/completions", json=fields).json()
    prompt = "<system>be brief<user>a\nb<assistant>"
    assert "".join(map(chr, engine.seen[-1][0])) == prompt
    choice = body["choices"][0]
    assert body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": expected_text(prompt, 30)}
    assert body["usage"]["prompt_tokens"] == len(prompt)
    chunks = stream(http, "/v1/chat/completions", max_tokens=None, **fields)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_chat_fills_the_context_by_default(http: httpx.Client, engine: Any) -> None:
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 4000}]})
    assert engine.seen[-1][1].max_tokens is None
    http.post("/v1/completions", json={"prompt": "x"})
    assert engine.seen[-1][1].max_tokens == 16


def test_template_arguments(http: httpx.Client, engine: Any) -> None:
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"preamble": "!"},
        "max_tokens": 1,
    }
    assert http.post("/v1/chat/completions", json=fields).status_code == 200
    assert "".join(map(chr, engine.seen[-1][0])) == "!<user>hi<assistant>"


def test_sampling_fields_reach_the_engine(http: httpx.Client, engine: Any) -> None:
    given = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 42,
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": 1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "bad_words": ["no"],
        "allowed_token_ids": [1, 2],
        "prompt_logprobs": 2,
    }
    complete(
        http,
        **given,
        logit_bias={"7": -100, "12": 2.5},
        user="me",
        cache_salt="tenant",
        predicted_output_tokens=7,
    )
    _, params, _, salt = engine.seen[-1]
    assert salt == "tenant"
    assert params.logit_bias == {7: -100.0, 12: 2.5}
    assert engine.seen_predictions[-1] == 7
    for name, value in given.items():
        wanted = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == wanted, name


def test_defaults_come_from_the_model(http: httpx.Client, engine: Any) -> None:
    complete(http)
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 20, 1.0)
    complete(http, temperature=0, top_k=None)
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_k) == (0.0, 20)


@pytest.mark.parametrize(
    ("model", "shown", "adapter"),
    [
        (None, "tiny", None),
        ("tiny", "tiny", None),
        ("alias", "alias", None),
        ("upper", "upper", "upper"),
        ("tiny:digits", "tiny:digits", "digits"),
        ("alias:upper", "alias:upper", "upper"),
    ],
)
def test_model_names(
    http: httpx.Client, engine: Any, model: str | None, shown: str, adapter: str | None
) -> None:
    body = complete(http, **({} if model is None else {"model": model}))
    assert body["model"] == shown
    assert engine.seen[-1][2] == adapter


def test_openai_client(server: Any, client: openai.OpenAI, expected_text: EXPECTED) -> None:
    done = client.completions.create(model="upper", prompt="hello", max_tokens=40)
    assert done.choices[0].text == expected_text("hello", 40, adapter="upper")
    messages: Any = [{"role": "user", "content": "hi"}]
    parts = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    collected = list(parts)
    text = "".join(part.choices[0].delta.content or "" for part in collected if part.choices)
    assert text == expected_text("<user>hi<assistant>", 40)
    assert collected[-1].usage is not None
    assert collected[-1].usage.completion_tokens == 40
    with pytest.raises(openai.NotFoundError, match="did you mean 'upper'"):
        client.completions.create(model="uper", prompt="hello")
    assert [model.id for model in client.models.list()] == ["tiny", "alias", "upper", "digits"]


def test_fifty_streams_at_once(server: Any, engine: Any, expected_text: EXPECTED) -> None:
    engine.tokens_per_output = 1
    limits = httpx.Limits(max_connections=50)
    with (
        httpx.Client(base_url=server.url, timeout=30, limits=limits) as http,
        ThreadPoolExecutor(50) as threads,
    ):
        prompts = [f"prompt {index}" for index in range(50)]
        answers = list(threads.map(lambda prompt: stream(http, prompt=prompt), prompts))
    for prompt, chunks in zip(prompts, answers, strict=True):
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == expected_text(prompt, 40)
    assert engine.num_open == 0
    assert engine.num_aborted == 0


COMMENT = ": keep-alive"
BODY = {"prompt": "hello", "max_tokens": 6, "stream": True}


@pytest.fixture
def silent(start_server: Callable[..., Any]) -> Iterator[Any]:
    """A server with an engine that is silent until the test releases it."""
    engine = FakeEngine()
    engine.held.set()
    yield start_server(engine, sse_keep_alive_s=0.02)
    engine.held.clear()


@pytest.mark.parametrize("hold_after_first", [True, False])
def test_comments_while_nothing_comes(silent: Any, hold_after_first: bool) -> None:
    silent.engine.hold_after_first = hold_after_first
    url = f"{silent.url}/v1/completions"
    with httpx.stream("POST", url, json=BODY, timeout=20) as response:
        lines = response.iter_lines()
        first = [next(lines) for _ in range(8)]
        assert first.count(COMMENT) >= 3
        assert first[0].startswith("data: " if hold_after_first else COMMENT)
        silent.engine.held.clear()
        events = [line for line in (*first, *lines) if line.startswith("data: {")]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == expected_text("hello", 6)


def test_an_error_after_a_comment_is_an_event(silent: Any) -> None:
    silent.engine.hold_after_first = False
    url = f"{silent.url}/v1/completions"
    with httpx.stream("POST", url, json=BODY, timeout=20) as response:
        lines = response.iter_lines()
        assert (response.status_code, next(lines)) == (200, COMMENT)
        silent.engine.fail_after_tokens = 0
        silent.engine.held.clear()
        *_, event = (line for line in lines if line.startswith("data: "))
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "the step fell over"


def test_the_openai_client_does_not_see_them(silent: Any) -> None:
    silent.engine.hold_after_first = False
    with openai.OpenAI(base_url=silent.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="hello", max_tokens=6, stream=True)
        silent.engine.held.clear()
        assert "".join(chunk.choices[0].text for chunk in stream) == expected_text("hello", 6)


def test_none_when_told_so(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(), sse_keep_alive_s=0)
    assert COMMENT not in httpx.post(f"{server.url}/v1/completions", json=BODY).text
