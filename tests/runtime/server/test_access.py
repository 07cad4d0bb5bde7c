"""Keys, and pages of other origins: which requests pass, and the errors of the others."""

import hmac
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import AdminKeyNeededError, ConfigError, InvalidKeyError
from corun.runtime.server.access import Access, Keys
from corun.runtime.server.route_docs import ROUTE_DOCS

CHANGES = [
    "/v1/load_lora_adapter",
    "/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/unload_lora_adapter",
    "/v1/lora_adapters/upper/pin",
]
PROBES = ("/health", "/ready", "/version")


def bearer(key: str) -> Mapping[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def test_api_key(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), access=Access.of(ServeConfig(api_key=("schlüssel",))))
    with httpx.Client(base_url=server.url, timeout=20) as http:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200
        for header in (None, "Bearer wrong", "schlüssel", "Bearer schlüssel2"):
            headers = {} if header is None else {b"Authorization": header.encode()}
            for path in ("/v1/models", "/nothing"):
                response = http.get(path, headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["type"] == "authentication_error"
        lower = {b"Authorization": "bearer  schlüssel".encode()}
        assert http.get("/v1/models", headers=lower).status_code == 200
        right = {b"Authorization": "Bearer schlüssel".encode()}
        assert http.get("/v1/models", headers=right).status_code == 200
        response = http.post("/v1/completions", json={"prompt": "hi"}, headers=right)
        assert response.status_code == 200


def test_without_keys_all_are_let_in() -> None:
    for path in ("/v1/models", "/metrics", *CHANGES):
        Access().check("POST", path, {})


@pytest.mark.parametrize("path", CHANGES)
def test_an_admin_key_is_for_changes_and_fits_everywhere(path: str) -> None:
    access = Access(Keys(["user"]), Keys(["admin", "boss"]))
    access.check("POST", path, bearer("admin"))
    access.check("DELETE", path, bearer("boss"))
    access.check("POST", "/v1/completions", bearer("boss"))
    with pytest.raises(AdminKeyNeededError, match="--admin-key"):
        access.check("POST", path, bearer("user"))
    for headers in ({}, bearer(""), bearer("adm"), {b"authorization": b"Basic admin"}):
        with pytest.raises(InvalidKeyError, match="--api-key"):
            access.check("POST", path, headers)


def test_every_route_that_changes_adapters_is_known() -> None:
    access = Access(Keys(["user"]), Keys(["admin"]))
    changes = [key for key in ROUTE_DOCS if key[0] != "GET" and "lora" in key[1]]
    assert len(changes) >= 4
    for method, path in changes:
        with pytest.raises(AdminKeyNeededError):
            access.check(method, path, bearer("user"))


def test_admin_keys_alone_leave_the_rest_open() -> None:
    access = Access(admin=Keys(["admin"]))
    access.check("POST", "/v1/completions", {})
    access.check("GET", "/v1/lora_adapters/upper", {})
    for headers in ({}, bearer("other")):
        with pytest.raises(InvalidKeyError):
            access.check("POST", "/v1/load_lora_adapter", headers)


def test_probes_and_metrics_are_open_or_not() -> None:
    config = ServeConfig(api_key=("k",))
    for path in (*PROBES, "/metrics"):
        Access.of(config).check("GET", path, {})
    config = ServeConfig(api_key=("k",), metrics_need_key=True, health_needs_key=True)
    for path in (*PROBES, "/metrics"):
        with pytest.raises(InvalidKeyError):
            Access.of(config).check("GET", path, {})
        Access.of(config).check("GET", path, bearer("k"))


def test_keys_come_from_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("\n one \ntwo\n\n", encoding="utf-8")
    (tmp_path / "admins").write_text("root", encoding="utf-8")
    config = ServeConfig(
        api_key=("zero",), api_key_file=str(tmp_path / "users"), admin_key_file=str(tmp_path / "admins")
    )
    access = Access.of(config)
    assert all(access.api.have(key) for key in (b"zero", b"one", b"two"))
    assert not any(access.api.have(key) for key in (b"", b"root", b" one "))
    assert access.admin.have(b"root")


def test_a_model_is_no_key() -> None:
    access = Access(Keys(["user"]), Keys(["admin"]))
    access.check_model("a/model")
    access.check_model(None)
    for key in ("user", "admin"):
        with pytest.raises(ConfigError, match="MODEL") as caught:
            access.check_model(key)
        assert key not in str(caught.value)


def test_which_requests_are_an_administrators() -> None:
    access = Access(Keys(["user"]), Keys(["admin"]), frozenset({"/metrics"}))
    for path in ("/v1/completions", "/v1/load_lora_adapter"):
        assert access.check("POST", path, bearer("admin"))
    assert not access.check("POST", "/v1/completions", bearer("user"))
    only_admins = Access(admin=Keys(["admin"]))
    for headers, is_admin in (({}, False), (bearer("x"), False), (bearer("admin"), True)):
        assert only_admins.check("POST", "/v1/completions", headers) is is_admin
    assert not Access().check("POST", "/v1/completions", bearer("admin"))


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff"])
def test_files_without_keys_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    for option in ("api_key_file", "admin_key_file"):
        options: dict[str, Any] = {option: str(path)}
        flag = f"--{option.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"{flag} .*keys"):
            Access.of(ServeConfig(**options))


@pytest.mark.parametrize("key", [" a", "a\n"])
def test_keys_that_no_header_can_carry_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="--admin-key begins or ends with a space"):
        ServeConfig(admin_key=(key,))


def test_each_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one) == len(other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys(["a", "a longer one", "b"])
    for given in (b"a", b"b", b"none of them, and long"):
        compared.clear()
        keys.have(given)
        assert compared == [True] * 3


def test_changes_over_http_need_an_admin(start_server: Callable[..., Any], engine: Any) -> None:
    engine = type(engine)()
    access = Access(Keys(["user"]), Keys(["admin"]))
    server = start_server(engine, access=access, allow_lora_updates=True)
    with httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"lora_name": "new", "lora_path": "/x"}
        for path in CHANGES[:2]:
            refused = http.post(path, json=body, headers={"Authorization": "Bearer user"})
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "admin_key_needed"
        assert "new" not in engine.adapters
        headers = {"Authorization": "Bearer admin"}
        assert http.post(CHANGES[0], json=body, headers=headers).status_code == 200
        assert http.get("/v1/lora_adapters/new", headers={"Authorization": "Bearer user"}).is_success


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
