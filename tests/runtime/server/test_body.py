"""Bodies have bounded room, are measured before their items are looked at, and name their faults."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import pytest
from corun.runtime.errors import OverloadedError, RequestError
from corun.runtime.limits import HttpLimits, TextLimit
from corun.runtime.server.body import (
    BodyRoom,
    HeldBody,
    RequestModel,
    check_body,
    check_fields,
    check_num_items,
    is_large,
    parse_body,
)
from corun.runtime.server.fields import UnknownFields
from corun.runtime.server.json_values import show
from hypothesis import given
from hypothesis import strategies as st
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


class Untouched(list[Any]):
    """Items that fail when they are looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("items were looked at")


@pytest.mark.parametrize(
    ("field", "largest", "flag"),
    [
        (
            "messages",
            [{"content": [{}] * 2, "tool_calls": [{}]}, {"content": [{}]}, {}],
            "messages has 5 content parts and tool calls, at most 4 are served (--max-content-parts)",
        ),
        (
            "logit_bias",
            dict.fromkeys(map(str, range(4)), 0),
            "logit_bias has 5 entries, at most 4 are served (--max-logit-bias)",
        ),
        ("stop", ["a"] * 4, "--max-stop-strings"),
        ("stop", "abcd", "--max-stop-bytes"),
        ("bad_words", ["ab", "cd"], "--max-bad-words-bytes"),
        ("allowed_token_ids", Untouched([1] * 4), "has 5 entries, the vocabulary has 4"),
        ("stop_token_ids", Untouched([1] * 4), "has 5 entries, the vocabulary has 4"),
        ("tokens", Untouched([1] * 4), "--max-tokenize-tokens"),
        ("model", "m" * 16_384, "16385 characters"),
        ("cache_salt", "m" * 16_384, "16385 characters"),
        ("lora_path", "m" * 16_384, "16385 characters"),
    ],
)
def test_fields_that_are_too_large(field: str, largest: Any, flag: str) -> None:
    limits = HttpLimits(
        max_content_parts=4,
        max_logit_bias=4,
        max_stop_strings=4,
        max_stop_bytes=4,
        max_bad_words_bytes=4,
        max_tokenize_tokens=4,
        vocab_size=4,
    )
    check_body({field: None}, limits)
    check_body({field: 7}, limits)  # types are checked elsewhere
    check_fields({field: largest}, limits)
    if field == "messages":
        larger: Any = [*largest, {"tool_calls": [{}]}]
    elif isinstance(largest, dict):
        larger = largest | {"more": 0}
    elif isinstance(largest, str):
        larger = largest + "€"[:1] if field == "stop" else largest + "m"
    else:
        larger = type(largest)([*list.__iter__(largest), 1 if type(largest) is Untouched else "a"])
    with pytest.raises(RequestError, match=re.escape(flag)) as caught:
        check_fields({field: larger}, limits)
    assert caught.value.param == field


def nested(depth: int, *, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [0, value] if kind is list else {"a": 0, "b": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_the_depth_of_bodies(kind: type) -> None:
    limits = HttpLimits(max_json_depth=5)
    check_body({"prompt": nested(4, kind=kind), "tokens": [1] * 1000}, limits)
    for depth in (5, 100_000):
        with pytest.raises(RequestError, match=r"more than 5 .*deep \(--max-json-depth\)"):
            check_body({"prompt": nested(depth, kind=kind)}, limits)


def test_the_length_of_conversations() -> None:
    limits = HttpLimits(max_messages=2)
    allowed: list[Any] = [[{}] * 2, "text of any length", None]
    for messages in allowed:
        check_body({"messages": messages}, limits)
    with pytest.raises(RequestError, match=r"has 3 items, at most 2 .*--max-messages") as caught:
        check_body({"messages": [{}] * 3}, limits)
    assert caught.value.param == "messages"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a",[{\\\\é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='b",[\\\\'), inner),
)


def num_items(value: Any) -> int:
    """Items as the limit counts them: an array or object counts as one more than it separates."""
    if isinstance(value, dict):
        return max(1, 2 * len(value)) + sum(map(num_items, value.values()))
    if isinstance(value, list):
        return max(1, len(value)) + sum(map(num_items, value))
    return 0


@given(JSON, st.booleans())
def test_items_are_counted_without_parsing(value: Any, is_ascii: bool) -> None:
    # Long enough that the number of bytes does not decide, and that chunks end anywhere.
    filling = '\\\\"[,{' * 20_001
    body = json.dumps([filling, value, filling], ensure_ascii=is_ascii).encode()
    number = num_items([filling, value, filling])
    check_num_items(body, number)
    with pytest.raises(RequestError, match=r"more than \d+ values and names \(--max-json-items\)"):
        check_num_items(body, number - 1)


def test_a_body_of_fewer_bytes_than_items_is_not_looked_at() -> None:
    check_num_items(b"[" * 100, 100)
    with pytest.raises(RequestError):
        check_num_items(b"[" * 100, 99)


def test_what_is_no_json_is_counted_too() -> None:
    for body in (b"\\" * 200_001, b'"' * 200_001, b"\\" * 65_537 + b'"' + b"," * 50, b"\xff" * 99):
        check_num_items(body, 98)
    with pytest.raises(RequestError):
        check_num_items(b'"' + b"\\" * 65_536 + b'"' + b"," * 200, 100)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a", '"a"'),
        ([1, [2, {"a": None}]], '[1,[2,{"a":null}]]'),
        ({"a": 1.5, "b": True}, '{"a":1.5,"b":true}'),
        ("x" * 10**6, '"' + "x" * 58 + "…"),
        ([1] * 10**6, "[" + "1," * 29 + "…"),
        ([[1] * 10**6] * 10**6, "[[" + "1," * 28 + "1…"),
        ({"k": ["y" * 10**6] * 10**6}, '{"k":["' + "y" * 52 + "…"),
    ],
)
def test_the_beginning_is_shown(value: Any, shown: str) -> None:
    began_s = time.thread_time()
    assert show(value) == shown
    assert time.thread_time() - began_s < 1
