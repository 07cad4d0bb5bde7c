"""Pages of other origins: preflight requests, and the headers of answers, errors and streams."""

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import ConfigError
from corun.runtime.server.access import Access

PAGE = "http://localhost:3000"
OTHER = "https://example.org"
KEY = {"authorization": "Bearer k"}
ALLOWED = "access-control-allow-origin"


@pytest.fixture
def pages(start_server: Callable[..., Any], engine: Any) -> Any:
    """A server with a key, for pages of one origin."""
    access = Access.of(ServeConfig(api_key=("k",)))
    server = start_server(type(engine)(), access=access, allowed_origins=(PAGE,))
    with httpx.Client(base_url=server.url, timeout=20) as http:
        yield http


def preflight(http: httpx.Client, path: str, origin: str, method: str = "POST") -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
        "access-control-request-private-network": "true",
    }
    return http.options(path, headers=headers)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health"])
def test_preflight(pages: httpx.Client, path: str) -> None:
    answer = preflight(pages, path, PAGE)
    assert answer.status_code == 200  # without a key, which a browser does not send
    assert answer.headers[ALLOWED] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert ALLOWED not in preflight(pages, path, OTHER).headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 200),
        ("/v1/completions", {"prompt": "hi"}, 200),
        ("/v1/completions", {"prompt": "hi", "model": "none"}, 404),
    ],
)
def test_fast_routes(pages: httpx.Client, path: str, body: dict[str, Any], status: int, stream: bool) -> None:
    sent = body | {"stream": stream, "max_tokens": 2}
    for origin, shown in ((PAGE, PAGE), (OTHER, None), (None, None)):
        headers = KEY if origin is None else KEY | {"origin": origin}
        answer = pages.post(path, json=sent, headers=headers)
        assert (answer.status_code, answer.headers.get(ALLOWED)) == (status, shown)
        if origin == PAGE:
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 401), ("/health", 200)])
def test_other_routes(pages: httpx.Client, path: str, status: int) -> None:
    answer = pages.get(path, headers={"origin": PAGE})
    assert (answer.status_code, answer.headers[ALLOWED]) == (status, PAGE)


def test_missing_route(pages: httpx.Client) -> None:
    answer = pages.get("/nothing", headers=KEY | {"origin": PAGE})
    assert (answer.status_code, answer.headers[ALLOWED]) == (404, PAGE)


def test_any_origin(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), allowed_origins=("*",))
    with httpx.Client(base_url=server.url, timeout=20) as http:
        assert http.get("/health", headers={"origin": OTHER}).headers[ALLOWED] == "*"
        assert preflight(http, "/v1/completions", OTHER).headers[ALLOWED] == "*"


def test_default_allows_none(http: httpx.Client) -> None:
    assert preflight(http, "/v1/completions", PAGE).status_code == 405
    assert ALLOWED not in http.get("/health", headers={"origin": PAGE}).headers


@pytest.mark.parametrize("origin", ["localhost:3000", f"{PAGE}/", f"{PAGE}/page", "null"])
def test_malformed_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins is .*, must be \* or a scheme"):
        ServeConfig(allowed_origins=(origin,))


@pytest.mark.parametrize(
    ("config", "warns"),
    [
        (ServeConfig(allowed_origins=("*",)), True),
        (ServeConfig(allowed_origins=("*",), api_key=("k",)), False),
        (ServeConfig(allowed_origins=(PAGE,)), False),
    ],
)
def test_warning(config: ServeConfig, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Access.of(config).warn_if_open(config.allowed_origins)
    assert bool(caplog.records) == warns
