"""The names of structured output: one value, and an error that names two of them."""

import json
from typing import Any

import httpx
import pytest
from corun.runtime.errors import CorunError, RequestError
from corun.runtime.sampling import StructuredOutput
from corun.runtime.server.generation_request import StructureFields
from support.fake_engine import FakeEngine

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
