"""Limits of connections: slow or large heads, too many connections, clients that do not read."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import httpx
import pytest
import uvicorn
from corun.runtime.engine.messages import EngineStats
from corun.runtime.limits import HttpLimits
from corun.runtime.server import connection
from corun.runtime.server.access import Access, Keys
from corun.runtime.server.app import build_app
from corun.runtime.server.connection import GENERATING_PATHS, Connection, connection_class
from corun.runtime.server.metrics import ServerMetrics
from corun.runtime.server.open_requests import answer_id, given_id
from corun.runtime.server.route_docs import ROUTE_DOCS
from corun.runtime.server.settings import AppSettings
from corun.runtime.server.state import make_state
from support.fake_engine import FakeEngine

POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\nx-request-id: mine\r\n\r\n"
    b'{"prompt":"hi"}'
)
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost:"


@contextmanager
def connected(server: Any) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        yield sock


def rest(sock: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    data = b""
    while received := sock.recv(1 << 16):
        data += received
    return data


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: " in head.lower() and b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("sent", [b"", b"\r\n", HALF_HEAD])
def test_a_head_that_does_not_come(start_server: Callable[..., Any], engine: Any, sent: bytes) -> None:
    server = start_server(type(engine)(), limits=HttpLimits(header_timeout_s=0.05))
    with connected(server) as sock:
        sock.sendall(sent)
        answer = rest(sock)
        assert error_of(answer) == (408, "header_timeout")
        assert b"--header-timeout-s" in answer
    assert server.state.metrics.connections_ended["header_timeout"] == 1
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_second_head_that_does_not_come(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), limits=HttpLimits(header_timeout_s=0.5))
    with connected(server) as sock:
        sock.sendall(POST)
        first = b""
        while not first.endswith(b"}"):
            first += sock.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 200")
        sock.sendall(HALF_HEAD)
        assert error_of(rest(sock)) == (408, "header_timeout")


def test_what_generates_for_long_is_no_late_head(
    start_server: Callable[..., Any], engine: Any, wait_until: Callable[..., None]
) -> None:
    engine = type(engine)()
    engine.held.set()
    server = start_server(engine, limits=HttpLimits(header_timeout_s=0.5))
    with connected(server) as sock:
        sock.sendall(POST)
        wait_until(lambda: engine.num_open == 1)
        with connected(server) as other:
            rest(other)  # takes as long as a head may
        engine.held.clear()
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
def test_a_body_that_does_not_come(
    start_server: Callable[..., Any], wait_until: Callable[..., None], path: bytes
) -> None:
    server = start_server(FakeEngine(), limits=HttpLimits(body_timeout_s=0.1))
    with connected(server) as sock:
        sock.sendall(
            b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\nx-request-id: mine\r\n\r\n{"
        )
        answer = rest(sock)
        assert error_of(answer) == (408, "body_timeout") and b"--body-timeout-s" in answer
        assert b"x-request-id: mine\r\n" in answer
    wait_until(lambda: not len(server.state.open_requests))


def test_a_body_that_is_late_after_its_answer(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(), limits=HttpLimits(body_timeout_s=0.2))
    with connected(server) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        answers = rest(sock)
    assert answers.startswith(b"HTTP/1.1 404") and answers.count(b"HTTP/1.1") == 1


def test_a_connection_with_a_body_after_its_answer_is_not_kept(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(), limits=HttpLimits(header_timeout_s=0.5))
    with connected(server) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 404")
        sock.sendall(bytes(100_000))
        assert error_of(rest(sock)) == (408, "header_timeout")


def test_a_large_head(server: Any) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 11_000)
        assert error_of(rest(sock)) == (431, "head_too_large")


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET \xff /\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http(server: Any, sent: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(sent)
        assert error_of(rest(sock)) == (400, "invalid_http")


def head_of(num_bytes: int) -> bytes:
    """A head whose target, names and values have this size with four bytes for each line."""
    start = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\na: "
    end = b"\r\n\r\n"
    counted = len(b"/health") + len(b"Hostx") + len(b"Connectionclose") + len(b"a") + 3 * 4
    return start + b"b" * (num_bytes - counted) + end


@pytest.mark.parametrize(("num_more", "status"), [(0, 200), (1, 431), (100_000, 431)])
def test_a_head_is_limited_to_the_byte(server: Any, num_more: int, status: int) -> None:
    with connected(server) as sock:
        sock.sendall(head_of((64 << 10) + num_more))
        answer = reset_or_rest(sock)
        assert answer.startswith(b"HTTP/1.1 %d" % status) or (num_more > 1 and not answer)


def test_a_large_head_behind_another_request(server: Any) -> None:
    with connected(server) as sock:
        sock.sendall(POST + b"GET /health HTTP/1.1\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        sock.sendall(b"a: b\r\n" * 11_000)
        assert b"head_too_large" in rest(sock)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nhost: x\r\n", 400),
        (b"GET /health HTTP/1.0\r\nHost: x\r\nHost: y\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x y\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x/y\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: u@x\r\n", 400),
        (b"GET http://x/health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.0\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost:\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: [::1]:8000\r\n", 200),
        (b"GET http://x/health HTTP/1.1\r\nHost: a_b.example%20:80\r\n", 200),
    ],
)
def test_one_host(server: Any, head: bytes, status: int) -> None:
    with connected(server) as sock:
        sock.sendall(head + b"Connection: close\r\n\r\n")
        answer = rest(sock)
    assert int(answer.split()[1]) == status
    if status == 400:
        assert error_of(answer) == (400, "invalid_http") and b"Host" in answer


def test_a_trailer_is_no_header(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(), access=Access(Keys(["key"])))
    chunked = (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\nf\r\n" + b'{"prompt":"hi"}' + b"\r\n0\r\n"
        b"Authorization: Bearer key\r\n\r\n"
    )
    with connected(server) as sock:
        sock.sendall(chunked)
        assert rest(sock).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("num_bytes", [1, 100_000])
@pytest.mark.parametrize(
    ("start", "end"), [(b"f;", b"\r\n%s\r\n0\r\n\r\n"), (b"f\r\n%s\r\n0\r\na: ", b"\r\n\r\n")]
)
def test_trailers_and_extensions_are_limited(server: Any, start: bytes, end: bytes, num_bytes: int) -> None:
    body = b'{"prompt":"hi"}'
    parts = [part.replace(b"%s", body) for part in (start, end)]
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    sent = head + b"Connection: close\r\n\r\n" + (b"a" * num_bytes).join(parts)
    with connected(server) as sock:
        sock.sendall(sent[:70_000])  # it is refused before its end
        answer = rest(sock)
    if num_bytes > 1:
        assert error_of(answer) == (431, "head_too_large") and b"trailers" in answer
    else:
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b'POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt":"hi"}',
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_a_client_that_sends_nothing_more_is_answered(server: Any, request_bytes: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(request_bytes)
        sock.shutdown(socket.SHUT_WR)
        answer = rest(sock)
    num_requests = request_bytes.count(b"HTTP/1.")
    assert answer.count(b"HTTP/1.1 200") == num_requests


def test_a_client_that_sends_nothing_more_is_answered_later(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(FakeEngine())
    has_ended = threading.Event()

    async def refresh_late(timeout_s: float) -> EngineStats:
        while not has_ended.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # in which the server sees the end
        stats: EngineStats = server.engine.get_stats()
        return stats

    monkeypatch.setattr(server.engine, "refresh_stats", refresh_late)
    with connected(server) as sock:
        sock.sendall(b"GET /v1/lora_adapters HTTP/1.1\r\nHost: x\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        has_ended.set()
        answer = rest(sock)
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer


def test_a_request_that_generates_ends_with_what_its_client_sends(
    start_server: Callable[..., Any], engine: Any, wait_until: Callable[..., None]
) -> None:
    engine = type(engine)()
    engine.held.set()
    server = start_server(engine)
    with connected(server) as sock:
        sock.sendall(POST)
        wait_until(lambda: engine.num_open == 1)
        sock.shutdown(socket.SHUT_WR)
        assert rest(sock) == b""
        wait_until(lambda: engine.num_aborted == 1)
    wait_until(lambda: not len(server.state.open_requests))


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_request_ends_with_its_client_also_if_others_wait_behind_it(
    start_server: Callable[..., Any],
    engine: Any,
    wait_until: Callable[..., None],
    is_reset: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = type(engine)()
    engine.held.set()
    server = start_server(engine)
    with connected(server) as sock:
        sock.sendall(POST + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: engine.num_open == 1)
        if is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            sock.shutdown(socket.SHUT_WR)
            assert rest(sock) == b""
    wait_until(lambda: engine.num_aborted == 1)
    wait_until(lambda: not len(server.state.open_requests))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_routes_that_generate(server: Any) -> None:
    generating = {path for (_, path), doc in ROUTE_DOCS.items() if doc.event and doc.answer}
    assert set(GENERATING_PATHS) == generating


def test_a_client_with_too_many_idle_connections(
    start_server: Callable[..., Any], engine: Any, wait_until: Callable[..., None]
) -> None:
    engine = type(engine)()
    engine.held.set()
    server = start_server(engine, limits=HttpLimits(max_idle_connections=3))
    with ExitStack() as stack:

        def connect(sent: bytes = b"") -> socket.socket:
            sock = stack.enter_context(connected(server))
            sock.sendall(sent)
            return sock

        busy = [connect(POST) for _ in range(2)]  # which are not idle
        wait_until(lambda: engine.num_open == 2)
        oldest, half_head = connect(), connect(HALF_HEAD)
        half_body = connect(POST[:-3])
        served = connect(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert error_of(rest(oldest)) == (503, "too_many_idle_connections")
        assert served.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connect()
        answer = rest(half_head)
        assert error_of(answer) == (503, "too_many_idle_connections")
        assert b"more than 3 connections" in answer and b"--max-idle-connections" in answer
        connect()
        answer = rest(half_body)
        assert error_of(answer) == (503, "too_many_idle_connections")
        assert b"x-request-id: mine\r\n" in answer
        connect()
        assert rest(served) == b""  # it has its answer
        with socket.create_connection(
            ("127.0.0.1", server.port), timeout=20, source_address=("127.0.0.2", 0)
        ) as another_client:
            another_client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert another_client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert server.state.metrics.connections_ended["too_many_idle_connections"] == 4
        engine.held.clear()
        for sock in busy:
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_idle_connections_of_one_client_make_room_for_another(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_IDLE_GRACE_S", 60.0)
    limits = HttpLimits(max_idle_connections=2, max_connections=4)
    server = start_server(FakeEngine(), limits=limits)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connected(server))
        for is_closed in (True, True, False):
            sock = stack.enter_context(
                socket.create_connection(
                    ("127.0.0.1", server.port), timeout=20, source_address=("127.0.0.2", 0)
                )
            )
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = sock.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 %d" % (200 if is_closed else 503))
    assert server.state.metrics.connections_ended["too_many_idle_connections"] == 2


def test_many_requests_at_once_are_answered(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_IDLE_GRACE_S", 10.0)
    server = start_server(FakeEngine(), limits=HttpLimits(max_idle_connections=2))
    with ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(20)]
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        for sock in socks:
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_idle_connections_without_a_limit(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(), limits=HttpLimits(max_idle_connections=0))
    with ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(20)]
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_flood_of_bad_requests_is_one_line(
    start_server: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(FakeEngine())
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    for sent, status in ((b"hello\r\n\r\n", 400), (upgrade, 200)):
        for _ in range(10):
            with connected(server) as sock:
                sock.sendall(sent)
                answer = rest(sock)
                assert answer.startswith(b"HTTP/1.1 %d" % status)
                assert b"connection: close" in answer
    invalid, upgrades = [record.getMessage() for record in caplog.records]
    assert invalid == "refused 1 requests that are not valid HTTP/1.1"
    assert upgrades.startswith("ignored the header Upgrade of 1 requests")


def test_too_many_connections(
    start_server: Callable[..., Any], engine: Any, wait_until: Callable[..., None]
) -> None:
    server = start_server(type(engine)(), limits=HttpLimits(max_connections=2))
    ended = server.state.metrics.connections_ended
    with ExitStack() as stack:
        kept = [stack.enter_context(connected(server)) for _ in range(2)]
        with connected(server) as sock:
            sock.sendall(POST)
            answer = rest(sock)
            assert error_of(answer) == (503, "too_many_connections")
            assert b"more than 2 connections" in answer and b"--max-connections" in answer
            assert b"retry-after: " in answer.lower() and b"x-request-id: mine" in answer
        with connected(server) as sock:  # a probe must not have the server killed for its load
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert rest(sock).startswith(b"HTTP/1.1 200")
        kept[0].sendall(POST)
        assert kept[0].recv(1 << 16).startswith(b"HTTP/1.1 200")
        for _ in range(64):
            stack.enter_context(connected(server))
        with connected(server) as sock:
            assert reset_or_rest(sock) == b""
        assert ended["too_many_connections"] == 1
    wait_until(lambda: httpx.get(server.url + "/v1/models").status_code == 200)


def reset_or_rest(sock: socket.socket) -> bytes:
    try:
        return rest(sock)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    ("given", "is_used"), [("abc-1", True), ("x" * 129, False), ("a b", False), ("", False)]
)
def test_request_ids(http: httpx.Client, given: str, is_used: bool) -> None:
    headers = {"x-request-id": given}
    body = {"prompt": "hi", "max_tokens": 1}
    for response in (
        http.get("/health", headers=headers),
        http.get("/nothing", headers=headers),
        http.post("/v1/completions", json={}, headers=headers),
        http.post("/v1/completions", json=body, headers=headers),
        http.post("/v1/completions", json=body | {"stream": True}, headers=headers),
    ):
        (shown,) = response.headers.get_list("x-request-id")
        assert (shown == given) == is_used
    twice = [http.post("/v1/completions", json=body, headers=headers).json()["id"] for _ in "ab"]
    assert twice[0] != twice[1]
    assert twice[0].startswith(f"cmpl-{given}-") == is_used or not given


def test_ids_of_requests() -> None:
    assert given_id({"headers": [(b"x-request-id", b"\xff")]}) is None
    assert answer_id("cmpl", "mine").startswith("cmpl-mine-")


def test_a_stream_that_nobody_reads_is_aborted(
    start_server: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    engine = FakeEngine()
    engine.tokens_per_output = 1
    limits = HttpLimits(max_unsent_bytes=4096, unsent_timeout_s=0.1)
    server = start_server(engine, limits=limits)
    body = json.dumps({"prompt": "hi", "n": 32, "stream": True, "max_tokens": 3000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with connected(server) as sock:
        sock.sendall(head.encode() + body)
        wait_until(lambda: engine.num_aborted == 1)
        assert engine.num_open == 0
        wait_until(lambda: not len(server.state.open_requests))
        assert server.state.metrics.connections_ended["slow_reader"] == 1
    assert httpx.get(server.url + "/health").status_code == 200


class FakeLoop:
    """A loop with a clock that the test sets."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, Callable[[], None], asyncio.Event]] = []
        self._now_s = 0.0

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> Any:
        cancelled = asyncio.Event()
        self._timers.append((self._now_s + delay_s, lambda: call(*arguments), cancelled))
        cancelled.cancel = cancelled.set  # type: ignore[attr-defined]  # as a handle has it
        return cancelled

    def pass_time(self, seconds: float) -> None:
        self._now_s += seconds
        due = [timer for timer in self._timers if timer[0] <= self._now_s]
        self._timers = [timer for timer in self._timers if timer[0] > self._now_s]
        for _, call, cancelled in due:
            if not cancelled.is_set():
                call()


class FakeTransport:
    """A client that reads as much as the test lets it."""

    def __init__(self) -> None:
        self.num_unsent = 0
        self.was_cut = False

    def set_write_buffer_limits(self, *, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def get_extra_info(self, name: str) -> None:
        return None

    def abort(self) -> None:
        self.was_cut = True

    def close(self) -> None:
        pass


LIMITS = HttpLimits(max_unsent_bytes=100, unsent_timeout_s=10.0, header_timeout_s=1e9)


class Unread:
    """A connection on a fake loop to a fake client."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.transport: Any = FakeTransport()
        state = make_state(FakeEngine(), AppSettings(limits=LIMITS), now_s=0)
        self.metrics: ServerMetrics = state.metrics
        config = uvicorn.Config(build_app(state), log_config=None, lifespan="off", ws="none")
        loop: Any = self.loop
        connection: Connection = connection_class(LIMITS, self.metrics.connections_ended)(
            config, uvicorn.server.ServerState(), {}, loop
        )
        connection.connection_made(cast(Any, self.transport))
        self.connection = connection


def test_a_client_that_does_not_read_is_cut_off() -> None:
    one = Unread()
    assert one.transport.high == 100
    one.transport.num_unsent = 150
    one.connection.pause_writing()
    one.loop.pass_time(9)
    assert not one.transport.was_cut
    one.transport.num_unsent = 60  # it reads, but too little
    one.loop.pass_time(2)
    assert one.transport.was_cut and one.metrics.connections_ended["slow_reader"] == 1


def test_a_client_that_reads_a_large_answer_slowly_is_not() -> None:
    one = Unread()
    one.transport.num_unsent = 1000
    one.connection.pause_writing()
    for _ in range(5):
        one.transport.num_unsent -= 100
        one.loop.pass_time(10)
    assert not one.transport.was_cut
    one.connection.resume_writing()
    one.loop.pass_time(100)
    one.connection.pause_writing()
    one.connection.connection_lost(None)
    one.loop.pass_time(100)
    assert not one.transport.was_cut
