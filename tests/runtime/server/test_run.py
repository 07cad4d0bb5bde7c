"""``serve``: checks before the model is loaded, signals before it is ready, and its ends."""

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import httpx
import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import ConfigError, EngineDeadError, EngineHungError, ModelError
from corun.runtime.exit_codes import EXIT_ENGINE_HUNG
from corun.runtime.server.listening import allow_descriptors, bind, listen, url_of
from corun.runtime.server.run import serve
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


class FailingClient:
    """An engine that does not start."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.closed = False

    async def start(self, on_message: Any, on_death: Any) -> NoReturn:
        raise ModelError("the weights are torn")

    def send(self, message: Any) -> None:
        raise AssertionError("nothing is sent to an engine that did not start")

    async def close(self) -> None:
        self.closed = True


def no_client(config: EngineConfig) -> NoReturn:
    raise AssertionError("the engine must not be started")


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* in use.*--port"):
            asyncio.run(serve(EngineConfig(), ServeConfig(port=port), make_client=no_client))


def test_port_taken_meanwhile() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(ConfigError, match="--port"):
            listen(second)


def test_no_such_host() -> None:
    with pytest.raises(ConfigError, match="--host"):
        asyncio.run(serve(EngineConfig(), ServeConfig(host="256.1.2.3"), make_client=no_client))
    with pytest.raises(ConfigError, match="--host"):
        bind("192.0.2.1", 0)


def test_urls() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"),
    [(1024, 4096, 2256), (1024, -1, 2256), (-1, -1, None), (4096, 4096, None), (1024, 2000, 2000)],
)
def test_open_files(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    allowed: int | None,
) -> None:
    set_limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_limits.append(limits))
    allow_descriptors(2000)
    assert set_limits == ([] if allowed is None else [(allowed, hard)])
    warned = [record.message for record in caplog.records]
    assert warned == [] if allowed != 2000 else "--max-connections" in warned[0]


def test_missing_chat_template(tmp_path: Path) -> None:
    config = ServeConfig(port=0, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match=r"--chat-template .*none\.jinja"):
        asyncio.run(serve(EngineConfig(), config, make_client=no_client))


def test_response_template_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    config = ServeConfig(port=0, response_template=str(path))
    with pytest.raises(ConfigError, match=r"--response-template .*answers\.json' cannot be read"):
        asyncio.run(serve(EngineConfig(), config, make_client=no_client))
    path.write_text('{"start_anchor": "x"}')
    with pytest.raises(ConfigError, match=r"answers\.json' cannot be used: it has no fields"):
        asyncio.run(serve(EngineConfig(), config, make_client=no_client))


def test_failed_start_closes_the_engine() -> None:
    clients = []

    def make_client(config: EngineConfig) -> Any:
        clients.append(FailingClient(config))
        return clients[0]

    with pytest.raises(ModelError, match="torn"):
        asyncio.run(serve(EngineConfig(), ServeConfig(port=0), make_client=make_client))
    assert clients[0].closed


@contextmanager
def running(script: str, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    """Run ``script``; yield the process and its output, and kill it at the end."""
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            process.kill()


_STARTING_SERVER = """
import asyncio
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.server.run import serve

class Client:
    def __init__(self, config):
        self.config = config
    async def start(self, on_message, on_death):
        print("starting", flush=True)
        await asyncio.Event().wait()
    def send(self, message): ...
    async def close(self):
        print("closed", flush=True)

raise SystemExit(asyncio.run(serve(EngineConfig(), ServeConfig(port=0), make_client=Client)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_before_ready(number: signal.Signals) -> None:
    with running(_STARTING_SERVER) as (process, output):
        assert output.readline() == "starting\n"
        process.send_signal(number)
        assert output.read() == "closed\n"
        assert process.wait(timeout=20) == 0


_WHOLE_SERVER = """
import asyncio, logging, sys
from pathlib import Path
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.engine.messages import (
    AbortRequests, AddRequests, EngineStats, MachineReport, ModelInfo, Ready, RequestUpdate,
    StepOutputs, TokenizerSpec,
)
from corun.runtime.scheduler.step_times import LearnedTimes
from corun.runtime.server.run import serve

class Client:
    def __init__(self, config):
        self.config = config

    async def start(self, on_message, on_death):
        self.on_message = on_message
        self.generating = {}
        return Ready(ModelInfo(
            name="words", dtype="float32", device="cpu", max_model_len=1 << 30,
            max_num_batched_tokens=512, vocab_size=3, eos_token_ids=(0,),
            default_sampling={}, kv_capacity_tokens=1, memory_bytes=1,
            max_num_waiting=1, model_path="words", device_choices={}, backends={},
            summary=("a summary of the model",),
        ), (), MachineReport(LearnedTimes(1).machine_model(), 1e8, 1, is_measured=False),
            TokenizerSpec(Path(sys.argv[1]).read_text(), {}, None))

    def send(self, message):
        match message:
            case AddRequests(requests=requests):
                for request in requests:
                    key = request.request_id
                    self.generating[key] = asyncio.ensure_future(self.generate(key))
            case AbortRequests(request_ids=keys):
                for key in keys:
                    self.generating[key].cancel()

    async def generate(self, key):
        while True:
            self.on_message(StepOutputs((RequestUpdate(key, (1,)),)))
            await asyncio.sleep(0.01)

    async def close(self):
        logging.info("closed")

logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
config = ServeConfig(port=0, drain_timeout_s=0.2)
raise SystemExit(asyncio.run(serve(EngineConfig(), config, make_client=Client)))
"""


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A tokenizer of three words."""
    backend = Tokenizer(WordLevel({"<end>": 0, "again": 1, "hello": 2}, unk_token="<end>"))
    backend.pre_tokenizer = Whitespace()
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


def test_sigterm_ends_a_server_that_serves(tokenizer_file: Path) -> None:
    """From the start to the exit code with real signals; only the engine is a fake."""
    with running(_WHOLE_SERVER, str(tokenizer_file)) as (process, output):
        assert output.readline() == "a summary of the model\n"
        url = output.readline().split()[-1]
        body = {"prompt": "hello", "stream": True, "max_tokens": 1_000_000}
        with httpx.stream("POST", url + "/completions", json=body, timeout=20) as response:
            lines = response.iter_lines()
            assert '"text":" again"' in next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "again" in rest[0]
        assert "--drain-timeout-s" in rest[-1]
        assert output.read().splitlines()[-1] == "closed"
        assert process.wait(timeout=20) == 0


WAIT = Callable[..., None]
START = Callable[..., Any]


class Posted:
    """A request for completions on its way, in a thread."""

    def __init__(self, server: Any, **fields: Any) -> None:
        body = {"prompt": "hello", "max_tokens": 40} | fields
        self._thread = threading.Thread(target=self._post, args=(server.url, body))
        self._thread.start()

    def _post(self, url: str, body: dict[str, Any]) -> None:
        self._response = httpx.post(url + "/v1/completions", json=body, timeout=20)

    def result(self) -> httpx.Response:
        self._thread.join(timeout=20)
        return self._response


def last_event(response: httpx.Response) -> str:
    return response.text.split("\n\n")[-2].removeprefix("data: ")


def test_idle_server_stops(supervised: START) -> None:
    server = supervised(drain_timeout_s=5)
    assert httpx.get(server.url + "/health").status_code == 200
    server.signal()
    assert server.join() == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url + "/health")


def test_running_requests_finish(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=20)
    server.engine.held.set()
    posted = [Posted(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.engine.num_open == 2)
    server.signal()
    wait_until(lambda: server.state.draining)
    assert httpx.get(server.url + "/ready").status_code == 503
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}).status_code == 503
    server.engine.held.clear()
    whole, streamed = (one.result() for one in posted)
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert last_event(streamed) == "[DONE]"
    assert server.join() == 0


def check_cut(server: Any, posted: list[Posted]) -> None:
    whole, streamed = (one.result() for one in posted)
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "shutting_down"
    error = json.loads(last_event(streamed))["error"]
    assert error["code"] == "shutting_down"
    assert "--drain-timeout-s" in error["message"]
    assert server.join() == 0
    assert server.engine.num_open == 0


def test_requests_are_cut_at_the_deadline(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=0.1)
    server.engine.held.set()
    posted = [Posted(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.engine.num_open == 2)
    server.signal()
    check_cut(server, posted)


def test_second_signal_cuts_at_once(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=1000)
    server.engine.held.set()
    posted = [Posted(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.engine.num_open == 2)
    server.signal()
    wait_until(lambda: server.state.draining)
    server.signal()
    check_cut(server, posted)


@pytest.mark.parametrize("silently", [False, True])
def test_engine_death(supervised: START, wait_until: WAIT, silently: bool) -> None:
    server = supervised(drain_timeout_s=1000)
    server.engine.held.set()
    server.engine.dies_silently = silently
    posted = [Posted(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.engine.num_continued >= 2)
    server.engine.error = EngineDeadError("the engine process 7 was killed by SIGKILL")
    whole, streamed = (one.result() for one in posted)
    assert whole.status_code == 503
    assert "SIGKILL" in whole.json()["error"]["message"]
    assert json.loads(last_event(streamed))["error"]["code"] == "engine_dead"
    assert server.join() == 1


def test_an_engine_that_hangs_has_an_exit_code_of_its_own(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=1000)
    server.engine.held.set()
    posted = Posted(server, stream=True)
    wait_until(lambda: server.engine.num_continued >= 1)
    server.engine.error = EngineHungError("the engine has made no progress for 120 s")
    error = json.loads(last_event(posted.result()))["error"]
    assert "no progress for 120 s" in error["message"]
    assert server.join() == EXIT_ENGINE_HUNG


def test_engine_death_while_draining(supervised: START, wait_until: WAIT) -> None:
    server = supervised(drain_timeout_s=1000)
    server.engine.held.set()
    posted = Posted(server)
    wait_until(lambda: server.engine.num_open == 1)
    server.signal()
    wait_until(lambda: server.state.draining)
    server.engine.error = EngineDeadError("killed")
    assert posted.result().status_code == 503
    assert server.join() == 1
