"""Limits of one request over HTTP, and a template that loops."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.frontend.chat_template import ChatTemplate
from corun.runtime.limits import HttpLimits, TemplateLimits
from corun.runtime.server.access import Access
from corun.runtime.server.settings import AppSettings
from support.fake_engine import MAX_MODEL_LEN, FakeEngine, FakeTokenizer

LIMITS = HttpLimits(
    max_body_bytes=20_000,
    max_json_depth=4,
    max_messages=3,
    max_request_tokens=MAX_MODEL_LEN,
    max_logit_bias=2,
    template=TemplateLimits(timeout_s=20.0, max_chars=100),
    max_content_parts=3,
    max_stop_strings=16,
    max_stop_bytes=8,
    max_bad_words_bytes=8,
    max_tokenize_tokens=MAX_MODEL_LEN,
    max_json_items=5000,
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"prompt": "hi", "max_tokens": 4}
MESSAGES = [{"role": "user", "content": "hi"}]


class TemplateTokenizer(FakeTokenizer):
    """Renders the test's own template."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, {})

    def apply_chat_template(self, messages: Any, **variables: Any) -> str:
        return self._template.render(messages, **{"add_generation_prompt": True} | variables)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, GOOD | {"x": [[[[]]]]}, None, "--max-json-depth"),
        (CHAT, {"messages": MESSAGES * 4}, "messages", "4 items, at most 3"),
        (COMPLETIONS, GOOD | {"n": 2, "max_tokens": 3000}, "max_tokens", "--max-request-tokens"),
        (CHAT, {"messages": MESSAGES, "n": 2}, "max_tokens", f"{2 * MAX_MODEL_LEN} tokens"),
        (COMPLETIONS, {"prompt": ["a"] * 5, "max_tokens": 1000}, "max_tokens", "5 prompts"),
        (COMPLETIONS, GOOD | {"stop": ["a"] * 17}, "stop", "--max-stop-strings"),
        # Counted before each of them is checked.
        (
            CHAT,
            {"messages": MESSAGES, "logit_bias": dict.fromkeys("abc")},
            "logit_bias",
            "3 entries, at most 2 are served (--max-logit-bias)",
        ),
        (COMPLETIONS, {"prompt": ["a"] * 400 + [5]}, "prompt", "401 prompts"),
        (
            COMPLETIONS,
            GOOD | {"stop": "123456789"},
            "stop",
            "9 bytes together, at most 8 are served (--max-stop-bytes)",
        ),
        (COMPLETIONS, GOOD | {"bad_words": ["1234", "56789"]}, "bad_words", "--max-bad-words-bytes"),
        (COMPLETIONS, GOOD | {"bad_words": ["a"] * 129}, "bad_words", "129 bad words"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [1] * 4}]},
            "messages",
            "4 content parts and tool calls, at most 3 are served (--max-content-parts)",
        ),
        (
            COMPLETIONS,
            GOOD | {"x": [0] * (2 * MAX_MODEL_LEN + 1)},
            None,
            f"more than {2 * MAX_MODEL_LEN} values and names (--max-json-items)",
        ),
        (
            COMPLETIONS,
            GOOD | {"allowed_token_ids": [1, "a", "b"]},
            "allowed_token_ids[1]",
            'is "a" (a string), must be a valid integer',
        ),
        (COMPLETIONS, GOOD | {"stop_token_ids": [1.5]}, "stop_token_ids[0]", "a valid integer"),
        ("/detokenize", {"tokens": [1] * (MAX_MODEL_LEN + 1)}, "tokens", "--max-tokenize-tokens"),
        ("/detokenize", {"tokens": [None]}, "tokens[0]", "must be a valid integer"),
        ("/tokenize", {"prompt": "a" * MAX_MODEL_LEN}, "prompt", "--max-tokenize-tokens"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]},
            "messages",
            "--max-tokenize-tokens",
        ),
        (COMPLETIONS, {"prompt": "a" * MAX_MODEL_LEN}, "prompt", "--max-model-len"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]},
            "messages",
            "--max-model-len",
        ),
        (COMPLETIONS, GOOD | {"model": "m" * 9000}, "model", "no model or adapter"),
    ],
)
def test_what_is_too_much(
    start_server: Callable[..., Any], path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    server = start_server(FakeEngine(), limits=LIMITS)
    with httpx.Client(base_url=server.url, timeout=20) as http:
        response = http.post(path, json=body)
        error = response.json()["error"]
        assert response.status_code == (404 if "no model" in words else 400)
        assert error["param"] == param
        assert words in error["message"]
        assert http.post(COMPLETIONS, json=GOOD).status_code == 200


@pytest.mark.parametrize(
    ("source", "timeout_s", "code", "flag"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            0.05,
            "template_timeout",
            "--template-timeout-s",
        ),
        ("{{ 'x' * 101 }}", 20.0, "template_too_long", "--max-template-chars"),
    ],
)
def test_templates_that_loop_or_make_too_much(
    start_server: Callable[..., Any], source: str, timeout_s: float, code: str, flag: str
) -> None:
    engine = FakeEngine()
    engine.tokenizer = TemplateTokenizer(source)
    template = replace(LIMITS.template, timeout_s=timeout_s)
    server = start_server(engine, limits=replace(LIMITS, template=template))
    with httpx.Client(base_url=server.url, timeout=20) as http:
        for path in (CHAT, "/tokenize"):
            began_s = time.monotonic()
            response = http.post(path, json={"messages": MESSAGES})
            assert time.monotonic() - began_s < 10
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, code)
            assert (error["param"], flag in error["message"]) == ("messages", True)
        assert http.post(COMPLETIONS, json=GOOD).status_code == 200


@pytest.mark.parametrize(
    ("max_model_len", "max_body_mib", "max_bytes"),
    [
        (512, None, 4 << 20),
        (131_072, None, 8 << 20),
        (10**6, None, 32 << 20),
        (512, 32, 32 << 20),
        (131_072, 1, 1 << 20),
    ],
)
def test_limits_that_follow_from_the_model(
    max_model_len: int, max_body_mib: int | None, max_bytes: int
) -> None:
    config = ServeConfig(max_body_mib=max_body_mib, max_tokenize_tokens=1000, max_json_items=1000)
    info = msgspec.structs.replace(FakeEngine().get_model_info(), max_model_len=max_model_len, vocab_size=7)
    limits = AppSettings.of(EngineConfig(), config, Access()).of_model(info).limits
    assert limits.max_body_bytes == max_bytes
    assert limits.vocab_size == 7
    assert limits.max_tokenize_tokens == max(1000, max_model_len)
    assert limits.max_json_items == max(1000, 2 * max_model_len)


def test_the_defaults_are_those_of_the_options() -> None:
    settings = AppSettings.of(EngineConfig(), ServeConfig(), Access())
    assert settings.limits == HttpLimits()
    config = ServeConfig(
        max_body_mib=1,
        max_json_depth=2,
        max_messages=3,
        max_request_tokens=4,
        template_timeout_s=5,
        max_template_chars=6,
        max_connections=7,
        header_timeout_s=8,
        max_unsent_kib=9,
        unsent_timeout_s=10,
        body_timeout_s=11,
        max_bodies_mib=13,
        max_content_parts=14,
        max_json_items=15,
        max_tokenize_tokens=16,
    )
    engine_config = EngineConfig(
        max_logit_bias=12, max_stop_strings=17, max_stop_bytes=18, max_bad_words_bytes=19
    )
    assert AppSettings.of(engine_config, config, Access()).limits == HttpLimits(
        max_body_bytes=1 << 20,
        max_json_depth=2,
        max_messages=3,
        max_request_tokens=4,
        template=TemplateLimits(timeout_s=5.0, max_chars=6),
        max_connections=7,
        header_timeout_s=8.0,
        max_unsent_bytes=9 << 10,
        unsent_timeout_s=10.0,
        body_timeout_s=11.0,
        max_logit_bias=12,
        max_bodies_bytes=13 << 20,
        max_content_parts=14,
        max_json_items=15,
        max_tokenize_tokens=16,
        max_stop_strings=17,
        max_stop_bytes=18,
        max_bad_words_bytes=19,
    )
