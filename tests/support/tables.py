"""The tables of the documentation that the code determines. ``make tables`` writes them.

A page has a table between two marks, which name it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from corun.runtime.config.cluster import ClusterConfig
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.option import OptionSpec, option_specs
from corun.runtime.config.serve import ServeConfig
from corun.runtime.limits import MAX_BAD_WORDS
from corun.runtime.sampling import MAX_CHOICES, MAX_LOGPROBS
from corun.runtime.server.adapter_listing import MAX_PAGE
from corun.runtime.server.anthropic_fields import ANTHROPIC_ACCEPTED, ANTHROPIC_REFUSED
from corun.runtime.server.body import RequestModel
from corun.runtime.server.chat import ChatRequest
from corun.runtime.server.errors import error_codes
from corun.runtime.server.fields import (
    ACCEPTED_FIELDS,
    ACCEPTED_STREAM_OPTIONS,
    MAX_UNKNOWN_NAMES,
    MESSAGE_FIELDS,
    REFUSED_FIELDS,
    FieldTable,
    RefusedField,
)
from corun.runtime.server.generation_request import GenerationFields, StreamOptions
from corun.runtime.server.json_values import show
from corun.runtime.server.openapi import body_schemas
from corun.runtime.server.response_fields import RESPONSES_ACCEPTED, RESPONSES_REFUSED
from corun.runtime.server.route_docs import ROUTE_DOCS
from support.product import ROOT

_MARKED = re.compile(r"(<!-- (\w+): written by `make tables` -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)
# Options that limit requests.
_LIMIT_OPTIONS = (
    *("max_model_len", "max_num_seqs", "max_num_waiting", "max_queue_s", "max_stop_strings"),
    *("max_logit_bias", "max_stop_bytes", "max_bad_words_bytes", "max_waiting_chars"),
    *("max_body_mib", "max_bodies_mib", "max_json_depth", "max_json_items", "max_messages"),
    *("max_content_parts", "max_request_tokens", "max_tokenize_tokens"),
    *("template_timeout_s", "max_template_chars"),
    *("max_hub_adapter_mib", "max_hub_adapters", "max_hub_gib"),
    *("max_connections", "max_idle_connections", "header_timeout_s", "body_timeout_s"),
    *("max_unsent_kib", "unsent_timeout_s"),
)


def routes_markdown() -> str:
    """Return a table with a line for each route."""
    rows = [
        (
            f"`{method} {path}`",
            doc.summary,
            ", ".join(map(str, sorted({200, *doc.errors, *([503] if doc.unhealthy else [])}))),
        )
        for (method, path), doc in ROUTE_DOCS.items()
    ]
    return _table(("route", "does", "statuses"), rows)


def fields_markdown() -> str:
    """Return a table of the fields of each body, and one of the shared fields."""
    bodies: dict[type[RequestModel], list[str]] = {}
    for (method, path), doc in ROUTE_DOCS.items():
        if doc.body is not None:
            bodies.setdefault(doc.body, []).append(f"`{method} {path}`")
    schemas = body_schemas((*bodies, GenerationFields), is_closed=False)
    messages = schemas[ChatRequest.__name__]["properties"]["messages"]["items"]
    parts = [("Both routes of completions", _field_table(schemas[GenerationFields.__name__]))]
    for model, routes in bodies.items():
        shared = GenerationFields.model_fields if issubclass(model, GenerationFields) else ()
        parts.append((", ".join(routes), _field_table(schemas[model.__name__], without=shared)))
    parts.append(("`stream_options`", _field_table(schemas[StreamOptions.__name__])))
    parts.append(("Each of `messages`", _field_table(messages)))
    return "\n".join(f"{title}:\n\n{table}" for title, table in parts)


def accepted_markdown() -> str:
    """Return a table of the fields that are accepted without effect, with the reasons."""
    rows = [(f"`{name}`", why) for name, why in ACCEPTED_FIELDS.items()]
    rows += [(f"`stream_options.{name}`", why) for name, why in ACCEPTED_STREAM_OPTIONS.items()]
    rows += [
        (f"`{path}.{name}`", why)
        for path, table in _nested("messages[]", MESSAGE_FIELDS)
        for name, why in table.accepted.items()
    ]
    rows += [(f"`{name}` of `/v1/responses`", why) for name, why in RESPONSES_ACCEPTED.items()]
    rows += [(f"`{name}` of `/v1/messages`", why) for name, why in ANTHROPIC_ACCEPTED.items()]
    return _table(("field", "reason"), rows)


def refused_markdown() -> str:
    """Return a table of the refused fields, with the reason or the replacement."""
    rows = [_refused_row(f"`{name}`", one) for name, one in REFUSED_FIELDS.items()]
    rows += [
        _refused_row(f"`{path}.{name}`", one)
        for path, table in _nested("messages[]", MESSAGE_FIELDS)
        for name, one in table.refused.items()
    ]
    for path, fields in (("/v1/responses", RESPONSES_REFUSED), ("/v1/messages", ANTHROPIC_REFUSED)):
        rows += [_refused_row(f"`{name}` of `{path}`", one) for name, one in fields.items()]
    return _table(("field", "reason or replacement", "accepted values"), rows)


def errors_markdown() -> str:
    """Return a table of the error codes."""
    rows = [(f"`{code}`", str(status), meaning) for code, (status, meaning) in error_codes().items()]
    return _table(("code", "status", "meaning"), rows)


def limits_markdown() -> str:
    """Return a table of the limits of a request, each with its option, if there is one."""
    rows = [
        ("choices of a prompt (`n`)", str(MAX_CHOICES), ""),
        ("log-probabilities of alternatives", str(MAX_LOGPROBS), ""),
        ("`bad_words` of a request", str(MAX_BAD_WORDS), ""),
        ("unknown fields of a body, by name", str(MAX_UNKNOWN_NAMES), ""),
        ("adapters on a page", str(MAX_PAGE), ""),
    ]
    for spec in (*option_specs(EngineConfig), *option_specs(ServeConfig)):
        if spec.name in _LIMIT_OPTIONS:
            what = spec.help.rstrip(".").partition("; default: ")
            default = "no limit" if spec.default is None else f"{spec.default}"
            rows.append((what[0], what[2] or default, f"`{spec.flag}`"))
    return _table(("limit", "default", "option"), rows)


def options_markdown(*configs: type) -> str:
    """Return a table with a line for each option."""
    rows = [(_usage(spec), _default(spec), _meaning(spec)) for one in configs for spec in option_specs(one)]
    return _table(("option", "default", "meaning"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "options": lambda: options_markdown(EngineConfig, ServeConfig),
    "cluster": lambda: options_markdown(ClusterConfig),
    "routes": routes_markdown,
    "fields": fields_markdown,
    "accepted": accepted_markdown,
    "refused": refused_markdown,
    "errors": errors_markdown,
    "limits": limits_markdown,
}
PAGES = {
    "docs/options.md": {"options"},
    "runtime/cluster/README.md": {"cluster"},
    "runtime/server/README.md": {"routes", "fields", "accepted", "refused", "errors", "limits"},
}


def with_tables(page: str) -> str:
    """Return the text of a page with the present tables between its marks."""
    return _MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[4]}", page)


def tables_of(page: str) -> set[str]:
    """Return the tables for which a page has marks."""
    return {found[2] for found in _MARKED.finditer(page)}


def _nested(path: str, table: FieldTable) -> Iterator[tuple[str, FieldTable]]:
    yield path, table
    for name, below in table.nested.items():
        yield from _nested(f"{path}.{name}[]", below)


def _refused_row(name: str, refused: RefusedField) -> tuple[str, str, str]:
    return name, refused.instead, ", ".join(_code(show(one)) for one in refused.neutral)


def _field_table(schema: Mapping[str, Any], *, without: Collection[str] = ()) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"`{name}`" + (" (required)" if name in required else ""),
            _kind(field),
            field.get("description", ""),
        )
        for name, field in schema["properties"].items()
        if name not in without
    ]
    return _table(("field", "type", "meaning"), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """Name the type of a schema, without null, which always means "not given"."""
    if "anyOf" in schema:
        kinds = (_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(_code(one) for one in schema["enum"])
    if "$ref" in schema:
        return "object"
    kind = schema["type"]
    if isinstance(kind, list):
        return " or ".join(one for one in kind if one != "null")
    if kind == "array":
        inner = _kind(schema["items"])
        is_array = inner.startswith("array")
        return f"array of {inner.replace('array', 'arrays', 1) if is_array else f'{inner}s'}"
    if "maximum" in schema:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        bracket = "[" if "minimum" in schema else "("
        return f"{kind} in {bracket}{low}, {schema['maximum']}]"
    return str(kind)


def _usage(spec: OptionSpec) -> str:
    if spec.positional or spec.kind is bool:
        return _code(spec.flag)
    value = spec.metavar or ("" if spec.choices else spec.value_name)
    dots = " …" if spec.repeated else ""
    return _code(f"{spec.flag} {value}{dots}" if value else spec.flag)


def _default(spec: OptionSpec) -> str:
    if spec.kind is bool:
        return "on" if spec.default else "off"
    return "" if spec.default in (None, ()) else f"`{spec.default}`"


def _meaning(spec: OptionSpec) -> str:
    if not spec.choices or len(spec.choices) == 1:
        return spec.help
    return f"{spec.help} One of {', '.join(map(_code, spec.choices))}."


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
