"""Translation of requests to vLLM and its answers, as recorded."""

import json
from typing import Any

import pytest
from corun.runtime.cluster.engine_types.vllm_translation import VllmTranslation, vllm_refusal

TRANSLATION = VllmTranslation("sql@0123456789abcdef", "sql")
EVENT = b'data: {"id":"c","model":"sql@0123456789abcdef","choices":[{"index":0,"text":"%b"}]}\n\n'


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def test_the_model_has_the_name_that_vllm_knows() -> None:
    body = b'{"model": "sql", "prompt": [1, 2.50], "seed": 12345678901234567890, "x": {"model": 1}}'
    sent = json.loads(TRANSLATION.body(body))
    assert sent == json.loads(body) | {"model": "sql@0123456789abcdef"}
    assert b"2.50" in TRANSLATION.body(body) and b"12345678901234567890" in TRANSLATION.body(body)
    assert json.loads(TRANSLATION.body(b'{"prompt": "x"}'))["model"] == "sql@0123456789abcdef"
    assert TRANSLATION.body(b"[no object") == b"[no object"


def test_answers_have_the_name_that_the_client_knows() -> None:
    assert TRANSLATION.events(EVENT % b"t" * 2) == EVENT.replace(b"@0123456789abcdef", b"") % b"t" * 2
    answer = json.loads(TRANSLATION.answer(200, b'{"model":"sql@0123456789abcdef","choices":[]}'))
    assert answer == {"model": "sql", "choices": []}
    as_it_is = VllmTranslation("tiny", None)
    assert as_it_is.events(EVENT % b"t") == EVENT % b"t"


def test_text_that_looks_like_a_name_stays() -> None:
    text = rb"\"model\":\"sql@0123456789abcdef\" and \"error\""
    assert text in TRANSLATION.events(EVENT % text)


@pytest.mark.parametrize(
    ("status", "body", "code", "words", "param"),
    [
        (
            404,
            {
                "error": {
                    "message": "The model `x` does not exist. Valid aliases: tiny.",
                    "type": "NotFoundError",
                    "param": "model",
                    "code": 404,
                }
            },
            "model_not_found",
            "does not exist",
            "model",
        ),
        (
            400,
            {
                "error": {
                    "message": "This model's maximum context length is 512 tokens. However",
                    "type": "BadRequestError",
                    "param": "input_tokens",
                    "code": 400,
                }
            },
            "context_length_exceeded",
            "512 tokens",
            "input_tokens",
        ),
        (
            400,
            {
                "error": {
                    "message": "1 validation error:\n  {'type': 'float_parsing'}",
                    "type": "Bad Request",
                    "param": "body.temperature",
                    "code": 400,
                }
            },
            "invalid_value",
            "1 validation error: {'type'",
            "temperature",
        ),
        (
            400,
            {
                "object": "error",
                "message": "of a server before 0.10",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            },
            "invalid_value",
            "before 0.10",
            None,
        ),
        (404, {"detail": "Not Found"}, "model_not_found", "Not Found", None),
        (
            500,
            {
                "error": {
                    "message": "Internal server error",
                    "type": "InternalServerError",
                    "param": None,
                    "code": 500,
                }
            },
            "internal_error",
            "Internal",
            None,
        ),
        (418, {"tea": 1}, "invalid_request_error", "no error of vLLM", None),
    ],
)
def test_errors_are_ours(status: int, body: dict[str, Any], code: str, words: str, param: str | None) -> None:
    error = error_of(TRANSLATION.answer(status, json.dumps(body).encode()))
    assert error["code"] == code and words in error["message"] and error["param"] == param
    assert "\n" not in error["message"]


def test_an_error_within_a_stream_is_ours_too() -> None:
    error_event = b'data: {"error":{"message":"EngineCore died","type":"x","param":null,"code":500}}\n\n'
    data = TRANSLATION.events(EVENT % b"t" + error_event + b"data: [DONE]\n\n")
    first, error, done, rest = data.split(b"\n\n")
    assert b'"text":"t"' in first and (done, rest) == (b"data: [DONE]", b"")
    assert error_of(error.removeprefix(b"data: "))["code"] == "internal_error"


def test_an_answer_of_another_server_is_refused() -> None:
    assert "with an error that is not vLLM's" in str(vllm_refusal("http://e/x", 500, b"<html>"))
    refused = vllm_refusal("http://e/x", 401, b'{"error":"Unauthorized"}')
    assert refused.status == 502 and "as its --api-key" in str(refused)
