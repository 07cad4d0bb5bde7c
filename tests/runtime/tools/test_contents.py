"""Contents of fields mean what transformers reads from them."""

from typing import Any

import pytest
from corun.runtime.tools.contents import cast_arguments, transformed, value_of

TAGS = {"tag_pattern": r"<p (?P<key>\w+)>(?P<value>.*?)</p>"}
QUOTES = {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}
CONTENTS: list[tuple[str, str, dict[str, Any]]] = [
    ("text", " a ", {}),
    ("text", " a ", {"strip": False}),
    ("int", " 3 ", {}),
    ("float", "0.5", {}),
    ("bool", "True", {}),
    ("bool", "no", {}),
    ("json", '{"a": [1, null, "b"]}', {}),
    ("json", "not JSON ", {"allow_non_json": True}),
    ("json", '{a:1,b:<|"|>x, "y": {z:1}<|"|>,c:{d:true}}', QUOTES),
    ("json", '{a:<<x>>,b:[<<>>,<<">>]}', {"unquoted_keys": True, "string_delims": [["<<", ">>"]]}),
    ("xml-inline", "<p a>1</p>\n<p b>x\ny</p>", TAGS),
    ("xml-inline", "<p a>1</p><p a>2</p><p a>3</p>", TAGS | {"merge_duplicates": True}),
    ("xml-inline", "<p a>[1]</p>", TAGS | {"value_parser": {"name": "json"}}),
    ("xml-inline", "", TAGS),
    ("kv-lines", "a: 1\n\n b :2:3\nnothing", {}),
    ("kv-lines", "a=1;b=2", {"line_sep": ";", "kv_sep": "=", "value_parser": {"name": "int"}}),
]


@pytest.mark.parametrize(("kind", "text", "arguments"), CONTENTS)
def test_values_are_those_of_transformers(kind: str, text: str, arguments: dict[str, Any]) -> None:
    from transformers.utils.chat_parsing.content_parsers import parse_content

    assert value_of(text, kind, arguments) == parse_content(text, kind, arguments)


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        ("int", "three", {}),
        ("json", "{", {}),
        ("json", "{a:<<x}", {"string_delims": [["<<", ">>"]]}),
        ("json", "[" * 100_000, {}),
        ("xml-inline", "x", {}),
        ("xml-inline", "x", {"tag_pattern": "("}),
        ("xml-inline", "x", {"tag_pattern": "x"}),
        ("xml-inline", "a" * 5000 + "c", {"tag_pattern": "(?P<key>a|aa)+b"}),
    ],
)
def test_what_cannot_be_read_is_an_error(kind: str, text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- the caller shows the text, not the message
        value_of(text, kind, arguments)


def test_values_are_put_into_a_shape() -> None:
    shape = {"type": "function", "names": ["{name}"], "value": "{content.a.b}"}
    value = {"a": {"b": [1]}}
    expected = {"type": "function", "names": ["f"], "value": [1]}
    assert transformed(value, shape, {"name": "f"}, each=False) == expected
    assert transformed(value, None, {}, each=False) == value
    assert transformed([{"x": 1}, {"x": 2}], ["{x}"], {}, each=True) == [[1], [2]]
    wrongs: list[object] = [{"a": 1}, {"a": {}}, [1]]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"it has no content\.a\.b"):
            transformed(wrong, shape, {"name": "f"}, each=False)
    with pytest.raises(ValueError, match="not a list of objects"):
        transformed([1], ["{x}"], {}, each=True)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, " 3 ", 3),
        ({"type": "number"}, "0.5", 0.5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["null", "integer"]}, "None", None),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, "{", "{"),
        ({"type": "string"}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        ({"enum": [1]}, "1", "1"),
        ({"type": 3, "anyOf": 4}, "1", "1"),
        (True, "1", "1"),
    ],
)
def test_texts_get_the_type_of_their_parameter(schema: Any, text: str, value: object) -> None:
    found = cast_arguments({"x": text, "y": "1"}, {"properties": {"x": schema}})
    assert found == {"x": value, "y": "1"}
    assert type(found["x"]) is type(value)


def test_arguments_without_known_parameters_stay_texts() -> None:
    assert cast_arguments({"x": "1", "z": 2}, {"properties": []}) == {"x": "1", "z": 2}
