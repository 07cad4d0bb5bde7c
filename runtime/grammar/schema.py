"""Corrects where llguidance allows more than a JSON schema says. Pure.

Each correction is for a fault of llguidance that random schemas have shown
(``tests/runtime/grammar/test_schemas.py``).
"""

from collections.abc import Mapping
from typing import Any

_DATA = frozenset({"const", "enum", "default", "examples"})  # keywords whose values are no schemas
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NO_LEAP_SECOND = "^[^:]*:[^:]*:[0-5]"  # a validator knows on which days there is one
_PATTERNS = {
    "time": _NO_LEAP_SECOND,
    "date-time": _NO_LEAP_SECOND,
    "email": "^[^@]{1,64}@",
}


def exact_schema(schema: Any) -> Any:
    """Return a schema that llguidance follows exactly. Raises ``ValueError`` with a keyword.

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
    _check_range(exact)
    return exact


def _check_range(schema: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for numbers near an integer that is itself excluded.

    llguidance allows the integer if the other bound is less than 1 away.
    """
    if "number" not in str(schema.get("type", "number")):
        return
    for keyword, others in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        bound = _number(schema, keyword)
        for other in others:
            far = _number(schema, other)
            if bound is None or far is None:
                continue
            if bound == int(bound) and abs(far - bound) < 1:
                raise ValueError(
                    f"{keyword} {bound} with {other} {far}: numbers within 1 of an excluded integer"
                )


def _number(schema: Mapping[str, Any], keyword: str) -> int | float | None:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
