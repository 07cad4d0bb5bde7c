"""The fields of structured output, by the names that several servers give them: one value.

``response_format`` is OpenAI's. The others are synonyms of vLLM, SGLang, llama.cpp and Ollama.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ..errors import RequestError
from ..sampling import StructuredOutput
from .body import RequestModel, given
from .fields import FieldTable, RefusedField
from .json_values import wrong_type

Object = dict[str, Any]

_FORMATS = '"text", "json_object", "json_schema" or "structural_tag"'
_ONE_FORM = "JSON has one space after each comma and colon, and no other whitespace"
_KINDS: Mapping[str, str] = {  # by field, where the field is a schema, regex, grammar or choices
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
# The same for the fields of structured_outputs.
_PART_KINDS: Mapping[str, str] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_TABLES: Mapping[str, FieldTable] = {
    "structured_outputs": FieldTable(
        served=(*_PART_KINDS, "json_object"),
        accepted={"disable_fallback": "there is one implementation", "disable_any_whitespace": _ONE_FORM},
        refused={
            "disable_additional_properties": RefusedField(
                "write additionalProperties into the schema", (False,)
            ),
            "whitespace_pattern": RefusedField(_ONE_FORM),
        },
    )
}


class StructureFields(RequestModel):
    """The form of the answer: at most one of these."""

    nested: ClassVar = _TABLES

    response_format: Object | None = given(
        "The form of the answer: type text, json_object, or json_schema with json_schema.schema; "
        "also structural_tag with structures and triggers."
    )
    structured_outputs: Object | None = given(
        "One of json (a schema), regex, choice, grammar, structural_tag, json_object (true)."
    )
    guided_json: Object | str | None = given("A JSON schema of the answer.")
    guided_regex: str | None = given("A regular expression that the whole answer matches.")
    guided_choice: list[str] | None = given("The answer is one of these texts.")
    guided_grammar: str | None = given("A grammar of the answer, in llguidance's Lark or GBNF.")
    json_schema: Object | str | None = given("Another name for guided_json.")
    regex: str | None = given("Another name for guided_regex.")
    grammar: str | None = given("Another name for guided_grammar.")
    ebnf: str | None = given("Another name for guided_grammar.")
    format: Object | str | None = given('A JSON schema of the answer, or "json": any object.')
    structured_forced_tokens: bool | None = given(
        "Compute text that the form leaves no choice for at once, without drawing its tokens; default: true."
    )

    def structured_output(self) -> StructuredOutput | None:
        """Return the form of the answer; None = any text.

        Raises ``RequestError`` for two fields that differ.
        """
        if _NAMES.isdisjoint(self.model_fields_set):  # usual case
            return None
        found: StructuredOutput | None = None
        for one in self._given():
            if found is not None and (one.kind, one.text) != (found.kind, found.text):
                raise RequestError(
                    f"{found.field} and {one.field} are given and differ; give one of them", param=one.field
                )
            found = one
        return found

    def _given(self) -> Iterator[StructuredOutput]:
        if self.response_format is not None:
            found = _of_response_format(self.response_format)
            if found is not None:
                yield found
        if self.structured_outputs is not None:
            yield from _of_structured_outputs(self.structured_outputs)
        if self.format == "json":
            yield _any_object("format")
        elif self.format:
            yield _made("json_schema", self.format, "format")
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None and value != "":
                yield _made(kind, value, name)


_NAMES = frozenset(StructureFields.model_fields) - {"structured_forced_tokens"}


def _any_object(field: str) -> StructuredOutput:
    return StructuredOutput("json_object", "", field)


def _made(kind: str, value: object, field: str) -> StructuredOutput:
    """Return the value of a field as JSON, unless it is a text already."""
    text = value if isinstance(value, str) else json.dumps(value)
    return StructuredOutput(kind, text, field)


def _of_response_format(value: Object) -> StructuredOutput | None:
    """Return OpenAI's form; its name, description and strict change nothing.

    An object may have a schema, as in llama.cpp and LoRAX.
    """
    field, schema = "response_format", value.get("schema")
    match value.get("type"):
        case "text":
            return None
        case "json_object" if schema is None:
            return _any_object(field)
        case "json_object":
            return _made("json_schema", schema, field)
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict):
                raise wrong_type(f"{field}.json_schema", inner, "an object")
            schema = inner.get("schema")
            if not isinstance(schema, dict):
                raise wrong_type(f"{field}.json_schema.schema", schema, "an object")
            return _made("json_schema", schema, field)
        case "structural_tag":
            return _made("structural_tag", value, field)
        case kind:
            raise wrong_type(f"{field}.type", kind, _FORMATS)


def _of_structured_outputs(value: Object) -> Iterator[StructuredOutput]:
    field = "structured_outputs"
    any_object = value.get("json_object")
    if not isinstance(any_object, bool | None):
        raise wrong_type(f"{field}.json_object", any_object, "a boolean")
    if any_object:
        yield _any_object(f"{field}.json_object")
    for name, kind in _PART_KINDS.items():
        part = value.get(name)
        if part is None:
            continue
        path = f"{field}.{name}"
        if kind in ("regex", "grammar") and not isinstance(part, str):
            raise wrong_type(path, part, "a string")
        yield _made(kind, part, path)
