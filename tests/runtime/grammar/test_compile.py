"""What compiles, what it allows, and how refusals name the keyword."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from corun.runtime.errors import RequestError
from corun.runtime.grammar.compile import check_structure, compile_grammar, parser_limits
from corun.runtime.grammar.tokenizer import trial_tokenizer
from corun.runtime.sampling import StructuredOutput
from llguidance import LLMatcher

SPECIAL = {300: "<|call|>"}
TREE = trial_tokenizer(1000, SPECIAL)


def schema(value: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value), "guided_json")


def checked(structured: StructuredOutput) -> Callable[[str], bool]:
    """Return the function that says whether a whole answer is allowed."""
    check_structure(structured, TREE)
    grammar = compile_grammar(structured)

    def allows(text: str) -> bool:
        matcher = LLMatcher(TREE, grammar, log_level=0, limits=parser_limits())
        tokens = TREE.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return allows


def test_a_schema() -> None:
    allows = checked(
        schema(
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}},
                "required": ["a"],
                "additionalProperties": False,
            }
        )
    )
    assert allows('{"a": 1}') and allows('{"a": 1, "b": null}')
    assert not (allows("{}") or allows('{"a": "1"}') or allows('{"a": 1, "c": 1}'))


def test_json_has_one_space_after_commas_and_colons() -> None:
    allows = checked(schema({"type": ["array", "object"]}))
    assert allows('[1, {"a": []}]') and allows('{"a": {}, "b": [2]}')
    assert not (allows("[1,2]") or allows("[ 1]") or allows('{"a":1}') or allows('{\n"a": 1}'))


def test_any_object() -> None:
    allows = checked(StructuredOutput("json_object", ""))
    assert allows('{"a": [1, {"b": null}]}') and not allows("[1]")


def test_true_is_any_json() -> None:
    allows = checked(StructuredOutput("json_schema", "true"))
    assert allows('{"a": 1}') and allows("[1]")


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("[a-c]+", "abc", "abz"),
        ("^a|b$", "b", "ab"),
        (r"a\$", "a$", "a"),
        ("a/b", "a/b", "a"),
        (r"\d{3}", "123", "12"),
    ],
)
def test_a_regex_matches_the_whole_answer(pattern: str, allowed: str, refused: str) -> None:
    allows = checked(StructuredOutput("regex", pattern))
    assert allows(allowed) and not allows(refused)


def test_choices_are_any_texts() -> None:
    texts = ["yes", "", 'say "no"\n', "é/😀", "\\"]
    allows = checked(StructuredOutput("choice", json.dumps(texts)))
    assert all(map(allows, texts)) and not allows("ye")


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" NUMBER\nNUMBER: /[0-9]+/',
        'root ::= "a" number\nnumber ::= [0-9]+  # a comment',
        '%llguidance {}\n\nstart: "a" /[0-9]+/',
    ],
)
def test_grammars_in_lark_and_gbnf(text: str) -> None:
    allows = checked(StructuredOutput("grammar", text))
    assert allows("a12") and not allows("12")


def test_lark_names_special_tokens_and_their_ids() -> None:
    check_structure(StructuredOutput("grammar", "start: <|call|> <[999]>"), TREE)
    for text, message in [
        ("start: <|other|>", 'unknown special token: "<|other|>"$'),
        ("start: <[1000]>", "too large: 1000"),
    ]:
        with pytest.raises(RequestError, match=message):
            check_structure(StructuredOutput("grammar", text), TREE)


def test_tags_in_free_text() -> None:
    called = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    allows = checked(
        StructuredOutput(
            "structural_tag",
            json.dumps(
                {
                    "structures": [
                        {"begin": "<f=a>", "schema": called, "end": "</f>"},
                        {"begin": "<f=b>", "schema": True, "end": "</f>"},
                    ],
                    "triggers": ["<f="],
                }
            ),
        )
    )
    assert allows("no call") and allows('so: <f=a>{"x": 1}</f> and <f=b>[]</f>.')
    assert not (allows('<f=a>{"y":1}</f>') or allows("<f=c>{}</f>"))


@pytest.mark.parametrize(
    ("value", "keyword"),
    [
        ({"not": {}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"properties": {"a": {"uniqueItems": True}}}, "uniqueItems"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"contains": {}}, "contains"),
        ({"type": "string", "format": "nonsense"}, "format"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ({"$ref": "https://example.com/a"}, r"\$ref"),
        ({"type": "number", "multipleOf": 0.000123456789}, "multipleOf"),
        ({"type": "object", "minProperties": 2, "properties": {"a": {}}}, "minProperties"),
        ({"type": "any"}, "type"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ],
)
def test_refusals_name_the_keyword(value: dict[str, Any], keyword: str) -> None:
    with pytest.raises(RequestError, match=keyword) as caught:
        check_structure(schema(value), TREE)
    assert caught.value.param == "guided_json"
    assert str(caught.value).startswith("guided_json cannot be served: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_lark_grammar_ignores_no_keyword_either() -> None:
    lenient = 'start: %json {"not": {}, "x-guidance": {"lenient": true}}'
    with pytest.raises(RequestError, match='the keywords "not"'):
        check_structure(StructuredOutput("grammar", lenient), TREE)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", '{"minimum": NaN}', "NaN is no number"),
        ("json_schema", "[1]", "the schema is not an object"),
        ("json_schema", "false", "the schema is not an object"),
        ("json_schema", '{"items":' * 70 + "{}" + "}" * 70, "more than 64 objects and arrays deep"),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "not valid JSON"),
        ("regex", "[a", "unclosed character class"),
        ("choice", "[]", "choices are a list of strings, at least one"),
        ("choice", '["a", 1]', "choices are a list of strings"),
        ("grammar", "nonsense", "neither Lark with start: nor GBNF"),
        ("grammar", "start: other", 'unknown name: "other"'),
        ("structural_tag", '{"structures": []}', "a list of structures"),
        ("structural_tag", '{"structures": [{}], "triggers": ["<"]}', r"structures\[0\] needs"),
        (
            "structural_tag",
            '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["<"]}',
            r"structures\[0\] begins with none of the triggers",
        ),
        (
            "structural_tag",
            '{"structures": [{"begin": "<", "schema": false, "end": ""}], "triggers": ["<"]}',
            r"structures\[0\] needs begin, schema and end",
        ),
        (
            "structural_tag",
            '{"structures": [{}], "triggers": ["<"], "trigger_ids": {"<": "1"}}',
            "trigger_ids is not an object with ids",
        ),
    ],
)
def test_texts_that_are_wrong(kind: str, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_structure(StructuredOutput(kind, text, "field"), TREE)
    assert caught.value.param == "field"
