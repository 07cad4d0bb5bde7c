"""The rule of a JSON schema, corrected where llguidance allows more than the schema says. Pure.

Each correction is for a fault of llguidance that random schemas have shown
(``tests/runtime/grammar/test_schemas.py``).
"""

import json
from collections.abc import Mapping
from typing import Any

# JSON as chat templates and Python write it: with these separators and no other white space. A
# model has then fewer choices, and names of properties are forced with what is around them.
_JSON_FORM: Any = {
    "lenient": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}

_DATA = frozenset({"const", "enum", "default", "examples"})  # their values are no schemas
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NO_LEAP_SECOND = "^[^:]*:[^:]*:[0-5]"  # a validator knows on which days there is one
_STEP = 1e-9
_PATTERNS = {"time": _NO_LEAP_SECOND, "date-time": _NO_LEAP_SECOND, "email": "^[^@]{1,64}@"}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the rule of JSON with ``schema``."""
    return "%json " + json.dumps({**exact_schema(schema), "x-guidance": _JSON_FORM})


def exact_schema(schema: Any) -> Any:
    """Return a schema for llguidance: each answer that it allows is valid for ``schema``.

    ``schema``: of any JSON type, up to a few hundred levels deep.
    """
    if isinstance(schema, list):
        return [exact_schema(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    exact: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, Mapping):
            exact[keyword] = {name: exact_schema(one) for name, one in value.items()}
        else:
            exact[keyword] = value if keyword in _DATA else exact_schema(value)
    pattern, others = _PATTERNS.get(str(exact.get("format"))), exact.get("allOf", [])
    if pattern is not None and isinstance(others, list):
        exact["allOf"] = [*others, {"pattern": pattern}]
    if "number" in str(exact.get("type", "number")):
        _narrow_range(exact)
    return exact


def _narrow_range(schema: dict[str, Any]) -> None:
    """Move an excluded integer out of a range that is shorter than 1.

    llguidance would allow it there. A few numbers next to it are lost.
    """
    for excluded, included, others, step in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), _STEP),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -_STEP),
    ):
        bound = _number(schema, excluded)
        far = [one for other in others if (one := _number(schema, other)) is not None]
        if bound is None or bound != int(bound) or all(abs(one - bound) >= 1 for one in far):
            continue
        near = _number(schema, included)
        moved = [bound + step] if near is None else [bound + step, near]
        schema[included] = max(moved) if step > 0 else min(moved)
        del schema[excluded]


def _number(schema: Mapping[str, Any], keyword: str) -> int | float | None:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
