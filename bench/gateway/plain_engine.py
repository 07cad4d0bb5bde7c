"""An engine of nearly no cost: it answers with prepared bytes.

    python bench/gateway/plain_engine.py STEP_S

Prints its port. A request gets its first token at once and one more in each step; several may be in
one piece of a stream, as from an engine, only if the reader is slow. Without "stream" all of it
comes at once.
"""

import asyncio
import json
import sys
from typing import cast

import msgspec
import uvloop
from corun.runtime.engine_state import (
    ENGINE_STATE_PATH,
    PROFILE_PATH,
    EngineLoadState,
    EngineProfile,
    EngineState,
)
from corun.runtime.server.answers import ModelCard, ModelList
from corun.runtime.sim.papers.machines import MACHINES

_BEAT_S = 0.25
_MACHINE = MACHINES["a40-llama7b"]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
_EVENT_HEAD = _HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"
_TOKEN = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1795533779,
    "model": "plain",
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
}
_END = b"data: [DONE]\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_TOKEN_CHUNK = _chunk(b"data: " + json.dumps(_TOKEN, separators=(",", ":")).encode() + b"\n\n")
_END_CHUNK = _chunk(_END) + b"0\r\n\r\n"


def _whole(body: bytes) -> bytes:
    return _HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body


_ANSWER = _whole(json.dumps(_TOKEN).encode())
_PROFILE = _whole(
    msgspec.json.encode(
        EngineProfile(
            model="plain",
            base_fingerprint="plain",
            dtype="float32",
            max_model_len=4096,
            max_num_batched_tokens=_MACHINE.max_num_batched_tokens,
            max_num_seqs=_MACHINE.max_num_seqs,
            block_size=_MACHINE.block_size,
            adapter_bytes_per_rank=_MACHINE.adapter_bytes_per_rank,
            file_bytes_per_s=1e9,
            kv_bytes_per_token=_MACHINE.kv_bytes_per_token,
            machine=_MACHINE.model,
        )
    )
)
_MODELS = _whole(
    msgspec.json.encode(
        ModelList([ModelCard(id="plain", created=0, root="plain", parent=None, max_model_len=4096)])
    )
)
_LOAD = EngineLoadState(
    num_running_by_rank={},
    num_waiting_by_rank={},
    queued_prefill_tokens=0,
    running_context_tokens=0,
    free_kv_tokens=50_000,
    total_kv_tokens=50_000,
)


class _Engine:
    """All connections of one engine."""

    def __init__(self) -> None:
        self.streams: dict[_Connection, int] = {}  # tokens that each has left
        self.listeners: set[_Connection] = set()
        self._beat = 0

    def state(self, *, is_first: bool = False) -> bytes:
        self._beat += 1
        load = _LOAD if is_first else None
        state = EngineState(incarnation="plain", beat=self._beat, load=load)
        return _chunk(b"data: " + msgspec.json.encode(state) + b"\n\n")

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            for listener in self.listeners:
                listener.write(self.state())

    async def step(self, step_s: float) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + step_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for stream, num_left in list(self.streams.items()):
                if num_left > 1:
                    self.streams[stream] = num_left - 1
                    stream.write(_TOKEN_CHUNK)
                else:
                    del self.streams[stream]
                    stream.write(_TOKEN_CHUNK + _END_CHUNK)


class _Connection(asyncio.Protocol):
    """Requests come whole, or in two pieces."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.streams.pop(self, None)
        self._engine.listeners.discard(self)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator or len(body) < _content_length(head):
            return
        self._data = b""
        path = head.split(b" ", 2)[1].decode()
        if path == ENGINE_STATE_PATH:
            self._engine.listeners.add(self)
            self.write(_EVENT_HEAD + self._engine.state(is_first=True))
        elif path == PROFILE_PATH:
            self.write(_PROFILE)
        elif path == "/v1/completions":
            self._complete(json.loads(body))
        else:
            self.write(_MODELS)

    def _complete(self, body: dict[str, int]) -> None:
        if not body.get("stream"):
            self.write(_ANSWER)
            return
        num_left = body["max_tokens"] - 1
        if num_left:
            self._engine.streams[self] = num_left
            self.write(_EVENT_HEAD + _TOKEN_CHUNK)
        else:
            self.write(_EVENT_HEAD + _TOKEN_CHUNK + _END_CHUNK)


def _content_length(head: bytes) -> int:
    _, separator, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if separator else 0


async def _serve(step_s: float) -> None:
    engine = _Engine()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(engine), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.gather(engine.beat(), engine.step(step_s))


if __name__ == "__main__":
    uvloop.run(_serve(float(sys.argv[1])))
