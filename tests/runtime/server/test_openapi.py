"""The OpenAPI document has every route, and all answers fit it, also those to drawn requests."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from corun.runtime.server.errors import ErrorBody, error_codes
from corun.runtime.server.route_docs import ROUTE_DOCS
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from support.fake_engine import FakeEngine

GENERATING = ("/v1/chat/completions", "/v1/completions")
LORA = {"lora_name": "upper", "lora_path": "/x", "load_inplace": True}
# A request for each route, and one of its error statuses.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
        "model": "digits",
        "return_timing": True,
        "return_token_ids": True,
        "max_tokens": 3,
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {
        "prompt": "hi",
        "logprobs": 2,
        "return_timing": True,
        "return_token_ids": True,
        "max_tokens": 3,
    },
    "/v1/load_lora_adapter": LORA,
    "/load_lora_adapter": LORA,
    "/v1/unload_lora_adapter": {"lora_name": "upper"},
    "/unload_lora_adapter": {"lora_name": "digits"},
    "/tokenize": {"prompt": "hi", "return_token_strs": True},
    "/detokenize": {"tokens": [97]},
}


@pytest.fixture
def lora_http(start_server: Callable[..., Any], engine: Any) -> Iterator[httpx.Client]:
    server = start_server(type(engine)(), allow_lora_updates=True)
    with httpx.Client(base_url=server.url, timeout=20) as http:
        yield http


def check_is(data: bytes, kind: Any) -> None:
    """Check that ``data`` is the JSON of ``kind``, with nothing beside its fields."""
    decoded = msgspec.json.decode(data, type=kind)
    assert msgspec.json.decode(msgspec.json.encode(decoded)) == json.loads(data)


def ask(http: httpx.Client, method: str, path: str, **fields: Any) -> httpx.Response:
    path = path.replace("{model}", "upper").replace("{name}", "upper")
    body = BODIES[path] | fields if path in BODIES else None
    return http.request(method, path, json=body)


def test_the_document_has_every_route(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    found = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    assert found == set(ROUTE_DOCS)
    text = json.dumps(document)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names == set(document["components"]["schemas"])
    operations = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(set(operations)) == len(operations)


# Endless streams are tested in ``test_state_routes.py``.
ENDING = [route for route, doc in ROUTE_DOCS.items() if doc.event is None or doc.answer is not None]


@pytest.mark.parametrize(("method", "path"), ENDING)
def test_answers_are_what_it_says(lora_http: httpx.Client, method: str, path: str) -> None:
    doc = ROUTE_DOCS[method, path]
    response = ask(lora_http, method, path)
    assert response.status_code == 200, response.text
    if doc.answer is None:
        assert response.headers["content-type"].startswith("text/plain")
    else:
        assert response.headers["content-type"] == "application/json"
        check_is(response.content, doc.answer)


@pytest.mark.parametrize("path", GENERATING)
def test_events_are_what_it_says(http: httpx.Client, path: str) -> None:
    doc = ROUTE_DOCS["POST", path]
    asked: tuple[dict[str, Any], ...] = (
        {},
        {"logprobs": None, "top_logprobs": None, "return_token_ids": None, "return_timing": None},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    for fields in asked:
        fields |= {"stream": True}
        if path == "/v1/completions":
            fields.pop("top_logprobs", None)
        response = ask(http, "POST", path, **fields)
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        for event in events:
            check_is(event.encode(), doc.event)


def test_a_bound_of_fields_is_said(start_server: Callable[..., Any], engine: Any) -> None:
    for policy, is_open in (("warn", True), ("refuse", False), ("ignore", True)):
        server = start_server(type(engine)(), unknown_fields=policy)
        schemas = httpx.get(server.url + "/openapi.json").json()["components"]["schemas"]
        for name in ("ChatRequest", "CompletionRequest", "StreamOptions", "LoadRequest"):
            assert schemas[name]["additionalProperties"] is is_open


def test_errors_are_what_it_says(http: httpx.Client, engine: Any) -> None:
    engine.fail_after_tokens = 0
    for method, path in ENDING:
        codes = error_codes()
        for fields in ({}, {"return_timing": True}, {"model": "nobody"}, {"n": "x"}):
            response = ask(http, method, path, **fields)
            if response.status_code == 200:
                continue
            check_is(response.content, ErrorBody)
            error = response.json()["error"]
            assert codes[error["code"]][0] == response.status_code
            assert response.status_code in ROUTE_DOCS[method, path].errors


@pytest.mark.parametrize("of_clusters", [False, True])
def test_every_code_is_in_the_table(repository: Path, of_clusters: bool) -> None:
    """The codes of clusters are in a table of their own."""
    known, clusters = set(error_codes()), repository / "runtime/cluster"
    if of_clusters:
        text = (clusters / "README.md").read_text(encoding="utf-8")
        known |= set(re.findall(r"^\| `(\w+)` \| \d", text, re.MULTILINE))
    used = set()
    for path in (repository / "runtime").rglob("*.py"):
        if path.is_relative_to(clusters) != of_clusters:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                used |= {value.value for value in [node.value] if isinstance(value, ast.Constant)}
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ErrorReply":
                used |= {one.value for one in node.args[2:3] if isinstance(one, ast.Constant)}
    assert used and not used - known


CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
)
PATHS = {path for _, path in ROUTE_DOCS}
FITTING = [
    (method, path, GenerationMode.POSITIVE)
    for (method, path), doc in ROUTE_DOCS.items()
    if doc.event is None or doc.answer is not None  # else it has no end
    if f"/v1{path}" not in PATHS  # else it is another name of that route
]
# A route without input cannot get a wrong one.
UNFITTING = [
    (method, path, GenerationMode.NEGATIVE)
    for (method, path), doc in ROUTE_DOCS.items()
    if doc.body is not None or doc.query
    if f"/v1{path}" not in PATHS
]


@pytest.fixture(scope="module")
def document(start_module_server: Callable[..., Any]) -> Any:
    """The document of a server that changes adapters."""
    engine = FakeEngine()
    engine.tokens_per_output = 10_000  # many choices without max_tokens are many outputs
    server = start_module_server(engine, allow_lora_updates=True)
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


# 40 cases for each route, with valid and invalid ones; one for a route without input.
@pytest.mark.parametrize("num_cases", [20, pytest.param(400, marks=pytest.mark.full)])
@pytest.mark.parametrize(("method", "path", "mode"), FITTING + UNFITTING)
def test_every_answer_fits_the_document(
    document: Any, method: str, path: str, mode: GenerationMode, num_cases: int
) -> None:
    @settings(
        max_examples=num_cases,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    check()
