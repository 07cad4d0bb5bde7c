"""``serve``: what is checked before the model is loaded, and signals before it is ready."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import ConfigError, ModelError
from corun.runtime.server.listening import bind, listen, url_of
from corun.runtime.server.run import serve


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


def test_missing_chat_template(tmp_path: Path) -> None:
    config = ServeConfig(port=0, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match=r"--chat-template .*none\.jinja"):
        asyncio.run(serve(EngineConfig(), config, make_client=no_client))


def test_failed_start_closes_the_engine() -> None:
    clients = []

    def make_client(config: EngineConfig) -> Any:
        clients.append(FailingClient(config))
        return clients[0]

    with pytest.raises(ModelError, match="torn"):
        asyncio.run(serve(EngineConfig(), ServeConfig(port=0), make_client=make_client))
    assert clients[0].closed


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
    command = [sys.executable, "-c", _STARTING_SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        process.send_signal(number)
        assert process.stdout.read() == "closed\n"
        assert process.wait(timeout=20) == 0
