"""Fields without effect are accepted, those with one refused, unknown ones by policy; synonyms."""

import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from corun.runtime.errors import CorunError, RequestError
from corun.runtime.sampling import StructuredOutput
from corun.runtime.server.basic_routes import DetokenizeRequest, TokenizeRequest
from corun.runtime.server.chat import ChatRequest
from corun.runtime.server.completions import CompletionRequest
from corun.runtime.server.fields import ACCEPTED_FIELDS, REFUSED_FIELDS, FieldTable
from corun.runtime.server.generation_request import StructureFields
from corun.runtime.server.lora_routes import LoadRequest, UnloadRequest
from support.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODELS = (ChatRequest, CompletionRequest, DetokenizeRequest, LoadRequest, TokenizeRequest, UnloadRequest)
# Fields that clients send by themselves: editors, agents, routers, benchmarks.
EXTRAS: dict[str, Any] = {
    "id": "msg_1",
    "refusal": None,
    "annotations": [],
    "cache_control": {"type": "ephemeral"},
    "reasoning_content": "Hm.",
}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields


def tables(table: FieldTable) -> list[FieldTable]:
    return [table, *(below for nested in table.nested.values() for below in tables(nested))]


@pytest.mark.parametrize("model", MODELS)
def test_a_field_has_one_meaning(model: Any) -> None:
    for table in tables(model.field_table()):
        assert not table.accepted.keys() & table.refused.keys()
        assert not set(table.served) & table.accepted.keys()
        assert set(table.nested) <= set(table.served)


def test_what_one_route_serves_the_other_refuses() -> None:
    for one, other in ((ChatRequest, CompletionRequest), (CompletionRequest, ChatRequest)):
        table = other.field_table()
        assert set(one.model_fields) <= {*table.served, *table.refused}


@pytest.mark.parametrize("name", ACCEPTED_FIELDS)
def test_accepted_fields_change_nothing(http: httpx.Client, engine: Any, name: str) -> None:
    plain = http.post(CHAT, json=chat()).json()
    for value in ({"a": "b"}, "flex", 5, True, None):
        answer = http.post(CHAT, json=chat(**{name: value}))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain["choices"]
    assert engine.seen[-1] == engine.seen[0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_refused_fields_say_what_to_write(http: httpx.Client, path: str) -> None:
    model = ChatRequest if path == CHAT else CompletionRequest
    for name, refused in REFUSED_FIELDS.items():
        if name in model.model_fields:
            continue
        body = chat() if path == CHAT else {"prompt": "hi"}
        answer = http.post(path, json=body | {name: ["something"]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "not_served", name)
        assert refused.instead in error["message"]
        for neutral in (None, *refused.neutral):
            answer = http.post(path, json=body | {name: neutral})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_priority_is_not_ignored(http: httpx.Client, path: str) -> None:
    body = chat() if path == CHAT else {"prompt": "hi"}
    for priority in (1, -1, "high", False):
        answer = http.post(path, json=body | {"priority": priority})
        assert answer.status_code == 400
        assert "--scheduling-policy" in answer.json()["error"]["message"]
    assert http.post(path, json=body | {"priority": 0}).status_code == 200


def test_what_clients_put_into_messages_passes(http: httpx.Client, engine: Any) -> None:
    user: dict[str, Any] = {"role": "user", "content": "hi"}
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    answer = http.post(
        CHAT,
        json=chat(
            messages=[
                user | EXTRAS,
                {"role": "assistant", "content": None, "refusal": "no"} | EXTRAS,
                user | {"content": [part]},
            ]
        ),
    )
    assert answer.status_code == 200, answer.text
    assert "".join(map(chr, engine.seen[-1][0])) == "<user>hi<assistant><user>hi<assistant>"
    options = {"include_usage": True, "include_obfuscation": False}
    answer = http.post(CHAT, json=chat(stream=True, stream_options=options))
    assert answer.status_code == 200, answer.text


def test_unknown_fields_are_counted_and_logged_once(
    http: httpx.Client, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.state.unknown_fields.num_seen
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            body = chat(novel=1, messages=[{"role": "user", "content": "hi", "weight": 2}])
            assert http.post(CHAT, json=body).status_code == 200
    lines = [line for line in caplog.messages if "unknown field" in line]
    assert [line.split()[4] for line in lines] == ["'novel'", "'messages[0].weight'"]
    assert f'unknown_fields_total{{model_name="tiny"}} {before + 6}.0' in http.get("/metrics").text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for first in range(0, 90, 30):
            more = {f"{number}{number}zz": 1 for number in range(first, first + 30)}
            assert http.post(CHAT, json=chat(**more)).status_code == 200
    assert len([line for line in caplog.messages if "unknown field" in line]) == 62


def test_refuse(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), unknown_fields="refuse")
    with httpx.Client(base_url=server.url, timeout=20) as http:
        answer = http.post(CHAT, json=chat(novel=1))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_field", "novel")
        assert "--unknown-fields" in error["message"]
        body = chat(messages=[{"role": "user", "content": "hi", "weight": 2}])
        assert http.post(CHAT, json=body).json()["error"]["param"] == "messages[0].weight"
        body = chat(messages=[{"role": "user", "content": "hi"} | EXTRAS], user="me")
        assert http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize("policy", ["warn", "refuse", "ignore"])
def test_a_near_miss_is_an_error_under_each_policy(
    start_server: Callable[..., Any], engine: Any, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(type(engine)(), unknown_fields=policy)
    with httpx.Client(base_url=server.url, timeout=20) as http, caplog.at_level(logging.WARNING):
        for name, meant in (("max_token", "max_tokens"), ("temprature", "temperature")):
            answer = http.post(CHAT, json=chat(**{name: 1}))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_field", name)
            assert repr(meant) in error["message"]
        assert http.post(CHAT, json=chat(novel=1)).status_code == (400 if policy == "refuse" else 200)
    assert len([line for line in caplog.messages if "novel" in line]) == (policy == "warn")


def test_what_is_unknown_in_the_body_may_be_a_near_miss_in_a_message(http: httpx.Client) -> None:
    message = {"role": "user", "content": "hi", "contents": "hi"}
    answer = http.post(CHAT, json=chat(contents=1) | {"messages": [message]})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unknown_field", "messages[0].contents")
    assert "'content'" in error["message"]


def test_very_many_unknown_fields_are_refused_at_once(http: httpx.Client) -> None:
    names = {f"{number:05}zzzz": 1 for number in range(6000)}
    answer = http.post(CHAT, content=json.dumps(chat(**names)))
    assert answer.json()["error"]["code"] == "unknown_field"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
GBNF = 'root ::= "a"'


@pytest.mark.parametrize(
    ("body", "kind", "text", "field"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "description": "y", "strict": False, "schema": SCHEMA},
                }
            },
            "json_schema",
            SCHEMA,
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            "structural_tag",
            {"type": "structural_tag", **TAG},
            "response_format",
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"], "guided_choice"),
        ({"guided_grammar": GBNF}, "grammar", GBNF, "guided_grammar"),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA, "json_schema"),
        ({"grammar": GBNF}, "grammar", GBNF, "grammar"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"ebnf": GBNF}, "grammar", GBNF, "ebnf"),
        ({"format": "json"}, "json_object", "", "format"),
        ({"format": SCHEMA}, "json_schema", SCHEMA, "format"),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None}},
            "json_schema",
            SCHEMA,
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"], "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            "structural_tag",
            TAG,
            "structured_outputs.structural_tag",
        ),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"guided_json": SCHEMA, "format": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
    ],
)
def test_each_name_is_one_value(body: dict[str, Any], kind: str, text: object, field: str) -> None:
    found = StructureFields.model_validate(body).structured_output()
    assert found is not None
    assert (found.kind, found.field) == (kind, field)
    assert found.text == text or json.loads(found.text) == text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None, "guided_regex": ""},
        {"format": "", "grammar": ""},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_names_without_effect(body: dict[str, Any]) -> None:
    assert StructureFields.model_validate(body).structured_output() is None


def test_two_that_differ_are_both_named() -> None:
    body = StructureFields(guided_regex="a+", response_format={"type": "json_object"})
    with pytest.raises(RequestError, match="response_format and guided_regex are given") as caught:
        body.structured_output()
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": {}}}, "structured_outputs.regex"),
        ({"guided_regex": "x" * 65537}, "guided_regex"),
    ],
)
def test_wrong_forms_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(CorunError) as caught:
        StructureFields.model_validate(body).structured_output()
    assert getattr(caught.value, "param", None) == param


PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", PROMPTS)
def test_the_value_reaches_the_engine(http: httpx.Client, engine: FakeEngine, path: str) -> None:
    body = PROMPTS[path] | {"guided_regex": "[a-z]+", "max_tokens": 1}
    assert http.post(path, json=body).status_code == 200
    structured = engine.seen[-1][1].structured_output
    assert structured == StructuredOutput("regex", "[a-z]+", "guided_regex")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "not_served",
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "unknown_field", "structured_outputs.regexp"),
        ({"guided_choice": "a"}, "invalid_type", "guided_choice"),
        ({"response_format": {"type": "xml"}}, "invalid_type", "response_format.type"),
    ],
)
@pytest.mark.parametrize("path", PROMPTS)
def test_errors_name_the_field(
    http: httpx.Client, path: str, fields: dict[str, Any], code: str, param: str
) -> None:
    response = http.post(path, json=PROMPTS[path] | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
