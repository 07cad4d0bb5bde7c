"""A fake engine behind the real HTTP server: deterministic text, controllable speed and faults."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from corun.runtime.engine.messages import AdapterInfo, EngineStats, ModelInfo
from corun.runtime.errors import (
    AdapterError,
    CorunError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from corun.runtime.frontend.outputs import (
    AdapterStart,
    ChoiceHistory,
    CompletionOutput,
    Logprob,
    LoRARequest,
    RequestOutput,
)
from corun.runtime.sampling import SamplingParams
from corun.runtime.server.app import build_app
from corun.runtime.server.listening import bind
from corun.runtime.server.state import AppSettings, ServerState, make_state
from corun.runtime.server.stop import StopSignals
from corun.runtime.server.supervise import supervise

BASE_NAME = "tiny"
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 0x110000  # a token is a character


class FakeTokenizer:
    """One token per character; the chat template writes role and content."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> str:
        text: str = template_arguments.get("preamble", "")
        for message in messages:
            if message["content"] == "refuse me":
                raise RequestError(
                    "the model's chat template refuses the messages: roles must alternate",
                    param="messages",
                )
            text += f"<{message['role']}>{message['content']}"
        return text + ("<assistant>" if add_generation_prompt else "")

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1, *map(ord, text)] if add_special_tokens else list(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


def expected_text(prompt: str, num_tokens: int, *, adapter: str = "base", choice: int = 0) -> str:
    """Return what the fake engine says: the same characters over and over."""
    phrase = f'{adapter}/{choice}/{prompt[-8:]}€\n"{{ '
    return (phrase * (num_tokens // len(phrase) + 1))[:num_tokens]


class FakeEngine:
    """Satisfies ``EnginePort``. Attributes may be changed while the server runs."""

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.reset()

    def reset(self) -> None:
        """Go back to how a new engine is."""
        self.error: CorunError | None = None
        self.stats = EngineStats(
            num_running=2, num_waiting=1, kv_blocks_used=25, kv_blocks_total=100,
            num_preemptions=3, running_adapters=("upper",), waiting_adapters=("digits",),
        )  # fmt: skip
        self.adapters = {
            "upper": make_adapter("upper", rank=8),
            "digits": make_adapter("digits", rank=64, resident=False),
            "broken": make_adapter("broken", state="failed", reason="rank 512 is over the limit"),
        }
        self.default_sampling: dict[str, float] = {"temperature": 0.5, "top_k": 20.0}
        self.tokens_per_output = 3
        self.max_open = 1000
        self.fail_after_tokens: int | None = None
        self.num_steps = 0  # told when asked
        self.held = threading.Event()  # while set, requests make no progress
        self.hold_after_first = True  # held requests give their first output
        self.dies_silently = False  # requests do not notice that the engine is dead
        self.num_open = 0
        self.num_continued = 0  # outputs asked for after a first one
        self.num_aborted = 0
        self.seen: list[tuple[str | list[int], SamplingParams, str | None, str]] = []

    def get_model_info(self) -> ModelInfo:
        return ModelInfo(
            name="demo/tiny", dtype="float32", device="cpu", max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE, eos_token_ids=(0,), default_sampling=self.default_sampling,
            kv_capacity_tokens=1600, memory_bytes=1 << 30, max_num_waiting=8,
            model_path="demo/tiny", device_choices={"signal": "host", "link": "unpaced"},
            summary=("tiny model", "on cpu"),
        )  # fmt: skip

    def get_stats(self) -> EngineStats:
        return self.stats

    async def refresh_stats(self, timeout_s: float) -> EngineStats:
        self.stats = msgspec.structs.replace(self.stats, num_steps=self.num_steps)
        return self.stats

    async def wait_dead(self) -> CorunError:
        while self.error is None:
            await asyncio.sleep(0.005)
        return self.error

    def list_loras(self) -> tuple[AdapterInfo, ...]:
        return tuple(self.adapters.values())

    async def add_lora(self, lora_request: LoRARequest, *, reload: bool = False) -> None:
        if "missing" in lora_request.lora_path:
            raise AdapterError(f"there is no directory {lora_request.lora_path!r}")
        name = lora_request.lora_name
        self.adapters[name] = make_adapter(name, path=lora_request.lora_path)

    async def remove_lora(self, lora_name: str) -> None:
        del self.adapters[lora_name]

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: str | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        self.seen.append((prompt, sampling_params, lora_request, cache_salt))
        prompt_ids = list(map(ord, prompt)) if isinstance(prompt, str) else prompt
        if len(prompt_ids) >= MAX_MODEL_LEN:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, the limit is {MAX_MODEL_LEN - 1}",
                param="prompt",
            )
        if self.num_open >= self.max_open:
            raise OverloadedError(f"{self.max_open} requests are waiting (--max-num-waiting)")
        self.num_open += 1
        try:
            choices = [
                _FakeChoice(prompt_ids, sampling_params, index, lora_request or "base")
                for index in range(sampling_params.n)
            ]
            while not all(choice.finish_reason for choice in choices):
                await self._pause(choices[0].num_tokens)
                outputs = [choice.advance(self.tokens_per_output) for choice in choices]
                finished = all(choice.finish_reason for choice in choices)
                yield RequestOutput(request_id, None, prompt_ids, outputs, finished, lora_request)
        except (GeneratorExit, asyncio.CancelledError):
            self.num_aborted += 1
            raise
        finally:
            self.num_open -= 1

    async def _pause(self, num_tokens: int) -> None:
        await asyncio.sleep(0)
        if self.fail_after_tokens is not None and num_tokens >= self.fail_after_tokens:
            raise CorunError("the step fell over")
        held_at = 1 if self.hold_after_first else 0
        # Whoever asks for more has written what came before.
        self.num_continued += num_tokens > 0
        while num_tokens >= held_at and self.held.is_set() and not self._dies_loudly():
            await asyncio.sleep(0.005)
        if self._dies_loudly():
            raise EngineDeadError(str(self.error))

    def _dies_loudly(self) -> bool:
        return self.error is not None and not self.dies_silently


class _FakeChoice:
    """One choice on its way to its last token."""

    def __init__(
        self, prompt_ids: list[int], params: SamplingParams, index: int, adapter: str
    ) -> None:
        prompt = "".join(map(chr, prompt_ids))
        limit = params.max_tokens or MAX_MODEL_LEN - len(prompt_ids)
        text = expected_text(prompt, limit, adapter=adapter, choice=index)
        found = [(text.find(stop), stop) for stop in params.stop if stop in text]
        self._stop = min(found)[1] if found else None
        self._text = text[: min(found)[0]] if found else text
        self._params = params
        self._index = index
        self._start = AdapterStart("assisted", "told to") if adapter == "digits" else None
        self._history = ChoiceHistory(logprobs=None if params.logprobs is None else [])
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def advance(self, num_tokens: int) -> CompletionOutput:
        new = self._text[self.num_tokens : self.num_tokens + num_tokens]
        self.num_tokens += len(new)
        self._history.token_ids.extend(map(ord, new))
        self._history.pieces.extend(new)
        logprobs = [self._candidates(character) for character in new]
        if self._history.logprobs is not None:
            self._history.logprobs.extend(logprobs)
        if self.num_tokens == len(self._text):
            self.finish_reason = "length" if self._stop is None else "stop"
        return CompletionOutput(
            index=self._index,
            new_text=new,
            new_token_ids=list(map(ord, new)),
            new_logprobs=None if self._params.logprobs is None else logprobs,
            cumulative_logprob=None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop if self.finish_reason else None,
            history=self._history,
            num_pieces=self.num_tokens,
            num_tokens=self.num_tokens,
            adapter_start=self._start,
        )

    def _candidates(self, character: str) -> dict[int, Logprob]:
        """The drawn token has rank 2; a part of a character is among the others."""
        candidates = {ord(character): Logprob(-0.75, 2, character)}
        others = [Logprob(-0.25, 1, "bytes:\\xe2\\x82"), Logprob(-2.0, 3, "zz")]
        wanted = [other for other in others if other.rank <= (self._params.logprobs or 0)]
        return candidates | {-other.rank: other for other in wanted}


def make_adapter(
    name: str,
    *,
    path: str | None = None,
    state: str = "ready",
    reason: str | None = None,
    rank: int = 8,
    resident: bool = True,
) -> AdapterInfo:
    """Return an adapter as the engine reports it."""
    return AdapterInfo(
        name=name, path=path or f"/adapters/{name}", state=state, reason=reason, rank=rank,
        num_bytes=1 << 20, version="0123abcd", resident=resident,
    )  # fmt: skip


class RunningServer:
    """An application behind uvicorn, on a free port, in a thread of its own."""

    def __init__(self, engine: FakeEngine, settings: AppSettings) -> None:
        self.engine = engine
        self.state: ServerState = make_state(engine, settings, now_s=1_700_000_000)
        config = uvicorn.Config(
            build_app(self.state), host="127.0.0.1", port=0, log_config=None, lifespan="off",
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._started = threading.Event()

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.port = port

    def is_writing_paused(self) -> bool:
        """Whether a client does not read what it is sent."""
        connections: Any = tuple(self._server.server_state.connections)
        return any(connection.flow.write_paused for connection in connections)

    def stop(self) -> None:
        self.engine.held.clear()
        self._server.should_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


class SupervisedServer:
    """The whole life of a server, from listening to its exit code, in a thread."""

    def __init__(self, engine: FakeEngine, *, drain_timeout_s: float) -> None:
        self.engine = engine
        self.exit_code: int | None = None
        self._drain_timeout_s = drain_timeout_s
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(timeout=10)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = StopSignals()
        self.state = make_state(self.engine, DEFAULT_SETTINGS, now_s=0)
        with bind("127.0.0.1", 0) as sock:
            self.port = sock.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            self._loop.call_soon(self._ready.set)
            self.exit_code = await supervise(
                self.state, sock, self._stop, drain_timeout_s=self._drain_timeout_s
            )

    def signal(self) -> None:
        """Do what SIGTERM does."""
        self._loop.call_soon_threadsafe(self._stop.receive)

    def join(self) -> int | None:
        """Wait for the end and return the exit code."""
        self._thread.join(timeout=15)
        assert not self._thread.is_alive()
        return self.exit_code


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Wait until ``condition`` holds; fail if it never does."""
    waiter = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        waiter.wait(0.005)
    raise AssertionError("the condition did not come about")


@contextmanager
def running_server(engine: FakeEngine, settings: AppSettings) -> Iterator[RunningServer]:
    """Run a server for the duration of a block."""
    server = RunningServer(engine, settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


DEFAULT_SETTINGS = AppSettings(
    served_names=(BASE_NAME, "alias"), version="1.2.3", max_body_bytes=100_000
)


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Start servers with settings of one's own; they stop with the test."""
    with ExitStack() as stack:

        def start(engine: FakeEngine, **changes: Any) -> RunningServer:
            settings = dataclasses.replace(DEFAULT_SETTINGS, **changes)
            return stack.enter_context(running_server(engine, settings))

        yield start


@pytest.fixture
def supervised() -> Callable[..., SupervisedServer]:
    """Start a server that is supervised; the test must bring it to its end."""
    return lambda **options: SupervisedServer(FakeEngine(), **options)


@pytest.fixture(scope="module")
def module_server() -> Iterator[RunningServer]:
    """One server for a module: starting and stopping takes most of a short test's time."""
    with running_server(FakeEngine(), DEFAULT_SETTINGS) as running:
        yield running


@pytest.fixture
def server(module_server: RunningServer) -> RunningServer:
    """A server with default settings, as good as new."""
    module_server.engine.held.clear()
    wait_until(lambda: module_server.engine.num_open == 0)
    module_server.engine.reset()
    module_server.state.draining = False
    return module_server


@pytest.fixture
def engine(server: RunningServer) -> FakeEngine:
    """The fake engine behind ``server``."""
    return server.engine


@pytest.fixture(scope="module")
def module_http(module_server: RunningServer) -> Iterator[httpx.Client]:
    """One client for a module: making one reads all certificates of the machine."""
    with httpx.Client(base_url=module_server.url, timeout=20) as client:
        yield client


@pytest.fixture
def http(server: RunningServer, module_http: httpx.Client) -> httpx.Client:
    """A plain HTTP client of ``server``."""
    return module_http


@pytest.fixture(scope="session", name="expected_text")
def expected_text_function() -> Callable[..., str]:
    """The function that says what the fake engine generates."""
    return expected_text


@pytest.fixture(scope="session", name="wait_until")
def wait_until_function() -> Callable[..., None]:
    """The function that waits for a condition."""
    return wait_until
