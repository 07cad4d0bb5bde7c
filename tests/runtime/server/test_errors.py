"""Every fault of a request gets one OpenAI-compatible error with the field and the limit."""

import json
from typing import Any

import httpx
import msgspec
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CALLER = {"role": "assistant", "content": None}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def check_error(response: httpx.Response, status: int, code: str, param: str | None, *parts: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    for part in parts:
        assert part in error["message"], error["message"]
    assert len(error["message"]) < 500


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi"} | fields).encode()


def chat(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": messages or [USER]} | fields).encode()


BAD_BODIES = [
    # The bytes.
    (COMPLETIONS, b"", 400, "invalid_json", None, "empty"),
    (COMPLETIONS, b"{", 400, "invalid_json", None, "not valid JSON", "line 1 column 1"),
    (COMPLETIONS, b'{"prompt": "hi",}', 400, "invalid_json", None, "trailing comma"),
    (COMPLETIONS, b'["hi"]', 400, "invalid_json", None, "an array"),
    (COMPLETIONS, b'{"prompt": "\xff"}', 400, "invalid_json", None, "UTF-8", "0xff", "offset 12"),
    (COMPLETIONS, b"\x1f\x8b\x08", 400, "invalid_json", None, "UTF-8"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "invalid_json", None, "not valid JSON"),
    (COMPLETIONS, b"[" * 50_000, 400, "invalid_json", None, "recursion limit"),
    (COMPLETIONS, b'{"n": ' + b"1" * 9_000 + b"}", 400, "invalid_json", None, "out of range"),
    (COMPLETIONS, b" " * 100_001, 413, "body_too_large", None, "100001", "100000", "--max-body"),
    # Types and absurd numbers.
    (COMPLETIONS, completion(max_tokens="9"), 400, "invalid_type", "max_tokens", '"9"', "integer"),
    (COMPLETIONS, completion(max_tokens=True), 400, "invalid_type", "max_tokens", "true (a bool"),
    (COMPLETIONS, completion(max_tokens=1.5), 400, "invalid_type", "max_tokens", "1.5"),
    (
        COMPLETIONS,
        completion(max_tokens=0),
        400,
        "invalid_request_error",
        "max_tokens",
        "0",
        "[1",
        "echo",
        "prompt_logprobs",
    ),
    (
        CHAT,
        chat(USER, max_completion_tokens=0),
        400,
        "invalid_request_error",
        "max_completion_tokens",
        "max_completion_tokens is 0",
        "prompt_logprobs",
    ),
    (
        COMPLETIONS,
        completion(max_tokens=-1, echo=True),
        400,
        "invalid_request_error",
        "max_tokens",
        "-1",
        "[0",
    ),
    (
        COMPLETIONS,
        completion(max_tokens=0, min_tokens=1, echo=True),
        400,
        "invalid_request_error",
        "min_tokens",
        "exceeds max_tokens (0)",
    ),
    (COMPLETIONS, completion(max_tokens=10**30), 400, "invalid_request_error", "max_tokens"),
    (COMPLETIONS, completion(max_tokens=10**300), 400, "invalid_request_error", "max_tokens"),
    (
        COMPLETIONS,
        completion(max_completion_tokens=-4),
        400,
        "invalid_request_error",
        "max_completion_tokens",
        "max_completion_tokens is -4",
    ),
    (
        COMPLETIONS,
        completion(max_tokens=3, max_completion_tokens=4),
        400,
        "invalid_value",
        "max_completion_tokens",
        "3",
        "4",
    ),
    (
        COMPLETIONS,
        b'{"prompt": "hi", "temperature": 1e400}',
        400,
        "invalid_type",
        "temperature",
        "inf",
        "finite",
    ),
    (
        COMPLETIONS,
        b'{"prompt": "hi", "temperature": NaN}',
        400,
        "invalid_type",
        "temperature",
        "nan",
        "finite",
    ),
    (COMPLETIONS, completion(temperature=-1), 400, "invalid_request_error", "temperature", "-1"),
    (COMPLETIONS, completion(temperature=10**400), 400, "invalid_type", "temperature", "1329 bits"),
    (COMPLETIONS, completion(temperature=False), 400, "invalid_type", "temperature", "false"),
    (COMPLETIONS, completion(top_p=1.01), 400, "invalid_request_error", "top_p", "1.01", "(0.0"),
    (COMPLETIONS, completion(top_k=-2), 400, "invalid_request_error", "top_k", "-2"),
    (COMPLETIONS, completion(min_p=2), 400, "invalid_request_error", "min_p", "2"),
    (COMPLETIONS, completion(n=0), 400, "invalid_request_error", "n", "0", "128"),
    (COMPLETIONS, completion(n=129), 400, "invalid_request_error", "n", "129", "128"),
    (COMPLETIONS, completion(seed=2**64), 400, "invalid_request_error", "seed"),
    (
        COMPLETIONS,
        completion(min_tokens=9, max_tokens=5),
        400,
        "invalid_request_error",
        "min_tokens",
        "9",
        "5",
    ),
    (
        COMPLETIONS,
        completion(presence_penalty=3),
        400,
        "invalid_request_error",
        "presence_penalty",
        "3",
        "2.0",
    ),
    (COMPLETIONS, completion(repetition_penalty=0), 400, "invalid_request_error", "repetition_penalty", "0"),
    (COMPLETIONS, completion(logprobs=21), 400, "invalid_request_error", "logprobs", "21", "20"),
    (COMPLETIONS, completion(logprobs=True), 400, "invalid_type", "logprobs", "true"),
    (COMPLETIONS, completion(stream="yes"), 400, "invalid_type", "stream", '"yes"'),
    (COMPLETIONS, completion(stop=5), 400, "invalid_type", "stop", "5", "an integer"),
    (COMPLETIONS, completion(stop=["a", None]), 400, "invalid_type", "stop[1]", "null"),
    (COMPLETIONS, completion(stop=["a"] * 17), 400, "invalid_request_error", "stop", "17", "16"),
    (COMPLETIONS, completion(stop=""), 400, "invalid_request_error", "stop", "empty"),
    (COMPLETIONS, completion(stop_token_ids=[1, "2"]), 400, "invalid_type", "stop_token_ids[1]"),
    (COMPLETIONS, completion(logit_bias={"a": 1}), 400, "invalid_type", "logit_bias", '"a"', "token ids"),
    (COMPLETIONS, completion(logit_bias={"-1": 1}), 400, "invalid_type", "logit_bias", '"-1"'),
    (COMPLETIONS, completion(logit_bias={"1": "x"}), 400, "invalid_type", "logit_bias.1", '"x"'),
    (COMPLETIONS, completion(logit_bias=[1]), 400, "invalid_type", "logit_bias", "an array"),
    (COMPLETIONS, completion(bad_words="no"), 400, "invalid_type", "bad_words", '"no"'),
    (COMPLETIONS, completion(allowed_token_ids=["1"]), 400, "invalid_type", "allowed_token_ids[0]"),
    (
        COMPLETIONS,
        completion(prompt_logprobs=21),
        400,
        "invalid_request_error",
        "prompt_logprobs",
        "21",
        "20",
    ),
    (CHAT, chat(prompt_logprobs=1, stream=True), 400, "invalid_value", "stream", "stream"),
    (COMPLETIONS, completion(model=7), 400, "invalid_type", "model", "7", "string"),
    (COMPLETIONS, completion(cache_salt=[]), 400, "invalid_type", "cache_salt", "an array"),
    (
        COMPLETIONS,
        completion(predicted_output_tokens=0),
        400,
        "invalid_request_error",
        "predicted_output_tokens",
        "is 0",
        "1",
    ),
    (CHAT, chat(predicted_output_tokens=-3), 400, "invalid_request_error", "predicted_output_tokens", "-3"),
    (
        COMPLETIONS,
        completion(predicted_output_tokens=10**30),
        400,
        "invalid_request_error",
        "predicted_output_tokens",
        "2147483647",
    ),
    (
        COMPLETIONS,
        completion(predicted_output_tokens="9"),
        400,
        "invalid_type",
        "predicted_output_tokens",
        '"9"',
    ),
    (
        COMPLETIONS,
        completion(stream_options={"include_usage": True}),
        400,
        "invalid_value",
        "stream_options",
        "stream is not true",
    ),
    (
        COMPLETIONS,
        completion(stream=True, stream_options={"include_usages": True}),
        400,
        "unknown_field",
        "stream_options.include_usages",
        "'include_usage'",
    ),
    # Prompts.
    (COMPLETIONS, b"{}", 400, "missing_field", "prompt", "prompt"),
    (COMPLETIONS, completion(prompt=None), 400, "invalid_type", "prompt", "null"),
    (COMPLETIONS, completion(prompt=""), 400, "empty_prompt", "prompt"),
    (COMPLETIONS, completion(prompt=[]), 400, "empty_prompt", "prompt"),
    (COMPLETIONS, completion(prompt=["a", ""]), 400, "empty_prompt", "prompt[1]"),
    (COMPLETIONS, completion(prompt=[[1], []]), 400, "empty_prompt", "prompt[1]"),
    (COMPLETIONS, completion(prompt={"text": "a"}), 400, "invalid_type", "prompt", "an object"),
    (COMPLETIONS, completion(prompt=[1, "a"]), 400, "invalid_type", "prompt[1]", '"a"'),
    (COMPLETIONS, completion(prompt=[1, True]), 400, "invalid_type", "prompt[1]", "true"),
    (COMPLETIONS, completion(prompt=[1, 2.0]), 400, "invalid_type", "prompt[1]", "2.0"),
    (COMPLETIONS, completion(prompt=["a", [1]]), 400, "invalid_type", "prompt[1]"),
    (COMPLETIONS, completion(prompt=[[1], "a"]), 400, "invalid_type", "prompt[1]"),
    (
        COMPLETIONS,
        completion(prompt="x" * 5000),
        400,
        "context_length_exceeded",
        "prompt",
        "5000",
        "4095",
        "this model's maximum context length is 4096 tokens",
        "--max-model-len",
    ),
    (
        COMPLETIONS,
        completion(prompt=["x"] * 133, n=2),
        400,
        "too_many_sequences",
        "prompt",
        "266",
        "264",
        "--max-num-waiting",
    ),
    (
        CHAT,
        chat(USER | {"content": "x" * 5000}),
        400,
        "context_length_exceeded",
        "messages",
        "5017",
        "this model's maximum context length is 4096 tokens",
    ),
    (
        COMPLETIONS,
        completion(truncate_prompt_tokens=0),
        400,
        "invalid_request_error",
        "truncate_prompt_tokens",
        "is 0",
        "1 or more",
    ),
    (
        COMPLETIONS,
        completion(truncate_prompt_tokens=True),
        400,
        "invalid_type",
        "truncate_prompt_tokens",
        "true",
    ),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "invalid_value",
        "continue_final_message",
        "add_generation_prompt",
    ),
    (COMPLETIONS, completion(prompt=[-1], echo=True), 400, "invalid_request_error", "prompt", "-1"),
    # Messages.
    (CHAT, b"{}", 400, "missing_field", "messages", "messages"),
    (CHAT, b'{"messages": []}', 400, "empty_messages", "messages"),
    (CHAT, b'{"messages": "hi"}', 400, "invalid_type", "messages", '"hi"'),
    (CHAT, chat("hi"), 400, "invalid_type", "messages[0]", '"hi"'),
    (CHAT, chat(USER, {"content": "hi"}), 400, "invalid_type", "messages[1].role", "null", "user"),
    (CHAT, chat(USER | {"role": "boss"}), 400, "invalid_type", "messages[0].role", "boss"),
    (CHAT, chat({"role": "user"}), 400, "invalid_type", "messages[0].content", "null"),
    (CHAT, chat({"role": "tool", "content": None}), 400, "invalid_type", "messages[0].content", "null"),
    (CHAT, chat(USER | {"role": "function"}), 400, "invalid_type", "messages[0].role", "tool"),
    (CHAT, chat(USER | {"contents": 1}), 400, "unknown_field", "messages[0].contents", "'content'"),
    (CHAT, chat(USER | {"reasoning_content": 5}), 400, "invalid_type", "messages[0].reasoning_content"),
    (CHAT, chat(USER | {"tool_calls": [CALL]}), 400, "invalid_value", "messages[0].tool_calls", "'user'"),
    (CHAT, chat(CALLER | {"tool_calls": ""}), 400, "invalid_type", "messages[0].tool_calls", "a list"),
    (CHAT, chat(CALLER | {"tool_calls": CALL}), 400, "invalid_type", "messages[0].tool_calls", "a list"),
    (CHAT, chat(CALLER | {"tool_calls": ["f"]}), 400, "invalid_type", "messages[0].tool_calls[0]", '"f"'),
    (
        CHAT,
        chat(CALLER | {"tool_calls": [CALL | {"id": 5}]}),
        400,
        "invalid_type",
        "messages[0].tool_calls[0].id",
    ),
    (
        CHAT,
        chat(CALLER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
        400,
        "invalid_type",
        "messages[0].tool_calls[0].function.arguments",
        "JSON",
    ),
    (
        CHAT,
        chat(CALLER | {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}),
        400,
        "invalid_type",
        "messages[0].tool_calls[0].function.arguments",
        "an array",
    ),
    (CHAT, chat(USER | {"content": [5]}), 400, "invalid_type", "messages[0].content[0]", "5"),
    (
        CHAT,
        chat(USER | {"content": [{"type": "text"}]}),
        400,
        "invalid_type",
        "messages[0].content[0].text",
        "null",
    ),
    (CHAT, chat(USER | {"name": 5}), 400, "invalid_type", "messages[0].name"),
    (
        CHAT,
        chat(USER | {"content": "refuse me"}),
        400,
        "invalid_request_error",
        "messages",
        "chat template",
        "alternate",
    ),
    (CHAT, chat(logprobs=3), 400, "invalid_type", "logprobs", "3"),
    (CHAT, chat(top_logprobs=3), 400, "invalid_value", "top_logprobs", "logprobs is not true"),
    (
        CHAT,
        chat(logprobs=True, top_logprobs=21),
        400,
        "invalid_request_error",
        "top_logprobs",
        "top_logprobs is 21",
        "20",
    ),
    # Names.
    (COMPLETIONS, completion(model="uper"), 404, "model_not_found", "model", "'uper'", "'upper'"),
    (COMPLETIONS, completion(model="tiny:digit"), 404, "model_not_found", "model", "'digits'"),
    (COMPLETIONS, completion(model="gpt-4o"), 404, "model_not_found", "model", "'tiny'", "'upper'"),
    (COMPLETIONS, completion(model=""), 404, "model_not_found", "model"),
    (COMPLETIONS, completion(model="m" * 9999), 404, "model_not_found", "model", "…"),
    (CHAT, chat(model="broken"), 400, "adapter_failed", "model", "failed", "rank 512"),
    # Fields.
    (COMPLETIONS, completion(max_token=5), 400, "unknown_field", "max_token", "'max_tokens'"),
    (COMPLETIONS, completion(temprature=1), 400, "unknown_field", "temprature", "'temperature'"),
    (COMPLETIONS, completion(maxTokens=5), 400, "unknown_field", "maxTokens", "'max_tokens'"),
    (COMPLETIONS, completion(**{"top-p": 1}), 400, "unknown_field", "top-p", "'top_p'"),
    (COMPLETIONS, completion(messages=[]), 400, "not_served", "messages", CHAT),
    (CHAT, chat(prompt="hi"), 400, "not_served", "prompt", COMPLETIONS),
    (CHAT, chat(**{f"{i}" * 9: 1 for i in range(65)}), 400, "unknown_field", "646464646464646464", "64"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param", "parts"),
    [(path, body, status, code, param, parts) for path, body, status, code, param, *parts in BAD_BODIES],
)
def test_bad_body(
    http: httpx.Client, path: str, body: bytes, status: int, code: str, param: str | None, parts: list[str]
) -> None:
    check_error(http.post(path, content=body), status, code, param, *parts)
    assert http.get("/health").status_code == 200  # the server goes on


NOT_SERVED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "best_of": 2,
    "use_beam_search": True,
    "suffix": "after",
    "lora_path": "sql",
    "adapter_id": "sql",
    "max_new_tokens": 5,
    "extra_body": {"top_k": 5},
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "store": True,
    "chat_template": "{{ 1 }}",
}


OF_CHATS = {"tools", "tool_choice", "reasoning_effort", "verbosity"}  # served there


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *((COMPLETIONS, field) for field in NOT_SERVED),
        *((CHAT, field) for field in NOT_SERVED if field not in OF_CHATS),
    ],
)
def test_not_served(http: httpx.Client, path: str, field: str) -> None:
    make = completion if path == COMPLETIONS else chat
    response = http.post(path, content=make(**{field: NOT_SERVED[field]}))
    check_error(response, 400, "not_served", field, field, "not served")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (CALLER | {"function_call": {"name": "f"}}, "messages[0].function_call"),
        (CALLER | {"content": "a", "prefix": True}, "messages[0].prefix"),
        (CALLER | {"tool_calls": [CALL | {"type": "custom"}]}, "messages[0].tool_calls[0].type"),
        (
            USER | {"content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[0].content[0].image_url",
        ),
        (USER | {"content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
    ],
)
def test_message_not_served(http: httpx.Client, message: dict[str, Any], param: str) -> None:
    check_error(http.post(CHAT, content=chat(message)), 400, "not_served", param)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "image"},
        {"type": "input_image", "image": "data:"},
        {"type": "input_audio"},
        {"type": "video_url", "video_url": {"url": "data:"}},
    ],
)
def test_parts_that_are_no_text(http: httpx.Client, part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "What is this?"}
    response = http.post(CHAT, content=chat(USER | {"content": [text, part]}))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("messages[0].content[1].")
    assert "this server takes text only" in message


def test_values_that_ask_for_nothing_pass(http: httpx.Client) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": 1,
        "suffix": None,
        "logit_bias": {},
        "modalities": ["text"],
        "store": False,
        "user": "me",
        "functions": None,
        "parallel_tool_calls": True,
        "service_tier": "auto",
    }
    assistant = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    body = chat(USER, assistant, USER, **neutral, max_tokens=1)
    assert http.post(CHAT, content=body).status_code == 200


def test_best_of_true_is_not_one(http: httpx.Client) -> None:
    check_error(
        http.post(COMPLETIONS, content=completion(best_of=True)),
        400,
        "not_served",
        "best_of",
        "only 1 is accepted",
    )


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 0}])
def test_streams_show_no_scores_of_prompts(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = http.post(COMPLETIONS, content=completion(stream=True, **fields))
    check_error(response, 400, "invalid_value", "stream", "streams do not show")


@pytest.mark.parametrize("name", ["chat_template", "self"])
def test_reserved_template_argument(http: httpx.Client, name: str) -> None:
    response = http.post(CHAT, content=chat(chat_template_kwargs={name: "{{ 1 }}"}))
    check_error(response, 400, "not_served", f"chat_template_kwargs.{name}")


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    check_error(http.get("/v2/nothing"), 404, "unknown_url", None, "/v2/nothing")
    check_error(http.post("/v1/embeddings", json={}), 404, "unknown_url", None, "/v1/embeddings")
    check_error(http.get("/v1/completions/"), 404, "unknown_url", None)
    response = http.get(COMPLETIONS)
    check_error(response, 405, "method_not_allowed", None, "POST", "GET")
    assert response.headers["allow"] == "POST"
    check_error(http.post("/v1/models", json={}), 405, "method_not_allowed", None, "GET")
    check_error(http.get("/v1/models/uper"), 404, "model_not_found", "model", "'upper'")


def test_errors_have_openai_types(http: httpx.Client, engine: Any) -> None:
    upper = engine.adapters["upper"]
    engine.adapters["leaving"] = msgspec.structs.replace(upper, name="leaving", state="draining")

    def type_of(response: httpx.Response) -> str:
        return str(response.json()["error"]["type"])

    assert type_of(http.post(COMPLETIONS, content=b"")) == "invalid_request_error"
    assert type_of(http.post(COMPLETIONS, content=completion(model="x"))) == "invalid_request_error"
    unavailable = http.post(COMPLETIONS, content=completion(model="leaving"))
    assert type_of(unavailable) == "service_unavailable_error"
    assert unavailable.headers["retry-after"] == "1"


def test_large_body_without_a_length(http: httpx.Client) -> None:
    chunks = (b"x" * 10_000 for _ in range(11))
    check_error(http.post(COMPLETIONS, content=chunks), 413, "body_too_large", None, "100000")


def test_hostile_body_is_cut_off(http: httpx.Client, server: Any) -> None:
    endless = (b"x" * 100_000 for _ in range(2000))
    try:
        response = http.post(COMPLETIONS, content=endless)
    except httpx.TransportError:
        return  # the server closed the connection while the client was still sending
    assert response.status_code == 413
