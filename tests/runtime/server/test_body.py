"""Bodies have bounded room together, and large ones are parsed beside the event loop."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import pytest
from corun.runtime.errors import OverloadedError, RequestError
from corun.runtime.limits import HttpLimits, TextLimit
from corun.runtime.server.body import BodyRoom, HeldBody, RequestModel, is_large, parse_body
from corun.runtime.server.fields import UnknownFields
from pydantic import BeforeValidator
from support.fake_engine import FakeEngine, FakeTokenizer
from support.serving import wait_until

MAX_LOOP_BYTES = 65_536
GOOD = {"prompt": "hi", "max_tokens": 4}
threads: list[threading.Thread] = []


def note_thread(value: Any) -> Any:
    threads.append(threading.current_thread())
    return value


class Noting(RequestModel):
    """Notes the thread that validates it."""

    prompt: Annotated[Any, BeforeValidator(note_thread)]


def parse(body: bytes, limits: HttpLimits) -> Any:
    threads.clear()
    return asyncio.run(parse_body(Noting, body, UnknownFields("warn", limits))).prompt


def test_the_event_loop_parses_small_bodies_alone() -> None:
    limits = HttpLimits()
    for num_bytes in (20, MAX_LOOP_BYTES, MAX_LOOP_BYTES + 1, 10 * MAX_LOOP_BYTES):
        text = "x" * (num_bytes - 13)
        body = b'{"prompt":"%b"}' % text.encode()
        assert len(body) == num_bytes
        assert parse(body, limits) == text
        is_on_loop = threads == [threading.main_thread()]
        assert is_on_loop == (num_bytes <= MAX_LOOP_BYTES) == (not is_large(body))


def test_a_body_of_many_items_is_refused_before_it_is_parsed() -> None:
    body = b'{"prompt":[%b1]}' % (b"1," * 100_000)  # 100,003 values and names
    assert len(parse(body, HttpLimits())) == 100_001
    with pytest.raises(RequestError, match="more than 90000 values and names"):
        parse(body, HttpLimits(max_json_items=90_000))
    assert not threads


def test_bodies_have_room_together() -> None:
    room = BodyRoom(100_000)
    with HeldBody(room) as one:
        assert one.add(150_000)  # the only one is received in any case
        with HeldBody(room) as other:
            assert other.add(MAX_LOOP_BYTES)  # as a short one is
            assert not other.add(1)
            assert not other.add(0)
            with pytest.raises(OverloadedError, match=r"100000 bytes together \(--max-bodies-mib\)"):
                other.check()
        one.check()
        assert room.num_bytes == 150_000
        one.release()
        with HeldBody(room) as other:
            assert other.add(30_000) and one.add(70_000)
            assert not one.add(1)
    assert room.num_bytes == 0


def test_surplus_bodies_are_refused_until_there_is_room(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(), limits=HttpLimits(max_bodies_bytes=100_000))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n"
        slow.sendall(head + b" " * 99_000)
        wait_until(lambda: server.state.body_room.num_bytes == 99_000)
        large = GOOD | {"user": "x" * MAX_LOOP_BYTES}
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            answer = httpx.post(server.url + path, json=large, timeout=20)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert "--max-bodies-mib" in answer.json()["error"]["message"]
        assert httpx.post(server.url + "/v1/completions", json=GOOD, timeout=20).status_code == 200
    wait_until(lambda: server.state.body_room.num_bytes == 0)
    assert httpx.post(server.url + "/v1/completions", json=GOOD, timeout=20).status_code == 200


def test_a_request_holds_no_room_while_it_is_answered(start_server: Callable[..., Any]) -> None:
    engine = FakeEngine()
    server = start_server(engine, limits=HttpLimits())
    engine.held.set()
    body = GOOD | {"stream": True, "max_tokens": 50}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20) as answer:
        next(answer.iter_lines())
        assert server.state.body_room.num_bytes == 0
        engine.held.clear()


class HeldTokenizer(FakeTokenizer):
    """Tokenizes nothing, and notes whether its caller still waits."""

    def __init__(self) -> None:
        self.num_waiting = 0

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, limit: TextLimit | None = None
    ) -> list[int]:
        self.num_waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_waiting -= 1
        raise AssertionError


def test_a_client_that_leaves_waits_for_no_tokens(start_server: Callable[..., Any]) -> None:
    engine = FakeEngine()
    engine.tokenizer = tokenizer = HeldTokenizer()
    server = start_server(engine)
    body = b'{"prompt": "hi"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head + body)
        wait_until(lambda: tokenizer.num_waiting == 1)
    wait_until(lambda: tokenizer.num_waiting == 0)
