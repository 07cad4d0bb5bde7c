"""Requests that fit the OpenAPI document, and those that do not, get answers that fit it."""

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from corun.runtime.server.route_docs import ROUTE_DOCS
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
)
FITTING = [
    (method, path, GenerationMode.POSITIVE)
    for (method, path), doc in ROUTE_DOCS.items()
    if doc.event is None or doc.answer is not None  # else it has no end
]
# A route without input cannot get a wrong one.
UNFITTING = [
    (method, path, GenerationMode.NEGATIVE)
    for (method, path), doc in ROUTE_DOCS.items()
    if doc.body is not None or doc.query
]


# 80 cases for each route, with valid and invalid ones; one for a route without input.
@pytest.mark.parametrize("num_cases", [40, pytest.param(400, marks=pytest.mark.full)])
@pytest.mark.parametrize(("method", "path", "mode"), FITTING + UNFITTING)
def test_every_answer_fits_the_document(
    start_server: Callable[..., Any],
    engine: Any,
    method: str,
    path: str,
    mode: GenerationMode,
    num_cases: int,
) -> None:
    engine = type(engine)()
    engine.tokens_per_output = 10_000  # many choices without max_tokens are many outputs
    server = start_server(engine, allow_lora_updates=True)
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

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
