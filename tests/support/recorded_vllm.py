"""A server that answers as vLLM 0.32.0 did when it was recorded, on a CPU with a tiny Llama.

Statuses, bodies and metrics are the recorded ones; what a token is, and how long it takes, is made
up. As versions of vLLM do, it keeps the KV of a prompt by the *name* of its adapter: an answer
begins with the content that the prompt was first computed with under that name.

``python -P -m support.recorded_vllm PORT OPTIONS`` runs one as a process of its own.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from corun.runtime.cluster.http.serving import serve_app
from corun.runtime.cluster.wire import EngineCard, ForeignEngine
from corun.runtime.server.listening import bind, listen, url_of

from .fake_cluster import profile_of

BASE, ROOT, VERSION = "tiny", "/models/tiny", "0.32.0"
MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 512, 128, 6553
_START_TIMEOUT_S = 60.0
METRICS = (Path(__file__).parent / "vllm_metrics.txt").read_text()
_LORA_FAMILY = re.compile(r"(?m)^(# (HELP|TYPE) )?vllm:lora_requests_info.*\n")


@dataclass(slots=True)
class VllmOptions:
    """How it was started, and how fast it is."""

    has_lora: bool = True
    updates_loras: bool = True  # VLLM_ALLOW_RUNTIME_LORA_UPDATING
    max_loras: int = 4
    max_lora_rank: int = 128
    max_model_len: int = MAX_MODEL_LEN
    sees_files: bool = True  # else it is on another machine
    root: str = ROOT
    num_blocks: int = NUM_BLOCKS
    key: str = ""  # --api-key
    prefill_s: float = 0.0
    decode_s: float = 0.001


@dataclass(frozen=True, slots=True)
class _Loaded:
    path: str
    content: str
    num_bytes: int


@dataclass(slots=True)
class RecordedVllm:
    """One server."""

    options: VllmOptions = field(default_factory=VllmOptions)
    loaded: dict[str, _Loaded] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)  # requests by model
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of completions
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    started_unix_s: float = field(default_factory=time.time)
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    url: str = ""
    _kv: dict[tuple[str, str], str] = field(default_factory=dict)  # by model and prompt: content

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_key], client_max_size=1 << 24)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
                web.post("/tokenize", self._tokenize),
            ]
        )
        if self.options.updates_loras:
            app.add_routes(
                [
                    web.post("/v1/load_lora_adapter", self._load),
                    web.post("/v1/unload_lora_adapter", self._unload),
                ]
            )
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = self.options.key
        given = request.headers.get("Authorization")
        if key and request.path.startswith("/v1") and given != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            response: web.StreamResponse = await handler(request)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = METRICS
        numbers = {
            "process_start_time_seconds": self.started_unix_s,
            "vllm:num_requests_running": self.running.total(),
            "vllm:request_prompt_tokens_count": self.num_prompts,
            "vllm:request_prompt_tokens_sum": self.num_prompt_tokens,
        }
        for name, value in numbers.items():
            text = re.sub(rf"(?m)^({name}(?:{{.*}})?) .*$", rf"\1 {value:.12g}", text)
        text = re.sub(r'max_lora="\d+"', f'max_lora="{self.options.max_loras}"', text)
        names = ",".join(one for one, number in self.running.items() if number and one != BASE)
        text = text.replace('"upper@0123456789abcdef"', f'"{names}"')
        tokens = self.options.num_blocks * BLOCK_SIZE
        text = text.replace('num_gpu_blocks="6553"', f'num_gpu_blocks="{self.options.num_blocks}"')
        text = re.sub(r'kv_cache_size_tokens="\d+"', f'kv_cache_size_tokens="{tokens}"', text)
        if not self.options.has_lora:
            text = _LORA_FAMILY.sub("", text)
        return web.Response(text=text)

    async def _models(self, request: web.Request) -> web.Response:
        def card(name: str, root: str, parent: str | None) -> dict[str, Any]:
            return {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": root,
                "parent": parent,
                "permission": [],
                "max_model_len": None if parent else self.options.max_model_len,
            }

        cards = [card(BASE, self.options.root, None)]
        cards += [card(name, one.path, BASE) for name, one in self.loaded.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.loaded:
            return _refused(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                "InvalidUserInput",
            )
        weights = path / "adapter_model.safetensors"
        if not weights.is_file() or not self.options.sees_files:
            text = f"Loading lora {name} failed: No adapter found for {path}"
            return _refused(404, text, "NotFoundError")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > (limit := self.options.max_lora_rank):
            text = f"LoRA rank {rank} is greater than max_lora_rank {limit}."
            return _refused(400, text, "BadRequestError")
        data = weights.read_bytes()
        content = hashlib.sha256(data).hexdigest()[:8]
        self.loaded[name] = _Loaded(str(path), content, len(data))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if not name:
            return _refused(
                400, "'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput"
            )
        if self.loaded.pop(name, None) is None:
            return _refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized.append(body)
        prompt = body["prompt"]
        tokens = list(prompt.encode())
        return web.json_response(
            {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens, "token_strs": None}
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        model, is_chat = body.get("model") or BASE, "chat" in request.path
        if model != BASE and model not in self.loaded:
            return _refused(
                404, f"The model `{model}` does not exist. Valid aliases: tiny.", "NotFoundError", "model"
            )
        prompt = body["messages"] if is_chat else body["prompt"]
        num_tokens = len(prompt) if isinstance(prompt, str | list) else 1
        if num_tokens > MAX_MODEL_LEN:
            return _refused(
                400,
                f"This model's maximum context length is 512 tokens. However, your prompt "
                f"contains at least {num_tokens} input tokens, which exceeds this limit even "
                "without any output tokens. Please reduce the length of the input prompt.",
                "BadRequestError",
                "input_tokens",
            )
        content = self.loaded[model].content if model != BASE else "base"
        content = self._kv.setdefault((model, json.dumps(prompt)), content)
        answer = _Answer(self, model, is_chat, content, num_tokens, body.get("max_tokens", 16))
        self.num_prompts += 1
        self.num_prompt_tokens += num_tokens
        self.running[model] += 1
        try:
            return await (answer.stream(request) if body.get("stream") else answer.whole())
        finally:
            self.running[model] -= 1


@dataclass(frozen=True, slots=True)
class _Answer:
    server: RecordedVllm
    model: str
    is_chat: bool
    content: str
    num_prompt_tokens: int
    num_tokens: int

    async def tokens(self) -> AsyncIterator[str]:
        options = self.server.options
        await asyncio.sleep(options.prefill_s)
        for number in range(self.num_tokens):
            if number:
                await asyncio.sleep(options.decode_s)
            yield self.content if not number else " t"

    async def whole(self) -> web.Response:
        text = "".join([token async for token in self.tokens()])
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice |= {"text": text, "token_ids": None, "prompt_token_ids": None}
        usage = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }
        head = self._head()
        return _json({**head, "choices": [choice], "service_tier": None, "usage": usage})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        number = 0
        async for token in self.tokens():
            number += 1
            text = {"delta": {"content": token}} if self.is_chat else {"text": token}
            reason = "length" if number == self.num_tokens else None
            choice = {"index": 0, **text, "logprobs": None, "finish_reason": reason}
            event = {**self._head(), "choices": [choice]}
            with contextlib.suppress(ConnectionError):
                await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        with contextlib.suppress(ConnectionError):
            await response.write(b"data: [DONE]\n\n")
        return response

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": "cmpl-8f211b1f9c8149ac",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }


def _refused(status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return _json({"error": error}, status)


def _json(value: Mapping[str, Any], status: int = 200) -> web.Response:
    """Without spaces, as vLLM writes it."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


def vllm_card(url: str) -> EngineCard:
    """Return a server like that as an engine."""
    foreign = ForeignEngine(
        kind="vllm",
        base_fingerprint="base-1",
        dtype=profile_of().dtype,
        adapter_bytes_per_rank=1000,
        kv_bytes_per_token=512,
        max_num_batched_tokens=512,
        max_num_seqs=16,
    )
    return EngineCard(engine_id=url, url=url, foreign=foreign)


class VllmProcess:
    """One as a process of its own, which can be killed and stopped, and begin again."""

    def __init__(self, port: int, options: VllmOptions) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-P", "-m", "support.recorded_vllm", str(port)]
        tests = str(Path(__file__).parents[1])
        self.process = subprocess.Popen(
            [*command, json.dumps(asdict(options))], env={"PYTHONPATH": tests, "PATH": ""}
        )

    def wait(self) -> None:
        _wait(self.url)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def vllm_in_a_thread(options: VllmOptions) -> Iterator[str]:
    """The URL of one that outlives event loops of the test."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    with bind("127.0.0.1", 0) as sock:
        serving_it = _serve(sock, options, stop)
        thread = threading.Thread(target=loop.run_until_complete, args=(serving_it,))
        thread.start()
        try:
            _wait(url_of(sock))
            yield url_of(sock)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(_START_TIMEOUT_S)
            loop.close()


def _wait(url: str) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1.0).close()
        except OSError:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        else:
            return


async def _serve(sock: socket.socket, options: VllmOptions, stop: asyncio.Event) -> None:
    listen(sock)
    await serve_app(RecordedVllm(options).app(), sock, stop, drain_timeout_s=0.1)


def _main(port: int, options: VllmOptions) -> None:
    with bind("127.0.0.1", port) as sock:
        asyncio.run(_serve(sock, options, asyncio.Event()))


if __name__ == "__main__":
    _main(int(sys.argv[1]), VllmOptions(**json.loads(sys.argv[2])))
