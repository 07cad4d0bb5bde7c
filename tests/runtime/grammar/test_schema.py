"""Schemas are changed only where llguidance would allow more than they say."""

from typing import Any

import pytest
from corun.runtime.grammar.schema import exact_schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"format": {"const": {"format": "time"}}}},
        {"enum": [{"format": "time"}], "default": {"exclusiveMinimum": 0, "maximum": 0.5}},
        {"exclusiveMinimum": 0, "maximum": 1},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5},  # of an old draft
    ],
)
def test_what_stays_the_same(schema: Any) -> None:
    assert exact_schema(schema) == schema


def test_times_have_no_leap_second() -> None:
    schema = {"properties": {"const": {"format": "time", "allOf": [{"minLength": 1}]}}}
    exact = exact_schema(schema)["properties"]["const"]
    assert exact["format"] == "time" and exact["allOf"][0] == {"minLength": 1}
    assert "pattern" in exact["allOf"][1]
    assert schema == {"properties": {"const": {"format": "time", "allOf": [{"minLength": 1}]}}}


@pytest.mark.parametrize(
    ("schema", "exact"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, {"minimum": 1e-9, "maximum": 0.5}),
        (
            {"exclusiveMinimum": 1, "minimum": 1.2, "exclusiveMaximum": 1.5},
            {"minimum": 1.2, "exclusiveMaximum": 1.5},
        ),
        (
            {"items": [{"type": ["number", "null"], "minimum": -1.5, "exclusiveMaximum": -1.0}]},
            {"items": [{"type": ["number", "null"], "minimum": -1.5, "maximum": -1.000000001}]},
        ),
    ],
)
def test_an_excluded_integer_moves_out_of_a_short_range(schema: Any, exact: Any) -> None:
    assert exact_schema(schema) == exact
