"""Schemas, regexes and grammars that take long, or much memory, to compile."""

import json

from corun.runtime.sampling import StructuredOutput


def regex(text: str) -> StructuredOutput:
    return StructuredOutput("regex", text, "guided_regex")


def schema(value: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value), "guided_json")


def slow(number: int) -> StructuredOutput:
    """Return one of many schemas, each of an automaton with 100,000 states."""
    return schema({"type": "integer", "multipleOf": 99_991 + number})


SLOW = slow(0)
HOSTILE = {
    "slow": SLOW,
    "optional": regex("a?" * 30_000),
    "recursion": schema({"type": "object", "properties": {f"k{i}": {"$ref": "#"} for i in range(2500)}}),
    "chain of references": schema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
                for i in range(600)
            }
            | {"d600": {"type": "string"}},
        }
    ),
    "product": schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(12)]}
                for i in range(12)
            ]
        }
    ),
    "deep rules": StructuredOutput(
        "grammar",
        "start: a0\n" + "".join(f'a{i}: a{i + 1} a{i + 1} | "x"\n' for i in range(2500)) + 'a2500: "y"',
        "guided_json",
    ),
    "parentheses": regex("(" * 30_000 + "a" + ")" * 30_000),
}
