"""Facts that are read from bodies, and estimates of tokens."""

import json
from typing import Any

import pytest
from corun.runtime.cluster.gateway.bodies import TokenRatio, read_facts, read_usage
from hypothesis import given
from hypothesis import strategies as st

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def _facts(path: str = "/v1/completions", **fields: Any) -> Any:
    return read_facts(json.dumps(fields).encode(), path)


@pytest.mark.parametrize(
    ("prompt", "num_ids", "num_choices"),
    [
        ("some text", None, 2),
        ([5, 6, 7], 3, 2),
        ([[5, 6], [7]], 3, 4),
        (["one", "two", "three"], None, 6),
        ([], None, 2),
        (None, None, 2),
        ({"a": 1}, None, 2),
    ],
)
def test_prompts_are_counted(prompt: object, num_ids: int | None, num_choices: int) -> None:
    facts = _facts(prompt=prompt, n=2)
    assert (facts.num_ids, facts.num_choices) == (num_ids, num_choices)


def test_limits_of_output_are_those_of_each_kind() -> None:
    assert _facts(prompt="x").max_output_tokens == 16
    assert _facts(prompt="x", max_tokens=5).max_output_tokens == 5
    assert _facts(CHAT, messages=[]).max_output_tokens is None
    assert _facts(RESPONSES, input="x").max_output_tokens is None
    assert _facts(RESPONSES, input="x", max_output_tokens=6).max_output_tokens == 6
    both = _facts(CHAT, messages=[], max_tokens=5, max_completion_tokens=7)
    assert both.max_output_tokens == 7
    assert _facts(prompt="x", predicted_output_tokens=9).predicted_output_tokens == 9


def test_adapters_that_answer_together() -> None:
    parts = [{"name": "a", "scale": 0.5}, {"name": "b"}, {"id": 0}, {"name": 5}]
    assert _facts(prompt="x", lora=parts).lora == ("a", "b")
    assert _facts(prompt="x", lora=[*parts, {"name": "c"}]).lora == ()
    assert _facts(prompt="x", lora={"name": "a"}).lora == ()
    for nothing in ("null", "[]"):
        assert _facts(prompt="x", lora=json.loads(nothing)).lora is None


@given(st.binary(max_size=64) | st.recursive(st.none(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_invalid_bodies_are_forwarded(body: bytes) -> None:
    for path in ("/v1/completions", CHAT, RESPONSES, "/tokenize"):
        facts = read_facts(body, path)
        assert facts.model is None and facts.num_choices >= 1


@pytest.mark.parametrize("value", [True, -1, 0, 2**40, 1.5, "3", [3], {"n": 3}])
def test_fields_of_wrong_types_are_left_to_engines(value: object) -> None:
    facts = _facts(prompt="x", n=value, max_tokens=value, model=5, user=["a"])
    assert facts.num_choices == 1 and facts.max_output_tokens == 16
    assert facts.model is None


def test_a_body_that_is_too_deep_is_left_to_engines() -> None:
    assert read_facts(b'{"prompt":' + b"[" * 100_000, "/v1/completions").model is None


def test_a_session_is_its_user_or_how_its_prompt_begins() -> None:
    assert _facts(prompt="x", user="alice").session == "alice"
    one, same, other = (_facts(prompt=text * 300).session for text in ("a", "a", "b"))
    assert one == same != other
    grown = _facts(prompt="a" * 300 + "and more").session
    assert grown == one


def test_tools_and_instructions_are_read_before_the_conversation() -> None:
    tools, messages = [{"type": "function"}], [{"role": "user", "content": "hi"}]
    chat = _facts(CHAT, messages=messages, tools=tools)
    assert chat.text == json.dumps(tools).encode() + json.dumps(messages).encode()
    assert chat.session == _facts(CHAT, messages=messages).session  # many clients share tools
    assert (chat.is_chat, chat.is_plain) == (True, False)
    asked = _facts(RESPONSES, input="hi", instructions="be brief")
    assert (asked.text, asked.is_chat, asked.is_plain) == (b'"be brief""hi"', True, False)
    spoken = _facts("/v1/messages", messages=messages, system="be brief", max_tokens=9)
    assert spoken.text == b'"be brief"' + json.dumps(messages).encode()
    assert (spoken.is_chat, spoken.is_plain, spoken.max_output_tokens) == (True, False, 9)
    assert not _facts("/v1/messages", messages=messages).is_plain  # a block is no part of a chat
    assert _facts(CHAT, messages=messages).is_plain and _facts(prompt="hi", tools=tools).is_plain
    assert _facts("/tokenize", messages=messages).is_chat and not _facts("/tokenize").is_chat


def test_beginnings_are_shared_as_far_as_texts_are() -> None:
    first = _facts(prompt="a" * 2000)
    second = _facts(prompt="a" * 1200 + "b" * 2800)
    ours, theirs = first.beginnings(500), second.beginnings(1000)
    shared = [one for one, other in zip(ours, theirs, strict=False) if one[0] == other[0]]
    assert len(shared) == 5 and shared[-1][1] == pytest.approx(1024 * 500 / 2002, abs=1)
    salted = _facts(prompt="a" * 2000, cache_salt="s").beginnings(500)
    assert not {one for one, _ in ours} & {one for one, _ in salted}
    assert not _facts(prompt="short").beginnings(1)
    assert len(_facts(prompt="a" * 10**6).beginnings(10**5)) == 131


def test_usage_is_read_where_no_text_can_pretend_to_be_it() -> None:
    choices = [{"text": 'x "usage": {"prompt_tokens": 99, "completion_tokens": 99}'}]
    answer = {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    assert read_usage(json.dumps(answer).encode()) == (7, 3)
    assert read_usage(json.dumps(answer, separators=(",", ":")).encode()) == (7, 3)
    assert read_usage(json.dumps({"choices": choices, "usage": None}).encode()) is None
    assert read_usage(b"") is None


def test_usage_of_responses_has_other_names() -> None:
    details = {"input_tokens_details": {"cached_tokens": 1}}
    usage = {"input_tokens": 7} | details | {"output_tokens": 3, "total_tokens": 10}
    counts = {"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 2}
    spoken = {"type": "message_delta", "usage": counts}
    assert read_usage(b"data: %b\n\ndata: {}\n\n" % json.dumps(spoken).encode()) == (7, 3)
    last = {"type": "response.completed", "response": {"usage": usage, "user": None}}
    assert read_usage(json.dumps(last).encode()) == (7, 3)


def test_tokens_of_text_are_learned_by_adapter_and_kind() -> None:
    ratio = TokenRatio()
    text = b"x" * 1002
    assert ratio.num_tokens(text, "a", is_chat=False) == 250
    ratio.observe(text, 501, "a", is_chat=False)
    assert ratio.num_tokens(text, "a", is_chat=False) == 500
    assert (
        ratio.num_tokens(text, "b", is_chat=False) == 500
    )  # the ratio of all adapters, before its own is known
    assert ratio.num_tokens(text, "a", is_chat=True) == 250
    ratio.observe(text, 1, "a", is_chat=False)  # a prompt of special tokens says nothing
    assert ratio.num_tokens(b"", None, is_chat=False) == 1
