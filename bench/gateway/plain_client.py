"""Cheap clients: one that repeats a request, and many at once."""

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from typing import cast

import uvloop

from .rig import KEY

_TIMEOUT_S = 30.0
_RECEIVE_BYTES = 1 << 16
_EVENT = b"data: {"


def request_bytes(*, stream: bool, max_tokens: int, num_prompt_tokens: int = 64) -> bytes:
    """One request for the base model, as a client sends it."""
    body = json.dumps(
        {"model": "plain", "prompt": [7] * num_prompt_tokens, "max_tokens": max_tokens}
        | ({"stream": True} if stream else {})
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Asker:
    """One connection, one request at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._sock = socket.create_connection(address, _TIMEOUT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request_bytes(stream=True, max_tokens=2)

    def first_byte_s(self) -> float:
        """Ask for two tokens; seconds until the first one has come."""
        start_s = time.perf_counter()
        self._sock.sendall(self._request)
        data = b""
        first_s = 0.0
        while not data.endswith(b"0\r\n\r\n"):
            new = self._sock.recv(_RECEIVE_BYTES)
            data += new
            if not new or not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"no stream: {data[:500]!r}")
            if not first_s and _EVENT in data:
                first_s = time.perf_counter() - start_s
        return first_s

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class Loop(asyncio.Protocol):
    """A connection that sends its request again whenever it has been answered."""

    def __init__(self, request: bytes, end: bytes) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._request = request
        self._end = end
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def close(self) -> None:
        """Ask for nothing more."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        self.num_tokens += data.count(_EVENT)
        if data.endswith(self._end):
            self._tail = b""
            self.num_requests += 1
            self._transport.write(self._request)
            return
        self._tail = data[1 - len(_EVENT) :]  # what may be the beginning of either


def throughput(
    address: tuple[str, int], request: bytes, end: bytes, *, num_connections: int, measured_s: float
) -> tuple[float, float]:
    """Requests and tokens per second of so many connections that ask all the time."""
    return uvloop.run(_throughput(address, request, end, num_connections, measured_s))


async def _throughput(
    address: tuple[str, int], request: bytes, end: bytes, number: int, measured_s: float
) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    loops: Sequence[Loop] = [
        (await loop.create_connection(lambda: Loop(request, end), *address))[1] for _ in range(number)
    ]
    await asyncio.sleep(1.0)  # all have begun
    before, start_s = _counts(loops), loop.time()
    await asyncio.sleep(measured_s)
    after, passed_s = _counts(loops), loop.time() - start_s
    for one in loops:
        one.close()
    await asyncio.sleep(0.1)  # until they are
    return (after[0] - before[0]) / passed_s, (after[1] - before[1]) / passed_s


def _counts(loops: Sequence[Loop]) -> tuple[int, int]:
    return sum(one.num_requests for one in loops), sum(one.num_tokens for one in loops)
