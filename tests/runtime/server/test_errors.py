"""Every fault of a request gets one OpenAI-compatible error with the field and the limit."""

import json
from typing import Any

import httpx
import msgspec
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BAD = "invalid_request_error"
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


# By route: a body, the error's code and field, and parts of its message.
BAD_COMPLETIONS: list[tuple[Any, ...]] = [
    # The bytes.
    (b"", "invalid_json", None, "empty"),
    (b"{", "invalid_json", None, "not valid JSON", "line 1 column 1"),
    (b'{"prompt": "hi",}', "invalid_json", None, "trailing comma"),
    (b'["hi"]', "invalid_json", None, "an array"),
    (b'{"prompt": "\xff"}', "invalid_json", None, "UTF-8", "0xff", "offset 12"),
    (b"\x1f\x8b\x08", "invalid_json", None, "UTF-8"),
    (b'{"prompt": "\\ud800"}', "invalid_json", None, "not valid JSON"),
    (b"[" * 50_000, "invalid_json", None, "recursion limit"),
    (b'{"n": ' + b"1" * 9_000 + b"}", "invalid_json", None, "out of range"),
    (b" " * 100_001, "body_too_large", None, "100001", "100000", "--max-body"),
    # Types and absurd numbers.
    (completion(max_tokens="9"), "invalid_type", "max_tokens", '"9"', "integer"),
    (completion(max_tokens=True), "invalid_type", "max_tokens", "true (a bool"),
    (completion(max_tokens=1.5), "invalid_type", "max_tokens", "1.5"),
    (completion(max_tokens=0), BAD, "max_tokens", "0", "[1", "echo", "prompt_logprobs"),
    (completion(max_tokens=-1, echo=True), BAD, "max_tokens", "-1", "[0"),
    (completion(max_tokens=0, min_tokens=1, echo=True), BAD, "min_tokens", "exceeds max_tokens (0)"),
    (completion(max_tokens=10**30), BAD, "max_tokens"),
    (completion(max_tokens=10**300), BAD, "max_tokens"),
    (completion(max_completion_tokens=-4), BAD, "max_completion_tokens", "max_completion_tokens is -4"),
    (completion(max_tokens=3, max_completion_tokens=4), "invalid_value", "max_completion_tokens", "3", "4"),
    (b'{"prompt": "hi", "temperature": 1e400}', "invalid_type", "temperature", "inf", "finite"),
    (b'{"prompt": "hi", "temperature": NaN}', "invalid_type", "temperature", "nan", "finite"),
    (completion(temperature=-1), BAD, "temperature", "-1"),
    (completion(temperature=10**400), "invalid_type", "temperature", "1329 bits"),
    (completion(temperature=False), "invalid_type", "temperature", "false"),
    (completion(top_p=1.01), BAD, "top_p", "1.01", "(0.0"),
    (completion(top_k=-2), BAD, "top_k", "-2"),
    (completion(min_p=2), BAD, "min_p", "2"),
    (completion(n=0), BAD, "n", "0", "128"),
    (completion(n=129), BAD, "n", "129", "128"),
    (completion(seed=2**64), BAD, "seed"),
    (completion(min_tokens=9, max_tokens=5), BAD, "min_tokens", "9", "5"),
    (completion(presence_penalty=3), BAD, "presence_penalty", "3", "2.0"),
    (completion(repetition_penalty=0), BAD, "repetition_penalty", "0"),
    (completion(logprobs=21), BAD, "logprobs", "21", "20"),
    (completion(logprobs=True), "invalid_type", "logprobs", "true"),
    (completion(stream="yes"), "invalid_type", "stream", '"yes"'),
    (completion(stop=5), "invalid_type", "stop", "5", "an integer"),
    (completion(stop=["a", None]), "invalid_type", "stop[1]", "null"),
    (completion(stop=["a"] * 17), BAD, "stop", "17", "16"),
    (completion(stop=""), BAD, "stop", "empty"),
    (completion(stop_token_ids=[1, "2"]), "invalid_type", "stop_token_ids[1]"),
    (completion(logit_bias={"a": 1}), "invalid_type", "logit_bias", '"a"', "token ids"),
    (completion(logit_bias={"-1": 1}), "invalid_type", "logit_bias", '"-1"'),
    (completion(logit_bias={"1": "x"}), "invalid_type", "logit_bias.1", '"x"'),
    (completion(logit_bias=[1]), "invalid_type", "logit_bias", "an array"),
    (completion(bad_words="no"), "invalid_type", "bad_words", '"no"'),
    (completion(allowed_token_ids=["1"]), "invalid_type", "allowed_token_ids[0]"),
    (completion(prompt_logprobs=21), BAD, "prompt_logprobs", "21", "20"),
    (completion(model=7), "invalid_type", "model", "7", "string"),
    (completion(cache_salt=[]), "invalid_type", "cache_salt", "an array"),
    (completion(predicted_output_tokens=0), BAD, "predicted_output_tokens", "is 0", "1"),
    (completion(predicted_output_tokens=10**30), BAD, "predicted_output_tokens", "2147483647"),
    (completion(predicted_output_tokens="9"), "invalid_type", "predicted_output_tokens", '"9"'),
    (
        completion(stream_options={"include_usage": True}),
        "invalid_value",
        "stream_options",
        "stream is not true",
    ),
    (
        completion(stream=True, stream_options={"include_usages": True}),
        "unknown_field",
        "stream_options.include_usages",
        "'include_usage'",
    ),
    # Prompts.
    (b"{}", "missing_field", "prompt", "prompt"),
    (completion(prompt=None), "invalid_type", "prompt", "null"),
    (completion(prompt=""), "empty_prompt", "prompt"),
    (completion(prompt=[]), "empty_prompt", "prompt"),
    (completion(prompt=["a", ""]), "empty_prompt", "prompt[1]"),
    (completion(prompt=[[1], []]), "empty_prompt", "prompt[1]"),
    (completion(prompt={"text": "a"}), "invalid_type", "prompt", "an object"),
    (completion(prompt=[1, "a"]), "invalid_type", "prompt[1]", '"a"'),
    (completion(prompt=[1, True]), "invalid_type", "prompt[1]", "true"),
    (completion(prompt=[1, 2.0]), "invalid_type", "prompt[1]", "2.0"),
    (completion(prompt=["a", [1]]), "invalid_type", "prompt[1]"),
    (completion(prompt=[[1], "a"]), "invalid_type", "prompt[1]"),
    (
        completion(prompt="x" * 5000),
        "context_length_exceeded",
        "prompt",
        "5000",
        "4095",
        "this model's maximum context length is 4096 tokens",
        "--max-model-len",
    ),
    (completion(prompt=["x"] * 133, n=2), "too_many_sequences", "prompt", "266", "264", "--max-num-waiting"),
    (completion(truncate_prompt_tokens=0), BAD, "truncate_prompt_tokens", "is 0", "1 or more"),
    (completion(truncate_prompt_tokens=True), "invalid_type", "truncate_prompt_tokens", "true"),
    (completion(prompt=[-1], echo=True), BAD, "prompt", "-1"),
    # Names.
    (completion(model="uper"), "model_not_found", "model", "'uper'", "'upper'"),
    (completion(model="tiny:digit"), "model_not_found", "model", "'digits'"),
    (completion(model="gpt-4o"), "model_not_found", "model", "'tiny'", "'upper'"),
    (completion(model=""), "model_not_found", "model"),
    (completion(model="m" * 9999), "model_not_found", "model", "…"),
    # Fields.
    (completion(max_token=5), "unknown_field", "max_token", "'max_tokens'"),
    (completion(temprature=1), "unknown_field", "temprature", "'temperature'"),
    (completion(maxTokens=5), "unknown_field", "maxTokens", "'max_tokens'"),
    (completion(**{"top-p": 1}), "unknown_field", "top-p", "'top_p'"),
    (completion(messages=[]), "not_served", "messages", CHAT),
]
BAD_CHATS: list[tuple[Any, ...]] = [
    # Types and absurd numbers.
    (
        chat(USER, max_completion_tokens=0),
        BAD,
        "max_completion_tokens",
        "max_completion_tokens is 0",
        "prompt_logprobs",
    ),
    (chat(prompt_logprobs=1, stream=True), "invalid_value", "stream", "stream"),
    (chat(predicted_output_tokens=-3), BAD, "predicted_output_tokens", "-3"),
    # Prompts.
    (
        chat(USER | {"content": "x" * 5000}),
        "context_length_exceeded",
        "messages",
        "5017",
        "this model's maximum context length is 4096 tokens",
    ),
    (
        chat(continue_final_message=True, add_generation_prompt=True),
        "invalid_value",
        "continue_final_message",
        "add_generation_prompt",
    ),
    # Messages.
    (b"{}", "missing_field", "messages", "messages"),
    (b'{"messages": []}', "empty_messages", "messages"),
    (b'{"messages": "hi"}', "invalid_type", "messages", '"hi"'),
    (chat("hi"), "invalid_type", "messages[0]", '"hi"'),
    (chat(USER, {"content": "hi"}), "invalid_type", "messages[1].role", "null", "user"),
    (chat(USER | {"role": "boss"}), "invalid_type", "messages[0].role", "boss"),
    (chat({"role": "user"}), "invalid_type", "messages[0].content", "null"),
    (chat({"role": "tool", "content": None}), "invalid_type", "messages[0].content", "null"),
    (chat(USER | {"role": "function"}), "invalid_type", "messages[0].role", "tool"),
    (chat(USER | {"contents": 1}), "unknown_field", "messages[0].contents", "'content'"),
    (chat(USER | {"reasoning_content": 5}), "invalid_type", "messages[0].reasoning_content"),
    (chat(USER | {"tool_calls": [CALL]}), "invalid_value", "messages[0].tool_calls", "'user'"),
    (chat(CALLER | {"tool_calls": ""}), "invalid_type", "messages[0].tool_calls", "a list"),
    (chat(CALLER | {"tool_calls": CALL}), "invalid_type", "messages[0].tool_calls", "a list"),
    (chat(CALLER | {"tool_calls": ["f"]}), "invalid_type", "messages[0].tool_calls[0]", '"f"'),
    (chat(CALLER | {"tool_calls": [CALL | {"id": 5}]}), "invalid_type", "messages[0].tool_calls[0].id"),
    (
        chat(CALLER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
        "invalid_type",
        "messages[0].tool_calls[0].function.arguments",
        "JSON",
    ),
    (
        chat(CALLER | {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}),
        "invalid_type",
        "messages[0].tool_calls[0].function.arguments",
        "an array",
    ),
    (chat(USER | {"content": [5]}), "invalid_type", "messages[0].content[0]", "5"),
    (chat(USER | {"content": [{"type": "text"}]}), "invalid_type", "messages[0].content[0].text", "null"),
    (chat(USER | {"name": 5}), "invalid_type", "messages[0].name"),
    (chat(USER | {"content": "refuse me"}), BAD, "messages", "chat template", "alternate"),
    (chat(logprobs=3), "invalid_type", "logprobs", "3"),
    (chat(top_logprobs=3), "invalid_value", "top_logprobs", "logprobs is not true"),
    (chat(logprobs=True, top_logprobs=21), BAD, "top_logprobs", "top_logprobs is 21", "20"),
    # Names.
    (chat(model="broken"), "adapter_failed", "model", "failed", "rank 512"),
    # Fields.
    (chat(prompt="hi"), "not_served", "prompt", COMPLETIONS),
    (chat(**{f"{i}" * 9: 1 for i in range(65)}), "unknown_field", "646464646464646464", "64"),
]
STATUSES = {"body_too_large": 413, "model_not_found": 404}  # else 400


@pytest.mark.parametrize(
    ("path", "body", "code", "param", "parts"),
    [
        (path, body, code, param, parts)
        for path, bodies in ((COMPLETIONS, BAD_COMPLETIONS), (CHAT, BAD_CHATS))
        for body, code, param, *parts in bodies
    ],
)
def test_bad_body(
    http: httpx.Client, path: str, body: bytes, code: str, param: str | None, parts: list[str]
) -> None:
    check_error(http.post(path, content=body), STATUSES.get(code, 400), code, param, *parts)
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
