"""``/openapi.json``: bodies and answers of each route, from the models that serve it."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from ..sampling import RANGES, Range
from .body import RequestModel
from .errors import ErrorBody, error_codes
from .route_docs import ROUTE_DOCS, RouteDoc
from .settings import AppSettings

_REFERENCE = "#/components/schemas/{}"
# Fields that ``SamplingParams`` has under another name.
_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
_PARAMETER = re.compile(r"{(\w+)}")


def openapi_json(routes: Iterable[Route], settings: AppSettings) -> bytes:
    """Return the document of a server with ``routes``, as JSON."""
    named = [
        (method, route.path.replace(":path}", "}"))
        for route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    return msgspec.json.encode(
        openapi_document(named, settings.version, unknown_fields=settings.unknown_fields)
    )


def openapi_document(
    routes: Iterable[tuple[str, str]], version: str, *, unknown_fields: str
) -> dict[str, Any]:
    """Return the document of a server with ``routes`` (methods and paths).

    ``unknown_fields``: the value of the option.
    """
    docs = {route: ROUTE_DOCS[route] for route in routes}
    types = {ErrorBody}
    for doc in docs.values():
        types |= {one for one in (doc.answer, doc.event, doc.unhealthy) if one is not None}
    ordered = sorted(types, key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE.format("{name}"))
    by_type = dict(zip(ordered, schemas, strict=True))
    bodies = {doc.body: None for doc in docs.values() if doc.body is not None}
    components |= body_schemas(bodies, is_closed=unknown_fields == "refuse")
    paths: dict[str, Any] = {}
    for (method, path), doc in docs.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, doc, by_type)
    return {
        "openapi": "3.2.0",
        "info": {"title": "corun", "version": version},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def body_schemas(models: Iterable[type[RequestModel]], *, is_closed: bool) -> dict[str, Any]:
    """Return the schemas of bodies; ``is_closed``: other fields are forbidden."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REFERENCE.format("{model}")
    )
    found: dict[str, Any] = definitions["$defs"]
    for schema in found.values():
        schema["additionalProperties"] = not is_closed
        for name, field in schema["properties"].items():
            bounds = RANGES.get(_OTHER_NAMES.get(name, name))
            if bounds is not None:
                _add_bounds(field, bounds)
    return found


def _add_bounds(field: dict[str, Any], bounds: Range) -> None:
    for kind in field.get("anyOf", ()):
        if kind.get("type") in ("integer", "number"):
            kind["exclusiveMinimum" if bounds.open_low else "minimum"] = bounds.low
            kind["maximum"] = bounds.high


def _operation(method: str, path: str, doc: RouteDoc, schemas: dict[Any, Any]) -> dict[str, Any]:
    words = re.findall(r"\w+", path)
    operation: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *words]),
        "summary": doc.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(path)
        ]
        + [{"name": name, "in": "query", "schema": schema} for name, schema in doc.query.items()],
        "responses": _responses(doc, schemas),
    }
    if doc.body is not None:
        schema = {"$ref": _REFERENCE.format(doc.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _responses(doc: RouteDoc, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if doc.answer is not None:
        content["application/json"] = {"schema": schemas[doc.answer]}
    elif doc.event is None:
        content["text/plain"] = {"schema": {"type": "string"}}
    if doc.event is not None:
        content["text/event-stream"] = {"itemSchema": _event_schema(doc, schemas)}
    responses: dict[str, Any] = {"200": {"description": doc.summary, "content": content}}
    if doc.unhealthy is not None:
        schema = schemas[doc.unhealthy]
        responses["503"] = {"description": "Not now.", "content": {"application/json": {"schema": schema}}}
    codes = error_codes()
    for status in sorted(doc.errors):
        named = [code for code, (known, _) in codes.items() if known == status]
        responses[str(status)] = {
            "description": ", ".join(named),
            "content": {"application/json": {"schema": schemas[ErrorBody]}},
        }
    return responses


def _event_schema(doc: RouteDoc, schemas: dict[Any, Any]) -> dict[str, Any]:
    ends = doc.answer is not None and doc.ends_with_done
    contents = [schemas[doc.event]]
    if ends:
        contents.append(schemas[ErrorBody])
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": contents},
    }
    if ends:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
