"""Requests that a client sends before it has earlier answers."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from corun.runtime.limits import HttpLimits
from corun.runtime.server import connection
from support.fake_engine import FakeEngine

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
NOTHING = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
TOKENIZE = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
GENERATE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n"
BODY = b'{"prompt":"hi"}'
STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")


@contextmanager
def connected(server: Any) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        yield sock


def statuses(sock: socket.socket, sent: bytes) -> list[int]:
    """Send from a thread, as the server stops reading, and read until it closes."""
    sender = threading.Thread(target=sock.sendall, args=(sent,))
    sender.start()
    data = b""
    while received := sock.recv(1 << 16):
        data += received
    sender.join()
    return [int(one) for one in STATUS.findall(data)]


@pytest.mark.parametrize("middle", [HEALTH, TOKENIZE % 15 + BODY])
def test_all_are_answered_in_order(server: Any, middle: bytes) -> None:
    with connected(server) as sock:
        assert statuses(sock, (middle + NOTHING) * 2000 + LAST) == [200, 404] * 2000 + [200]


def test_bodies_and_requests_are_not_mixed(server: Any) -> None:
    large = b'{"prompt":"' + b"a" * 40_000 + b'"}'
    one = TOKENIZE % len(large) + large + HEALTH
    with connected(server) as sock:
        found = statuses(sock, one * 30 + LAST)
    assert len(found) == 61 and found[1::2] == [200] * 30 and set(found[::2]) <= {200, 400}


def test_few_are_parsed_at_once(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = []
    begin = connection.Connection.on_message_begin

    def on_message_begin(self: connection.Connection) -> None:
        waiting.append(len(self.pipeline))
        begin(self)

    monkeypatch.setattr(connection.Connection, "on_message_begin", on_message_begin)
    server = start_server(FakeEngine())
    with connected(server) as sock:
        assert len(statuses(sock, NOTHING * 10_000 + LAST)) == 10_001
    assert len(waiting) == 10_001
    assert max(waiting) <= (8 << 10) // len(NOTHING) + 1


def test_a_head_behind_a_long_request_is_not_late(
    start_server: Callable[..., Any], engine: Any, wait_until: Callable[..., None]
) -> None:
    engine = type(engine)()
    engine.held.set()
    server = start_server(engine, limits=HttpLimits(header_timeout_s=0.5))
    with connected(server) as sock, connected(server) as other:
        sock.sendall(GENERATE + BODY + HEALTH * 1000)
        wait_until(lambda: engine.num_open == 1)
        while other.recv(1 << 16):  # takes as long as a head may
            pass
        engine.held.clear()
        assert statuses(sock, LAST) == [200] * 1002


def test_what_is_not_http_behind_others_is_not_answered_before_them(
    start_server: Callable[..., Any], engine: Any
) -> None:
    engine = type(engine)()
    engine.held.set()
    server = start_server(engine)
    with connected(server) as sock:
        sock.sendall((GENERATE + BODY) * 2 + b"hello\r\n\r\n")
        assert sock.recv(1 << 16) == b""


@pytest.mark.parametrize("target", [b"CONNECT x:1", b"GET http://["])
def test_a_target_that_is_not_valid_is_answered(server: Any, target: bytes) -> None:
    for sent in (b"", HEALTH):
        with connected(server) as sock:
            found = statuses(sock, sent + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert found == [400] or (sent and set(found) <= {200, 400})
