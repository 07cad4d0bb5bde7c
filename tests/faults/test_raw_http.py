"""Bytes that are no valid requests, or come too slowly, beside streams: each has its status."""

import contextlib
import re
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

import httpx
import pytest
from support.attacked import Attacked, Rows, streams_on
from support.serving import Served

pytestmark = pytest.mark.faults

HEADER_TIMEOUT_S, BODY_TIMEOUT_S = 2.0, 3.0
SEND_EVERY_S = 0.2  # a byte, of slow clients
MAX_IDLE = 1024  # --max-idle-connections
NUM_IDLE = 4200  # more than --max-connections
GONE_PER_S, NUM_GONE = 400, 1000  # thousands a second delay others, as SECURITY.md says
OTHER_CLIENT = "127.0.0.2"
ANSWER_TIMEOUT_S = 30.0
STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")
ENDED = re.compile(r'^corun:http_connections_ended\w*\{.*reason="(\w+)".*\} (\S+)$', re.MULTILINE)

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"prompt":"hi","max_tokens":1}'
SIZED = POST + b"Content-Length: 30\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
CHUNK = b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"

# All are refused with 400, in one answer: what follows is not read as a request.
MALFORMED: dict[str, Sequence[bytes]] = {
    "heads that are not HTTP/1.1": (
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"SSH-2.0-x\r\n",
        b"\0" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"G\xc3T /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"GET /health HTTP/1.1\rHost: x\r\r",
        HEALTH + b" y: z\r\n\r\n",
        HEALTH + b"a: b\0c\r\n\r\n",
        HEALTH + b"a\0: b\r\n\r\n",
        HEALTH + b"abc\r\n\r\n",
        HEALTH + b": a\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    ),
    "heads that proxies read in another way": (
        SIZED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n",
        SIZED + b"Content-Length: 2\r\n\r\n{}",
        SIZED + b"Content-Length: 30\r\n\r\n" + BODY,
        POST + b"Content-Length: 2, 2\r\n\r\n{}",
        POST + b"Content-Length: -2\r\n\r\n{}",
        POST + b"Content-Length: +2\r\n\r\n{}",
        POST + b"Content-Length: 0x2\r\n\r\n{}",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        POST + b"Content-Length : 2\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        HEALTH + b"Host: y\r\n\r\n",
        HEALTH + b"Host: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x y\r\n\r\n",
    ),
    "chunks with bad sizes": tuple(
        CHUNKED + b"\r\n" + size + BODY + b"\r\n0\r\n\r\n"
        for size in (
            b"-1\r\n",
            b"+1e\r\n",
            b"0x1e\r\n",
            b"zz\r\n",
            b"10000000000000001e\r\n",
            b"2\r\n",
            b"1e\n",
            b"1e;a\nb\r\n",
            b"1e \r\n",
            b"\r\n",
            b" 1e\r\n",
        )
    ),
}
LARGE_HEADS = {
    "100,000 headers": HEALTH + b"a: b\r\n" * 100_000 + b"\r\n",
    "a value of 1 MB": HEALTH + b"a: " + b"b" * 2**20 + b"\r\n\r\n",
    "a name of 1 MB": HEALTH + b"b" * 2**20 + b": a\r\n\r\n",
    "a target of 1 MB": b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "2 MB of empty lines": b"\r\n" * 2**20 + HEALTH + b"\r\n",
}
LARGE_FRAMES = {  # of small bodies
    "an extension of 4 MB": CHUNKED + b"\r\n1e;" + b"a" * 2**22 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "4 MB of trailers": CHUNKED + b"\r\n1e\r\n" + BODY + b"\r\n0\r\n" + b"a: b\r\n" * 700_000 + b"\r\n",
    "a trailer of 4 MB": CHUNKED + b"\r\n1e\r\n" + BODY + b"\r\n0\r\na: " + b"b" * 2**22 + b"\r\n\r\n",
    "300,000 chunks": CHUNKED + b"\r\n" + b"1\r\n \r\n" * 300_000 + CHUNK,
}


@pytest.fixture(scope="module")
def attacked(rows: Rows) -> Iterator[Attacked]:
    options = (
        *"--device cpu --memory-gib 0.25".split(),
        *("--header-timeout-s", str(HEADER_TIMEOUT_S)),
        *("--body-timeout-s", str(BODY_TIMEOUT_S)),
    )
    with Served(*options) as served, streams_on(served, rows) as attacked:
        yield attacked


def connect(served: Served, client: str = "127.0.0.1") -> socket.socket:
    parts = urlsplit(served.url)
    address = (parts.hostname or "", parts.port or 80)
    return socket.create_connection(address, ANSWER_TIMEOUT_S, (client, 0))


def statuses_of(connection: socket.socket) -> list[int]:
    """Read until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):  # it closes before it has read everything
        while received := connection.recv(1 << 20):
            data += received
    return [int(status) for status in STATUS.findall(data)]


def ask(served: Served, sent: bytes, *, is_end: bool = False) -> list[int]:
    """Send bytes; ``is_end``: and nothing more."""
    with connect(served) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(sent)
            if is_end:
                connection.shutdown(socket.SHUT_WR)
        return statuses_of(connection)


def ask_at_once(served: Served, sent: Sequence[bytes]) -> list[list[int]]:
    """Send all on connections of their own before any answer is read."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(served)) for _ in sent]
        for connection, data in zip(connections, sent, strict=True):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(data)
        return [statuses_of(connection) for connection in connections]


def counted(answers: Sequence[Sequence[int]]) -> str:
    counts = Counter(status for answer in answers for status in answer)
    return ", ".join(f"{number} x {status}" for status, number in sorted(counts.items()))


def with_close(head: bytes) -> bytes:
    return head + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_requests(attacked: Attacked, kind: str) -> None:
    def attack() -> str:
        answers = []
        for one in MALFORMED[kind]:
            answers.append(ask(attacked.served, one + SMUGGLED))
            assert answers[-1] == [400], (one, answers[-1])
        together = [one + SMUGGLED for one in MALFORMED[kind]] * 20
        answers += ask_at_once(attacked.served, together)
        assert {tuple(one) for one in answers} == {(400,)}
        return counted(answers)

    attacked.check(kind, attack)


@pytest.mark.parametrize("kind", LARGE_HEADS)
def test_large_heads(attacked: Attacked, kind: str) -> None:
    def attack() -> str:
        answers = ask_at_once(attacked.served, [LARGE_HEADS[kind]] * 10)
        # The answer can be lost, as the server does not read the rest.
        assert {tuple(one) for one in answers} <= {(431,), ()}
        return counted(answers)

    attacked.check(kind, attack)


@pytest.mark.parametrize("kind", LARGE_FRAMES)
def test_large_frames_of_small_bodies(attacked: Attacked, kind: str) -> None:
    def attack() -> str:
        sent = LARGE_FRAMES[kind].replace(CHUNKED, CHUNKED + b"Connection: close\r\n")
        answers = [ask(attacked.served, sent) for _ in range(3)]
        # The answer can be lost, as the server does not read the rest.
        assert {tuple(one) for one in answers} <= ({(200,)} if "chunks" in kind else {(431,), ()})
        return counted(answers)

    attacked.check(kind, attack)


@pytest.mark.parametrize(
    ("name", "one", "number"),
    [
        ("10,000 pipelined GET", HEALTH + b"\r\n", 10_000),
        ("100 pipelined prompts", SIZED + b"\r\n" + BODY, 100),
        ("5,000 pipelined 404", SMUGGLED, 5_000),
    ],
)
def test_pipelined_requests(attacked: Attacked, name: str, one: bytes, number: int) -> None:
    def attack() -> str:
        with connect(attacked.served) as connection:
            answers = pipelined(connection, one * number + with_close(HEALTH))
        assert len(answers) == number + 1
        assert len(set(answers)) <= 2 and answers[-1] == 200
        return counted([answers])

    attacked.check(name, attack)


def pipelined(connection: socket.socket, sent: bytes) -> list[int]:
    """Send all while answers are read: otherwise both sides would wait for each other."""
    connection.setblocking(False)
    data, rest = b"", memoryview(sent)
    while True:
        readable, writable, _ = select.select(
            [connection], [connection] if rest else [], [], ANSWER_TIMEOUT_S
        )
        assert readable or writable, "no answer"
        if writable:
            rest = rest[connection.send(rest) :]
        if readable:
            received = connection.recv(1 << 20)
            if not received:
                return [int(status) for status in STATUS.findall(data)]
            data += received


def test_pipelined_requests_without_reading(attacked: Attacked) -> None:
    """The server stops reading them while its answers are not read."""

    def attack() -> str:
        num_bytes = 0
        with connect(attacked.served) as connection:
            connection.settimeout(1.0)
            with contextlib.suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
                while num_bytes < 1 << 26:
                    num_bytes += connection.send((HEALTH + b"\r\n") * 2000)
        return f"{num_bytes >> 10} KiB taken"

    attacked.check("pipelined, never read", attack)


def test_half_closed_connections(attacked: Attacked) -> None:
    """A client that ends its side is answered, but for what generates: it may have left."""

    def attack() -> str:
        answers = [ask(attacked.served, HEALTH + b"\r\n", is_end=True) for _ in range(200)]
        assert {tuple(one) for one in answers} == {(200,)}
        for sent in (SIZED + b"\r\n" + BODY, SIZED + b"\r\n" + BODY[:5], HEALTH, b""):
            for _ in range(50):
                assert ask(attacked.served, sent, is_end=True) in ([], [200])
        return counted(answers)

    attacked.check("half-closed", attack)


def slow(served: Served, starts: Sequence[bytes]) -> list[list[int]]:
    """Open connections that send a byte now and then, until the server closes them."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(served)) for _ in starts]
        for connection, start in zip(connections, starts, strict=True):
            connection.sendall(start)
        deadline_s = time.monotonic() + max(HEADER_TIMEOUT_S, BODY_TIMEOUT_S) + 3.0
        while time.monotonic() < deadline_s:
            time.sleep(SEND_EVERY_S)
            for connection in connections:
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    connection.send(b"a")
        for connection in connections:
            connection.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            return [statuses_of(connection) for connection in connections]
        raise AssertionError("a slow connection is still open")


def test_slow_clients(attacked: Attacked) -> None:
    starts = [HEALTH + b"a: "] * 500 + [POST + b"Content-Length: 300\r\n\r\n"] * 300

    def attack() -> str:
        answers = slow(attacked.served, starts)
        # A byte after the end has the connection reset, which can lose the answer.
        assert {tuple(one) for one in answers} <= {(408,), ()}
        return counted(answers) or "closed"

    attacked.check("500 slow heads, 300 slow bodies", attack)


@pytest.mark.parametrize(
    ("name", "sent", "status", "text"),
    [
        ("5,000 x no HTTP", b"hello\r\n\r\n", 400, "not valid HTTP"),
        ("5,000 upgrades", HEALTH + UPGRADE, 200, "the upgrade"),
    ],
)
def test_floods(attacked: Attacked, name: str, sent: bytes, status: int, text: str) -> None:
    def attack() -> str:
        lines = attacked.served.log_lines
        num_before = len(lines)
        answers = [one for _ in range(25) for one in ask_at_once(attacked.served, [sent] * 200)]
        assert {tuple(one) for one in answers} == {(status,)}
        logged = [line for line in lines[num_before:] if text in line]
        assert len(logged) <= 2, "more than one line a minute"
        return counted(answers)

    attacked.check(name, attack)


@pytest.mark.parametrize(
    ("client", "name", "start"), [("127.0.0.1", "nothing", b""), (OTHER_CLIENT, "half a head", HEALTH)]
)
def test_idle_connections(attacked: Attacked, client: str, name: str, start: bytes) -> None:
    """Of one address, beside others or as the streams."""

    def attack() -> str:
        before = ended(attacked.served)
        with contextlib.ExitStack() as stack:
            connections = []
            for _ in range(NUM_IDLE):
                connections.append(stack.enter_context(connect(attacked.served, client)))
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    connections[-1].sendall(start)
            deadline_s = time.monotonic() + ANSWER_TIMEOUT_S  # the server accepts them later
            while (num_open := sum(map(is_open, connections))) > MAX_IDLE:
                assert time.monotonic() < deadline_s, f"{num_open} are open"
                time.sleep(0.05)
            closed = ended(attacked.served) - before
            # On a busy machine the oldest can be late before all are open.
            assert closed["too_many_idle_connections"] > closed["header_timeout"]
            assert set(closed) <= {"too_many_idle_connections", "header_timeout"}
            return f"{num_open} of {NUM_IDLE} kept"

    attacked.check(f"idle, {name}, {client}", attack)


def ended(served: Served) -> Counter[str]:
    """The connections that the server has ended, by reason."""
    text = httpx.get(served.url + "/metrics", timeout=ANSWER_TIMEOUT_S).text
    return Counter({reason: int(float(number)) for reason, number in ENDED.findall(text)})


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def test_connections_that_come_and_go(attacked: Attacked) -> None:
    def attack() -> str:
        attack_each: Sequence[Callable[[socket.socket], object]] = (
            lambda connection: connection.close(),
            lambda connection: connection.sendall(HEALTH),
            lambda connection: connection.sendall(SIZED + b"\r\n"),
            lambda connection: connection.sendall(SIZED + b"\r\n" + BODY),
        )
        began_s = time.monotonic()
        for number in range(NUM_GONE):
            time.sleep(max(0.0, began_s + number / GONE_PER_S - time.monotonic()))
            with connect(attacked.served) as connection:
                attack_each[number % len(attack_each)](connection)
        return f"{NUM_GONE} closed"

    attacked.check(f"{GONE_PER_S} connections a second, closed at once", attack)


def test_the_server_is_as_before(attacked: Attacked) -> None:
    """It runs after the others."""
    wait_s = time.monotonic() + ANSWER_TIMEOUT_S
    while attacked.served.metrics()["corun:num_requests_running"] > 8:
        assert time.monotonic() < wait_s, "requests of clients that have left still run"
        time.sleep(0.1)
    lines = attacked.served.log_lines
    errors = [number for number, line in enumerate(lines) if " ERROR" in line]
    assert not errors, "\n".join(lines[errors[0] :][:60])
    assert not [line for line in attacked.served.log_lines if "Traceback" in line]
    assert ask(attacked.served, with_close(SIZED) + BODY) == [200]
